"""What a run holds and how long it takes before it starts, and the placement that fits.

It may import the folders from run downwards. Start reading at plan.py.
"""
