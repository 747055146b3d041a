"""Which device runs each stage of a model, and which blocks' weights are streamed through it.

A placement is data: it decides where weights are put when they are loaded, and nothing else. The engine follows the weights, so a
model that lies on one device is run as if there were no division.

The cuts are chosen from what each stage brings to its device. What stays there as long as training goes on, and what a forward keeps
for the backward, adds up over the stages of a device; what a stage needs only while it runs does not: the most that one of them needs
counts. Each device is full in proportion to what it can hold, and the fullest decides. Every device holds one block at least: who wants
a card left out names it not.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ditkit_core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A device for every stage."""

    embed: torch.device
    blocks: tuple[torch.device, ...]
    """In execution order."""
    head: torch.device
    streamed: frozenset[int] = frozenset()
    """Blocks whose weights stay on the host, and are on their device while they are used."""

    @property
    def cuts(self) -> tuple[int, ...]:
        """Blocks before which the next device begins."""
        return tuple(i for i in range(1, len(self.blocks)) if self.blocks[i] != self.blocks[i - 1])

    def described(self) -> str:
        """One line that says how a model is divided."""
        bounds = [0, *self.cuts, len(self.blocks)]
        spans = [f"{self.blocks[a]} blocks {a} to {b - 1}" for a, b in itertools.pairwise(bounds)]
        return f"divided over {len(spans)} devices: {', '.join(spans)}"

    def device_of(self, model: Any) -> Callable[[str], torch.device]:
        """The device of a parameter or module, by its name in the model.

        Raises:
            LookupError: From the function, for what is in no stage: a parameter of the model itself has no device.
        """
        where = {id(model.embed): self.embed, id(model.head): self.head}
        where |= {id(block): device for block, device in zip(model.blocks(), self.blocks, strict=True)}
        stages = {name: where[id(module)] for name, module in model.named_modules() if id(module) in where}

        def device_of(name: str) -> torch.device:
            for stage, device in stages.items():
                if f"{name}.".startswith(f"{stage}."):
                    return device
            raise LookupError(f"{name} belongs neither to embed, nor to a block, nor to head: the model is not staged")

        return device_of


@dataclass(frozen=True, kw_only=True)
class Load:
    """Bytes that a stage brings to its device."""

    stays: int = 0
    """Weights, what training keeps for them, and what a forward keeps for its backward: adds up."""
    passes: int = 0
    """While the stage runs, above that: of the stages of a device the largest counts."""


@dataclass(frozen=True, kw_only=True)
class Loads:
    """What there is to divide."""

    embed: Load
    blocks: tuple[Load, ...]
    """In execution order."""
    head: Load
    arriving: tuple[int, ...] = ()
    """Bytes of the carry that enters each block: what the device holds anew whose first block it is; empty counts nothing."""


def place(
    model: Any,
    devices: Sequence[torch.device],
    cuts: Sequence[int] = (),
    *,
    capacities: Sequence[float] = (),
    loads: Loads | None = None,
) -> Placement:
    """Divide a model over devices, in their order: embedding first, head last.

    Args:
        model: The staged model; `meta` will do.
        devices: At least one.
        cuts: Blocks before which the next device begins, one less than devices; none divides so that the fullest device, for what
            it can hold, is as empty as possible.
        capacities: Bytes that each device can hold; by default they hold alike.
        loads: What the stages bring to a device; by default the parameters as they are.

    Raises:
        UserError: If the cuts do not divide the blocks among the devices.
    """
    num_blocks = len(model.blocks())
    # A block without parameters runs where its carry is, so that no device begins with it.
    starts = [i for i, block in enumerate(model.blocks()) if next(block.parameters(), None) is not None]
    if cuts:
        cuts = _checked(cuts, len(devices), num_blocks, starts)
    elif len(devices) > len(starts):
        raise UserError(
            f"train.devices names {len(devices)} devices and the model has {len(starts)} blocks; name fewer"
        )
    else:
        cuts = balanced_cuts(loads or weights_alone(model), capacities or [1.0] * len(devices), starts)
    bounds = [0, *cuts, num_blocks]
    blocks = tuple(device for i, device in enumerate(devices) for _ in range(bounds[i], bounds[i + 1]))
    return Placement(embed=devices[0], blocks=blocks, head=devices[-1])


def balanced_cuts(loads: Loads, capacities: Sequence[float], starts: Sequence[int] = ()) -> tuple[int, ...]:
    """Cuts after which the fullest of the devices, for what it can hold, is least full, each holding at least one block.

    No other cuts do better: every one of them is looked at, by dynamic programming.

    Args:
        loads: Of each stage.
        capacities: Bytes that each device can hold, above 0; at most as many devices as blocks.
        starts: Blocks that may be a device's first; by default all.
    """
    last = len(capacities) - 1

    def fullness(device: int, start: int, end: int) -> float:
        return bytes_held(loads, start, end, is_last=device == last) / capacities[device]

    cuts = least_full(len(loads.blocks), len(capacities), starts, fullness)
    assert cuts is not None, "no way is impossible"
    return cuts


def least_full(
    num_blocks: int, num_devices: int, starts: Sequence[int], fullness: Callable[[int, int, int], float | None]
) -> tuple[int, ...] | None:
    """Cuts after which the fullest of the devices is least full; of equal ones the earliest. None if there is no way.

    Args:
        num_blocks: To divide.
        num_devices: At most as many as blocks.
        starts: Blocks that may be a device's first; empty for all.
        fullness: Of a device that holds the blocks from one to before another; None where that cannot be.
    """
    # best[k]: (fullest device, cuts) when the devices so far hold the first k blocks
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for device in range(num_devices):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in [num_blocks] if device == num_devices - 1 else starts or range(1, num_blocks):
            options = (
                (max(fullest, own), (*cuts, end))
                for start, (fullest, cuts) in best.items()
                if start < end and (own := fullness(device, start, end)) is not None
            )
            if (least := min(options, default=None)) is not None:
                following[end] = least
        best = following
    return best[num_blocks][1][:-1] if num_blocks in best else None


def bytes_held(loads: Loads, start: int, end: int, *, is_last: bool) -> int:
    """The most bytes on a device that holds the blocks from `start` to before `end`.

    Args:
        loads: Of each stage.
        start: 0 on the device that holds the embedding.
        end: After `start`.
        is_last: Whether it holds the head.
    """
    held = [*loads.blocks[start:end], *([] if start else [loads.embed]), *([loads.head] if is_last else [])]
    arriving = loads.arriving[start] if start and loads.arriving else 0
    return sum(load.stays for load in held) + max(load.passes for load in held) + arriving


def weights_alone(model: Any, bytes_of: Callable[[str, nn.Parameter], int] | None = None) -> Loads:
    """What the parameters bring to a device, without activations.

    Args:
        model: The staged model; `meta` will do.
        bytes_of: Bytes for a parameter and its name in the model, what training keeps for it included; by default its own.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def load(stage: nn.Module) -> Load:
        parameters = list(stage.parameters())
        return Load(stays=sum(bytes_of(names[id(p)], p) if bytes_of else p.nbytes for p in parameters))

    return Loads(embed=load(model.embed), blocks=tuple(map(load, model.blocks())), head=load(model.head))


def _checked(cuts: Sequence[int], num_devices: int, num_blocks: int, starts: Sequence[int]) -> tuple[int, ...]:
    """Cuts given by hand, each at the first block from there on that has parameters."""
    if num_devices == 1:
        raise UserError(
            f"train.cuts = {list(cuts)} divides over several devices, and train.devices names one; name more"
        )
    if len(cuts) != num_devices - 1:
        raise UserError(
            f"train.cuts = {list(cuts)}: {num_devices} devices need {num_devices - 1}; leave it empty to divide by bytes"
        )
    begin = tuple(next((start for start in starts if start >= cut), num_blocks) if cut > 0 else 0 for cut in cuts)
    if not all(low < high for low, high in zip((0, *begin), (*begin, num_blocks), strict=True)):
        raise UserError(
            f"train.cuts = {list(cuts)} must be increasing, above 0 and below {num_blocks}, the model's number of blocks"
        )
    return begin
