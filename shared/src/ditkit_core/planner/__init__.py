"""Plans a run before it starts: its memory, its time, and the placement that fits.

It may import the folders from run downwards. Start reading at plan.py.
"""
