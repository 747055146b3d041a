"""The transformer of FLUX.2: inputs, embedding, blocks and head, the carries between them, and
rotary positions.

Blocks and parameters have upstream's names. Start reading at transformer.py.
"""
