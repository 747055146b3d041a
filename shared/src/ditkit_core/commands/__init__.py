"""The console commands, one file per verb, and their options.

It may import everything but testing. Start reading at cli.py.
"""
