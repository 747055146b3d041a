"""The transformer of Wan: embed, blocks and head, and the carry between them.

Upstream names of blocks and parameters. Start reading at transformer.py.
"""
