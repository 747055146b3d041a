"""Tensors from files into modules: loading, quantization, streaming of frozen encoders.

It may import the folders from nn downwards. Start reading at load.py.
"""
