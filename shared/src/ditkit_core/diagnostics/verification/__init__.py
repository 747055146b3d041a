"""Verifies the exports of a run with the program that will use them, while the run trains.

It may import the folders from run downwards. Start reading at verifier.py.
"""
