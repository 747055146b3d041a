"""Adapter files of all programs: their names of tensors, reading, writing, converting and
exporting.

It may import its siblings config, dora, inject and products. Start reading at read.py.
"""
