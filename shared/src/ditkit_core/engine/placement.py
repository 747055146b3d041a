"""Which device runs each stage of a model, and which blocks' weights are streamed through it.

A placement is data: it decides where weights are put when they are loaded, and nothing else. The
engine follows the weights, so a model on one device runs as if it had never been split.
`planner/partition.py` decides where a model is best split.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ditkit_core.engine.ac_schedule import ACSchedule
from ditkit_core.errors import UserError, argument
from ditkit_core.models.protocol import StagedModel


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A device for every stage."""

    embed: torch.device
    blocks: tuple[torch.device, ...]
    """In execution order."""
    head: torch.device
    streamed: frozenset[int] = frozenset()
    """Blocks whose weights stay on the host and are on their device only while they are used."""
    checkpointing: ACSchedule | None = None
    """`train.checkpointing` for the engine, with budgets and devices resolved to blocks; None where
    nothing is trained."""

    @property
    def split_points(self) -> tuple[int, ...]:
        """Split points: the first block of each device but the first."""
        return tuple(i for i in range(1, len(self.blocks)) if self.blocks[i] != self.blocks[i - 1])

    def described(self) -> str:
        """One line for the log: which device runs which blocks."""
        bounds = [0, *self.split_points, len(self.blocks)]
        spans = [f"{self.blocks[a]} blocks {a} to {b - 1}" for a, b in itertools.pairwise(bounds)]
        return f"split over {len(spans)} devices: {', '.join(spans)}"

    def device_of(self, model: StagedModel) -> Callable[[str], torch.device]:
        """A function from the name of a parameter or module in the model to its device.

        It raises LookupError for a name outside of all stages: a parameter of the model itself has
        no device.
        """
        # By the identity of modules: a model may name its stages as it likes, and `blocks()` may
        # collect them from several lists.
        device_by_id = {id(model.embed): self.embed, id(model.head): self.head}
        device_by_id |= {
            id(block): device for block, device in zip(model.blocks(), self.blocks, strict=True)
        }
        stages = {
            name: device_by_id[id(module)]
            for name, module in model.named_modules()
            if id(module) in device_by_id
        }

        def device_of(name: str) -> torch.device:
            for stage, device in stages.items():
                if f"{name}.".startswith(f"{stage}."):
                    return device
            raise LookupError(
                f"{name} belongs neither to embed, nor to a block, nor to head: the model is not "
                f"staged"
            )

        return device_of


def place_blocks(
    model: StagedModel, devices: Sequence[torch.device], split_points: Sequence[int] = ()
) -> Placement:
    """Split a model, which may be on `meta`, over devices in their order: embedding first, head
    last.

    Args:
        split_points: The first block of each device but the first.
    """
    num_blocks = len(model.blocks())
    # A block without parameters runs where its carry is, so no device can begin with it.
    starts = [
        i for i, block in enumerate(model.blocks()) if next(block.parameters(), None) is not None
    ]
    bounds = [0, *_checked(split_points, len(devices), num_blocks, starts), num_blocks]
    # One device per block, so that the engine, plans and loading need no split points.
    blocks = tuple(
        device for i, device in enumerate(devices) for _ in range(bounds[i], bounds[i + 1])
    )
    return Placement(embed=devices[0], blocks=blocks, head=devices[-1])


def _checked(
    split_points: Sequence[int], num_devices: int, num_blocks: int, starts: Sequence[int]
) -> tuple[int, ...]:
    """The split points, each moved to the first block from there on that has parameters."""
    if split_points and num_devices == 1:
        raise UserError(
            f"{argument('train.split_points')} = {list(split_points)} splits over several devices, "
            f"and {argument('train.devices')} names one; name more"
        )
    if len(split_points) != num_devices - 1:
        raise UserError(
            f"{argument('train.split_points')} = {list(split_points)}: {num_devices} devices need "
            f"{num_devices - 1}; leave it empty to split by bytes"
        )
    begin = tuple(
        next((start for start in starts if start >= cut), num_blocks) if cut > 0 else 0
        for cut in split_points
    )
    if not all(low < high for low, high in zip((0, *begin), (*begin, num_blocks), strict=True)):
        raise UserError(
            f"{argument('train.split_points')} = {list(split_points)} must be increasing, above 0 "
            f"and below {num_blocks}, the model's number of blocks"
        )
    return begin
