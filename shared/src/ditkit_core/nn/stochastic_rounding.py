"""Writing fp32 results back into bf16 weights without losing what is smaller than their spacing.

bf16 keeps 8 bits of a fraction: an update below about 1/512 of a weight is lost by rounding to nearest, and most updates of a fine-tune
are. Two remedies, both over an optimizer that computes in fp32:

- stochastic: up with the probability that is the share of the way to the next value, so that the mean of what is written is the value.
  No state. A weight that bf16 holds exactly stays as it is.
- split: the bits that bf16 drops are kept in another 2 bytes per weight, in the optimizer's state. Together they are exact fp32 master
  weights in 4 bytes, where a bf16 copy beside fp32 ones takes 6. It is what Kahan summation would be used for: that keeps a bf16
  remainder in the same 2 bytes, and so 16 bits of a fraction instead of 24.

Why not torchao's `bf16_stochastic_round`: it draws from torch's global generator, so that its bits depend on what was drawn before
them, on the kind of device and on the order of parameters; it is there for its own Adam alone; and its optimizers keep their state in
the parameter's dtype, bf16. Here the bits are a function of (key, place in the tensor), computed with 32-bit integer operations that
are exact on every device: resumed, streamed and divided runs write the same weights.
"""

import math
from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

Rounding = Literal["nearest", "stochastic", "split"]

_AT_ONCE = 2**23
"""Values rounded at once: it bounds what is held beside them to 96 MiB. Part of what is drawn: never to be changed."""

_KEPT = -1 << 16
"""The bits of an fp32 number that bf16 has."""


def random_bits(count: int, key: int, device: torch.device | str, *, start: int = 0) -> Int[Tensor, "count"]:
    """Numbers of 0 to 65535, int32, as a function of `key` and the place alone.

    A counter is mixed with the halves of the key by the 32-bit finalizer `lowbias32` in its later constants (C. Wellons, "hash-prospector":
    every bit of the result depends on every bit of the input within 0.11 % of one half), twice; each result gives two numbers.

    Args:
        count: How many.
        key: 0 to 2**64 - 1, itself well mixed, as `seed_of` is.
        device: Where.
        start: First value of the counter, which gives two numbers each time.
    """
    half = (count + 1) // 2
    mixed = torch.arange(start, start + half, dtype=torch.int32, device=device)
    for word in (key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF):
        mixed.bitwise_xor_(_signed(word))
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
            # int32 shifts fill up with the sign
            mixed.bitwise_xor_((mixed >> shift).bitwise_and_((1 << 32 - shift) - 1))
            if factor != 1:
                mixed.mul_(factor)  # wraps around
    bits = torch.empty(count, dtype=torch.int32, device=device)
    bits[:half] = mixed
    bits[half:] = (mixed >> 16)[: count - half]
    return bits.bitwise_and_(0xFFFF)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


@torch.no_grad()
def write_stochastic(weight: Tensor, values: Tensor, key: int) -> None:
    """Round values into a bf16 weight, up or down at random; the mean is the value.

    Args:
        weight: bf16, any shape, written in place.
        values: fp32, of its shape; used up.
        key: Decides the random bits, 0 to 2**64 - 1: one for each tensor and step, as `seed_of` gives it.
    """
    flat = values.contiguous().view(-1)
    for start, bits in _parts(flat):
        bits.add_(random_bits(bits.numel(), key, weight.device, start=start // 2)).bitwise_and_(_KEPT)
    weight.copy_(flat.view(values.shape))  # exact by now


def _parts(flat: Float[Tensor, "count"]) -> Iterator[tuple[int, Int[Tensor, "part"]]]:
    """Where each part starts, and its bits, shared with it; a NaN has some by which no sum carries into the sign, to leave a zero."""
    assert flat.dtype == torch.float32, flat.dtype
    for start in range(0, flat.numel(), _AT_ONCE):
        part = flat[start : start + _AT_ONCE]
        yield start, part.masked_fill_(part.isnan(), math.nan).view(torch.int32)


@torch.no_grad()
def write_split(weight: Tensor, values: Tensor, rest: Tensor) -> None:
    """Round values into a bf16 weight to nearest (ties away from zero), and keep what `joined` needs to have them back.

    Args:
        weight: bf16, any shape, written in place.
        values: fp32, of its shape; used up.
        rest: int16, of its shape, contiguous, written in place: by how many of fp32's steps the value is beyond the weight.
    """
    flat, flat_rest = values.contiguous().view(-1), rest.view(-1)
    for start, bits in _parts(flat):
        upper = (bits + (1 << 15)).bitwise_and_(_KEPT)
        flat_rest[start : start + bits.numel()] = bits - upper
        bits.copy_(upper)
    weight.copy_(flat.view(values.shape))  # exact by now


@torch.no_grad()
def joined(weight: Tensor, rest: Tensor | None) -> Tensor:
    """The values that were split, to the bit; those of the weight where there is no rest. fp32, in memory of their own."""
    values = weight.float()
    if rest is not None:
        values.view(torch.int32).add_(rest)
    return values
