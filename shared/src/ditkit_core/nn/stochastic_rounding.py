"""Writes fp32 results into bf16 weights without losing updates that are smaller than bf16's
spacing.

bf16 has 8 significant bits: rounding to nearest loses an update below about 1/512 of a weight, and
most updates of a fine-tune are. There are two remedies, both for an optimizer that computes in
fp32:

- stochastic: round up with a probability equal to the fraction of the way to the next value, so
  that the mean of the results is the value. It needs no state. A value that bf16 represents exactly
  stays as it is.
- split: another 2 bytes per weight in the optimizer's state keep the bits that bf16 drops. Both
  together are exact fp32 master weights in 4 bytes, where a bf16 copy next to fp32 weights takes 6.
  It has the purpose of Kahan summation, which keeps a bf16 remainder in the same 2 bytes, and so 16
  significant bits instead of 24.

Why not torchao's `bf16_stochastic_round`: it uses torch's global generator, so its bits depend on
every earlier random number, on the kind of device and on the order of parameters. It is there for
torchao's own Adam alone, and torchao's optimizers keep their state in the parameter's dtype, bf16.
Here the bits are a function of (key, index in the tensor), computed with 32-bit integer operations
that are exact on every device: resumed, streamed and split runs write the same weights.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ditkit_core.nn.kernels import ops as kernels

_AT_ONCE = 2**23
"""Number of values that are rounded at once, which bounds temporary memory to 96 MiB. It is part of
the random sequence: never change it."""

_KEPT = -1 << 16
"""Mask of the bits of an fp32 number that bf16 keeps."""


def random_bits(
    count: int, key: int, device: torch.device | str, *, start: int = 0
) -> Int[Tensor, " count"]:
    """Random numbers of 16 bits, int32 from 0 to 65535, as a function of `key` and the index alone.

    A counter is mixed twice, with each half of the key, by the 32-bit finalizer `lowbias32`; each
    result gives two numbers.

    Args:
        key: 0 to 2**64 - 1, itself well mixed, like the result of `seed_of`.
        start: First value of the counter; each value gives two numbers.

    Source: `lowbias32` with its later constants in C. Wellons, "hash-prospector": each bit of the
        result depends on each bit of the input with a probability within 0.11 % of one half.
    """
    half = (count + 1) // 2
    state = torch.arange(start, start + half, dtype=torch.int32, device=device)
    for word in _words(key):
        state.bitwise_xor_(word)
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
            # an int32 shift right fills with the sign bit; the mask clears those bits
            state.bitwise_xor_((state >> shift).bitwise_and_((1 << 32 - shift) - 1))
            if factor != 1:
                state.mul_(factor)  # overflow wraps around, as the mixing needs
    bits = torch.empty(count, dtype=torch.int32, device=device)
    bits[:half] = state
    bits[half:] = (state >> 16)[: count - half]
    return bits.bitwise_and_(0xFFFF)


def _words(key: int) -> list[int]:
    """The lower and the upper half of a key, signed: torch takes Python's numbers into int32 only
    within its range."""
    return [
        word - (1 << 32) if word >> 31 else word
        for word in (key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF)
    ]


@torch.no_grad()
def write_stochastic(
    weight: Tensor,
    values: Tensor,
    key: int,
    *,
    start: int = 0,
    of: int | None = None,
    fused: bool = False,
) -> None:
    """Round values into a bf16 weight, up or down at random, with the value as mean.

    A part of a tensor is rounded as it would be with the whole, so that ranks that divide a weight
    write the same.

    Args:
        weight: bf16, any shape, written in place.
        values: fp32, of the same shape; overwritten.
        key: Determines the random bits, 0 to 2**64 - 1: one for each tensor and step, from
            `seed_of`.
        start: Place of the first value in the whole tensor.
        of: Number of values of the whole tensor; None: these are all.
        fused: Whether a kernel of our own does it, as in the functions below.
    """
    flat, of = values.contiguous().view(-1), values.numel() if of is None else of
    if fused and weight.is_contiguous():
        kernels.round_stochastic(weight.view(torch.int16), flat, *_words(key), start, of, _AT_ONCE)
        return
    # Random bits are a function of a value's place within its chunk of the whole tensor.
    for chunk in range(start - start % _AT_ONCE, start + flat.numel(), _AT_ONCE):
        low, high = max(chunk, start), min(chunk + _AT_ONCE, start + flat.numel())
        bits = _bits(flat[low - start : high - start])
        random = random_bits(min(_AT_ONCE, of - chunk), key, weight.device, start=chunk // 2)
        # Added below bf16's last bit, a random number carries into it with the wanted probability.
        # Clearing the rest truncates.
        bits.add_(random[low - chunk : high - chunk]).bitwise_and_(_KEPT)
    weight.copy_(flat.view(values.shape))  # exact by now


def _parts(flat: Float[Tensor, " count"]) -> Iterator[tuple[int, Int[Tensor, " part"]]]:
    """The start of each part, and its bits in the same memory."""
    for start in range(0, flat.numel(), _AT_ONCE):
        yield start, _bits(flat[start : start + _AT_ONCE])


def _bits(part: Float[Tensor, " count"]) -> Int[Tensor, " count"]:
    """The bits of fp32 numbers, in the same memory. All NaNs get one pattern: in others, a sum
    could carry into the sign and leave a zero."""
    assert part.dtype == torch.float32, part.dtype
    return part.masked_fill_(part.isnan(), math.nan).view(torch.int32)


@torch.no_grad()
def write_split(weight: Tensor, values: Tensor, rest: Tensor, *, fused: bool = False) -> None:
    """Round values into a bf16 weight to nearest (ties away from zero), and keep the remainder,
    from which `joined` restores the values.

    Args:
        weight: bf16, any shape, written in place.
        values: fp32, of the same shape; overwritten.
        rest: int16, of the same shape, contiguous, written in place: the remainder in units of
            fp32's spacing.
    """
    flat, flat_rest = values.contiguous().view(-1), rest.view(-1)
    if fused and weight.is_contiguous():
        kernels.round_split(weight.view(torch.int16), flat, rest)
        return
    for start, bits in _parts(flat):
        # As integers: fp32 values of one sign are ordered like their bits, and the difference is
        # exact.
        upper = (bits + (1 << 15)).bitwise_and_(_KEPT)
        flat_rest[start : start + bits.numel()] = bits - upper
        bits.copy_(upper)
    weight.copy_(flat.view(values.shape))  # exact by now


@torch.no_grad()
def joined(weight: Tensor, rest: Tensor | None, *, fused: bool = False) -> Tensor:
    """Restore split values, bitwise identical: fp32 in new memory; without a remainder the weight's
    values."""
    if fused and rest is not None and weight.is_contiguous():
        values = torch.empty_like(weight, dtype=torch.float32)
        kernels.join_split(values, weight.view(torch.int16), rest)
        return values
    values = weight.float()
    if rest is not None:
        values.view(torch.int32).add_(rest)
    return values
