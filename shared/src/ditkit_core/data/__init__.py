"""Reading a dataset folder into a checked list of samples.

It may import the folders from models downwards. Start reading at dataset.py.
"""
