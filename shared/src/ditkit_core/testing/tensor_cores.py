"""A GPU's products of bf16 matrices, on a CPU."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class TensorCores(TorchDispatchMode):
    """Products of bf16 with sums that are not rounded before the end: the CPU has no kernel with a wider result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.dtype:
            a, b, dtype = args
            return (a.double() @ b.double()).to(dtype)
        if func is torch.ops.aten.addmm_.default:
            out, a, b = args
            return out.copy_(out.double() + a.double() @ b.double())
        if func is torch.ops.aten.mm.default and args[0].dtype == torch.bfloat16:
            return (args[0].double() @ args[1].double()).bfloat16()
        return func(*args, **(kwargs or {}))
