"""Attention: one function for all blocks, and the kernels behind it.

It may import the sibling context. Start reading at attention.py.
"""
