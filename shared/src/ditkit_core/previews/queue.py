"""The queue of previews that are still to be generated: a folder with a file of weights for each.

Files appear in the folder atomically, and each is removed after its preview is generated. So
whatever ends a run, the next process that works in its folder knows which previews are left.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource, write_safetensors

GENERATES = " generates "
"""Separates process id and file name in the line that the worker logs before each file; its parent
reads there which file failed."""
_NAME = re.compile(r"(?:([^.].*)-)?step-([0-9]+)\.safetensors")


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The preview that a file of the queue asks for."""

    step: int
    """The optimizer step of the weights in the file."""
    expert: str = ""
    """The expert of these weights; empty if the model has one transformer."""
    others: Mapping[str, int] = field(default_factory=dict)
    """Maps the name of each other expert to the step of its save to sample with; an expert that is
    missing uses its base weights."""

    @property
    def file_name(self) -> str:
        """Its name in the queue."""
        return "-".join(filter(None, [self.expert, f"step-{self.step:06d}.safetensors"]))


def queued(folder: Path) -> list[Path]:
    """The files of a queue in the order in which they are generated: by expert, then by step."""
    return sorted(
        (path for path in folder.glob("*.safetensors") if _NAME.fullmatch(path.name)), key=named
    )


def named(path: Path) -> tuple[str, int]:
    """The expert (empty if the model has one transformer) and the step in the name of a queue's
    file."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return match[1] or "", int(match[2])


def drop_after(folder: Path, saved: Mapping[str, int]) -> None:
    """Remove the previews of steps that training will repeat: it queues them again, maybe with
    other weights.

    Args:
        saved: Maps the name of each expert to the step of its latest save, -1 without a save;
            previews of other experts stay.

    Raises:
        OSError: If a file cannot be removed.
    """
    for path in queued(folder):
        expert, step = named(path)
        # An expert that is not in `saved` keeps its previews: no step is after itself.
        if step > saved.get(expert, step):
            path.unlink(missing_ok=True)


def put(folder: Path, preview: Preview, weights: Mapping[str, Tensor]) -> None:
    """Add a preview to the queue; a file of the same name is replaced.

    Args:
        weights: The trained parameters by canonical name, on any device.
    """
    about = {
        "step": str(preview.step),
        "expert": preview.expert,
        "others": json.dumps(dict(preview.others)),
    }
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
    write_safetensors(folder / preview.file_name, shapes, weights.__getitem__, about)


def read_preview(path: Path) -> Preview:
    """The preview that a file asks for."""
    about = SafetensorsSource.open(path).metadata
    try:
        return Preview(
            step=int(about["step"]), expert=about["expert"], others=json.loads(about["others"])
        )
    except (KeyError, ValueError) as error:
        raise UserError(f"{path} is not a queued preview; remove it") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the weights of a file, on the CPU, and close it."""
    source = SafetensorsSource.open(path)
    return {name: source.read(name) for name in source.tensors}
