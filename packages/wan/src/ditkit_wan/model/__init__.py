"""The transformer of Wan: inputs, embedding, blocks and head, the carry between them, and rotary
positions.

Blocks and parameters have upstream's names. variants/ has the modules of single variants. Start
reading at transformer.py.
"""
