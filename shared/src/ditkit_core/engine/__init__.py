"""How blocks are run: activation checkpointing, offload, block swap, placement over devices.

It may import the folders from distributed downwards. Start reading at engine.py.
"""
