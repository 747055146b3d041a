"""Samples of different size in one batch: padded at the end, and the padding hidden from attention."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor


def padding_mask(lengths: Sequence[int], device: torch.device) -> Bool[Tensor, "batch tokens"] | None:
    """False on the padding of samples shorter than the longest; None when all are of one size."""
    if len(set(lengths)) == 1:
        return None
    positions = torch.arange(max(lengths), device=device)
    return torch.stack([positions < length for length in lengths])
