"""Plans a training step before anything is loaded: its memory, its time, and the placement that
fits.

It may import the folders from training downwards. Start reading at plan.py.
"""
