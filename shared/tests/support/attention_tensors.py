"""Small queries, keys and values, and a kernel that says that it ran."""

from typing import Any

import torch
from torch import Tensor


def qkv(dtype: torch.dtype = torch.float32, *, keys: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, length, 3, 8, generator=random).to(dtype) for length in (5, keys, keys)
    )
    return q, k, v


class Called(Exception):
    """The fake kernel ran."""


def fake_kernel(*given: Any) -> Tensor:
    raise Called
