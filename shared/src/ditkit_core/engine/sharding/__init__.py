"""Weights and tokens divided over ranks, on PyTorch's FSDP2.

It may import what the engine may. Start reading at shards.py.
"""
