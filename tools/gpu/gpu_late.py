"""A model whose blocks are streamed, and ways to make its work and its copies late, so that
whatever does not wait for them shows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ditkit_core.engine import pinned_memory
from ditkit_core.engine.block_hooks import BlockHooks
from ditkit_core.engine.block_swap import BlockSwap
from ditkit_core.engine.placement import Placement


class Delay(BlockHooks):
    """Keeps a GPU busy for some time before every block, so that whatever does not wait for it
    shows."""

    def __init__(self, device: torch.device, cycles: int):
        self._device, self._cycles = device, cycles

    def pre_forward(self, index: int, block: nn.Module) -> None:
        """Before the block's forward."""
        _sleep(self._device, self._cycles)

    def pre_backward(self, index: int, block: nn.Module) -> None:
        """Before its backward."""
        _sleep(self._device, self._cycles)


def _sleep(device: torch.device, cycles: int) -> None:
    if device.type == "cuda" and cycles:
        torch.cuda._sleep(cycles)


@contextmanager
def late_copies(device: torch.device, cycles: int) -> Iterator[None]:
    """Has every copy of swap and offload begin late by some cycles of the GPU."""
    original = pinned_memory.CopyLane.copies

    @contextmanager
    def late(lane: pinned_memory.CopyLane) -> Iterator[None]:
        with original(lane):
            _sleep(device, cycles)
            yield

    pinned_memory.CopyLane.copies = late  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        pinned_memory.CopyLane.copies = original  # type: ignore[method-assign]


def swapped(model: Any, device: torch.device) -> BlockSwap:
    """A model with its trained parameters, embedding and head on the device, and all blocks
    streamed."""
    blocks = model.blocks()
    for stage in (model.embed, model.head):
        stage.to(device)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(device)
    every = range(len(blocks))
    return BlockSwap(
        model,
        Placement(
            embed=device, blocks=(device,) * len(blocks), head=device, streamed=frozenset(every)
        ),
    )
