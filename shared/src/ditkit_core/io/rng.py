"""Random numbers as a function of names, not of history.

Noise, noise levels, data order and dropout are sampled from generators that are seeded by their
purpose: (seed, step, sample). So resuming, previews, workers and caches cannot change them, and no
generator state has to be saved.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed from names and numbers, the same on all platforms and in all versions."""
    # Python's hash() of a text differs from process to process.
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded by names; sampled on the CPU, the numbers are the same whatever device
    trains."""
    return torch.Generator().manual_seed(seed_of(*parts))


@contextmanager
def seeded(device: torch.device, *parts: int | str) -> Iterator[None]:
    """Seed torch's own generators by names inside the `with` block, for a library's module that
    takes no generator. Afterwards the CPU's and the device's are as before."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed_of(*parts))
        yield
