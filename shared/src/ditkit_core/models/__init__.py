"""The contract that a model package implements: the staged model, its spec, encoders, state-dict
names and precision.

It may import the folders from documents downwards. Start reading at spec.py.
"""
