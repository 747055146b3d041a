"""Which device holds and runs each stage of a model that is divided over several.

A placement is data: it decides where weights are put when they are loaded, and nothing else. The engine follows the weights, so a
model that lies on one device is run as if there were no division.
"""

import math
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

    @property
    def cuts(self) -> tuple[int, ...]:
        """Blocks before which the next device begins."""
        return tuple(i for i in range(1, len(self.blocks)) if self.blocks[i] != self.blocks[i - 1])

    def device_of(self, model: Any) -> Callable[[str], torch.device]:
        """The device of a parameter or module, by its name in the model."""
        where = {id(model.embed): self.embed, id(model.head): self.head}
        where |= {id(block): device for block, device in zip(model.blocks(), self.blocks, strict=True)}
        stages = {name: where[id(module)] for name, module in model.named_modules() if id(module) in where}

        def device_of(name: str) -> torch.device:
            return next(device for stage, device in stages.items() if f"{name}.".startswith(f"{stage}."))

        return device_of


def place(model: Any, devices: Sequence[torch.device], cuts: Sequence[int] = ()) -> Placement:
    """Divide a model over devices, in their order: embedding first, head last.

    Args:
        model: The staged model; `meta` will do.
        devices: At least one.
        cuts: Blocks before which the next device begins, one less than devices; none divides so that the fullest device holds
            as few bytes of weights as possible.

    Raises:
        UserError: If the cuts do not divide the blocks among the devices.
    """
    num_blocks = len(model.blocks())
    if cuts:
        _check(cuts, len(devices), num_blocks)
    elif len(devices) > num_blocks:
        raise UserError(f"train.devices names {len(devices)} devices and the model has {num_blocks} blocks; name fewer")
    else:
        cuts = balanced_cuts([_num_bytes(block) for block in model.blocks()], len(devices),
                             before=_num_bytes(model.embed), after=_num_bytes(model.head))  # fmt: skip
    bounds = [0, *cuts, num_blocks]
    blocks = tuple(device for i, device in enumerate(devices) for _ in range(bounds[i], bounds[i + 1]))
    return Placement(embed=devices[0], blocks=blocks, head=devices[-1])


def balanced_cuts(block_bytes: Sequence[int], num_devices: int, *, before: int = 0, after: int = 0) -> tuple[int, ...]:
    """Cuts after which the fullest of the devices is least full, each holding at least one block.

    Args:
        block_bytes: Of each block, in execution order.
        num_devices: At most as many as blocks.
        before: Bytes that the first device holds besides.
        after: Bytes that the last device holds besides.
    """
    num_blocks = len(block_bytes)
    sums = [sum(block_bytes[:i]) for i in range(num_blocks + 1)]
    # best[k]: (fullest device, cuts) when the devices so far hold the first k blocks
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for device in range(num_devices):
        extra = (before if device == 0 else 0) + (after if device == num_devices - 1 else 0)
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in range(device + 1, num_blocks - (num_devices - device - 1) + 1):
            options = (
                (max(fullest, sums[end] - sums[start] + extra), (*cuts, end))
                for start, (fullest, cuts) in best.items()
                if start < end
            )
            following[end] = min(options, default=(math.inf, ()))
        best = following
    return best[num_blocks][1][:-1]


def _check(cuts: Sequence[int], num_devices: int, num_blocks: int) -> None:
    if num_devices == 1:
        raise UserError(
            f"train.cuts = {list(cuts)} divides over several devices, and train.devices names one; name more"
        )
    if len(cuts) != num_devices - 1:
        raise UserError(
            f"train.cuts = {list(cuts)}: {num_devices} devices need {num_devices - 1}; leave it empty to divide by bytes"
        )
    if not all(low < high for low, high in zip((0, *cuts), (*cuts, num_blocks), strict=True)):
        raise UserError(
            f"train.cuts = {list(cuts)} must be increasing, above 0 and below {num_blocks}, the model's number of blocks"
        )


def _num_bytes(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
