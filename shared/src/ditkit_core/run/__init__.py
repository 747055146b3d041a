"""A configuration and a model family as a run: what it loads, encodes and checks; plans/ has what it needs.

It may import the folders from planner downwards. Start reading at context.py, then prepare.py.
"""
