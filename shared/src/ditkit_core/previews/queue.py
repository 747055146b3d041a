"""The previews of a run that are still to be drawn: a folder with the weights of each.

The folder is the queue. A file in it is whole or not there, and goes when what it asks for is drawn, so that whatever ends a run, the next
process that works in its folder knows what is left.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource, write_safetensors

DRAWS = " draws "
"""Between its number and the file, in the line that the process which draws begins each file with; who started it reads there what failed."""
_NAME = re.compile(r"(?:([^.].*)-)?step-([0-9]+)\.safetensors")


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What a file of the queue asks for."""

    step: int
    """The optimizer step whose weights it holds."""
    expert: str = ""
    """The expert whose weights they are; empty where the model has one transformer."""
    others: Mapping[str, int] = field(default_factory=dict)
    """By name of another expert the step of its save that is drawn with; those that are missing are drawn with as they are."""

    @property
    def file_name(self) -> str:
        """Its name in the queue."""
        return "-".join(filter(None, [self.expert, f"step-{self.step:06d}.safetensors"]))


def waiting(folder: Path) -> list[Path]:
    """The files of a queue in the order in which they are drawn: by expert, then by step."""
    return sorted((path for path in folder.glob("*.safetensors") if _NAME.fullmatch(path.name)), key=named)


def named(path: Path) -> tuple[str, int]:
    """The expert (empty where the model has one transformer) and the step that a file of a queue is named after."""
    found = _NAME.fullmatch(path.name)
    assert found is not None, path
    return found[1] or "", int(found[2])


def drop_after(folder: Path, saved: Mapping[str, int]) -> None:
    """Remove the previews of steps that training is to take again: it asks for them again, maybe with other weights.

    Args:
        folder: The queue.
        saved: The step of the latest save by name of the expert, -1 without a save; what is of no expert in it stays.

    Raises:
        OSError: If one cannot be removed.
    """
    for path in waiting(folder):
        expert, step = named(path)
        if step > saved.get(expert, step):
            path.unlink(missing_ok=True)


def tidy(folder: Path) -> None:
    """Remove what a process left that was killed while it wrote; only the one that holds the run's folder may."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def put(folder: Path, preview: Preview, weights: Mapping[str, Tensor]) -> None:
    """Add a preview; one of the same name is replaced.

    Args:
        folder: The queue.
        preview: What to draw.
        weights: What is trained, by canonical name, on any device.

    Raises:
        UserError: If it cannot be written.
    """
    about = {"step": str(preview.step), "expert": preview.expert, "others": json.dumps(dict(preview.others))}
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
    write_safetensors(folder / preview.file_name, shapes, weights.__getitem__, about)


def read_preview(path: Path) -> Preview:
    """What a file asks for.

    Raises:
        UserError: If it is none of a queue.
    """
    about = SafetensorsSource.open(path).metadata
    try:
        return Preview(step=int(about["step"]), expert=about["expert"], others=json.loads(about["others"]))
    except (KeyError, ValueError) as error:
        raise UserError(f"{path} is no preview that waits to be drawn; remove it") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights that a file holds, on the CPU; it is closed again.

    Raises:
        UserError: If it is damaged.
    """
    source = SafetensorsSource.open(path)
    return {name: source.read(name) for name in source.tensors}
