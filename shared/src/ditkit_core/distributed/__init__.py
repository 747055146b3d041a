"""All that knows of ranks, the processes that train one run together: what they exchange, and how
they divide tokens, weights and saves.

It may import the folders from nn downwards. Start reading at ranks.py; torchrun.py connects the
processes, shards.py divides weights with PyTorch's FSDP2.
"""
