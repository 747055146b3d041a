"""Layers and functions that model code imports: attention, elementwise operations, LoRA and
quantized linear layers.

It may import the folders from models downwards. Start reading at attention/attention.py, then
functional.py.
"""
