"""A configuration and a model family as a run: what it loads, encodes and checks.

It may import the folders from training downwards. Start reading at context.py, then prepare.py.
"""
