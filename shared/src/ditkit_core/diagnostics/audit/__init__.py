"""The precision audit: one batch with one group of operations lowered at a time.

It may import the folders from run downwards. Start reading at audit.py.
"""
