"""Triton kernels for the elementwise work of a block, each a single pass over memory where eager
torch takes several.

`ops.py` declares them as operations of torch, with their shapes, so that the planner can follow
them without a GPU. Each other file has the kernels of one computation. Start at `ops.py`. Only
`nn/functional.py`, `nn/lora.py`, `nn/quantized_linear.py`, `nn/eight_bit_products.py` and
`nn/stochastic_rounding.py` call them, and `nn/kernel_check.py`, which compares with the same in
torch.
"""
