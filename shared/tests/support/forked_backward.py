"""Forks processes whose backward starts autograd's threads of a GPU that fake tensors pretend; run
by `testing/test_forked.py`."""

import sys
import time
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ditkit_core.distributed.ranks import Ranks
from ditkit_core.testing.replicas import forked

FORKS = 20
"""Without its own thread pool, one in five of such processes aborted."""


def gradient(_: Ranks) -> list[float]:
    """Of a sum of squares, and a moment for threads that the backward does not wait for."""
    weight = torch.arange(3.0, requires_grad=True)
    weight.square().sum().backward()
    assert weight.grad is not None
    time.sleep(0.02)
    return weight.grad.tolist()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.get_num_threads()  # as any parallel op: else a fork sets its number again by itself
    with FakeTensorMode():
        torch.empty(1, device="cuda")
    for fork in range(FORKS):
        assert forked(1, gradient, Path(sys.argv[1]) / str(fork)) == [[0.0, 2.0, 4.0]]
