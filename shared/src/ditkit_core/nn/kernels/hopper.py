"""Whether a kernel may take what only Hopper GPUs have: the shared memory, the copies of whole
tiles, and times that were measured there."""

from functools import cache

import torch
from torch import Tensor


def is_hopper(x: Tensor) -> bool:
    """Whether a tensor is on a GPU of compute capability 9.0: H100, H200, GH200."""
    return x.is_cuda and _capability(x.device) == (9, 0)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def multiprocessors(device: torch.device) -> int:
    """Number of a GPU's multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count
