"""Tensors from files into modules: loading, quantization, streaming of frozen encoders.

It may import the folders from distributed downwards. Start reading at load.py.
"""
