"""Random numbers as a function of names, not of history.

Noise, noise levels, data order and dropout are drawn from generators seeded by what they are for: (seed, step, sample).
Resuming, previews, workers and caches therefore cannot change them, and nothing about them has to be saved.
"""

import hashlib

import torch


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed from names and numbers, stable over platforms and versions."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded by names: drawn on the CPU, the numbers are the same whatever device trains."""
    return torch.Generator().manual_seed(seed_of(*parts))
