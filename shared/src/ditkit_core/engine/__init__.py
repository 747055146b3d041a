"""How blocks are run: activation checkpointing, compilation, offload, block swap, placement over devices, FSDP.

It may import the folders from nn downwards. Start reading at engine.py.
"""
