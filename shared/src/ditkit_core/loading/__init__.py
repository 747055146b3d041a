"""A model from its files: the architecture they have, the model on `meta`, and its weights on their
devices.

It may import the folders from adapters downwards. Start at model.py, then on_meta.py and
weights.py, in the order in which a model is loaded.
"""
