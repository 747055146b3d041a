"""Masks for samples of different size in one batch: padded at the end, with the padding hidden from
attention."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor


def padding_mask(
    lengths: Sequence[int], device: torch.device
) -> Bool[Tensor, "batch tokens"] | None:
    """The mask of a padded batch, from the number of tokens of each sample.

    Returns:
        False on the padding of samples that are shorter than the longest; None if all have one
        length.
    """
    # Without a mask attention has faster kernels to choose from, and some backends take none.
    if len(set(lengths)) == 1:
        return None
    positions = torch.arange(max(lengths), device=device)
    return torch.stack([positions < length for length in lengths])
