"""Samples of a run: while it trains, after it, and class images for prior preservation.

It may import the folders from run downwards. Start reading at generate.py, then manager.py.
"""
