"""A configuration and a model family as a run: what it loads, encodes and checks; plans/ has what it needs.

It may import the folders from api downwards. Start reading at context.py, then model.py.
"""
