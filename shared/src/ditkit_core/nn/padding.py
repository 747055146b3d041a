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


def joined_padding_mask(
    lengths: Sequence[Sequence[int]], device: torch.device
) -> Bool[Tensor, "batch all_tokens"] | None:
    """The mask of streams one after the other, each padded by itself, from the number of tokens of
    each sample in each stream; None if nothing is padded."""
    masks = [padding_mask(stream, device) for stream in lengths]
    if all(mask is None for mask in masks):
        return None
    parts = [
        torch.ones(len(stream), stream[0], dtype=torch.bool, device=device)
        if mask is None
        else mask
        for mask, stream in zip(masks, lengths, strict=True)
    ]
    return torch.cat(parts, 1)
