"""What a model is told beside text: pictures, control clips, music. Which columns of a dataset they come from, and how they are encoded."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of metadata whose value goes with each clip: a file, or a text."""

    name: str
    """What `ClipInputs.files` has it under."""
    kind: Literal["image", "video", "audio", "table", "text"]
    """What it names; `table` is a file of numbers, `text` no file at all."""
    aliases: tuple[str, ...] = ()
    """What other trainers call it. Columns of a model that share one are filled from a list, in order."""
    required: bool = False
    """Whether no clip can be trained without it."""
    moment: Literal["", "begin", "end"] = ""
    """Which frame of the clip a picture shows, if it shows one: no other window of the file has it."""
    in_front: bool = False
    """Whether it is one latent frame more in front of the clip's: `TrainingSpec.empty_item` is given it as a reference of the clip's size."""
    instead_of: tuple[str, ...] = ()
    """Columns that say the same in another way: where a clip has both, this one holds, and one that is given for a drawing takes the place
    of the clip's own of the other way."""
    doc: str = ""
    """One line that says what it is for."""


def named_columns(columns: Sequence[Column]) -> dict[str, list[Column]]:
    """By name and alias the columns that are meant: more than one where an alias stands for a list."""
    found: dict[str, list[Column]] = {}
    for column in columns:
        for name in (column.name, *column.aliases):
            found.setdefault(name, []).append(column)
    return found


def alternatives_of(columns: Sequence[Column], given: Collection[str]) -> set[str]:
    """The columns that say in another way what given ones say: those they are instead of, and those that are instead of them.

    Args:
        columns: What the model is conditioned by.
        given: Names of some of them.
    """
    pairs = [(column.name, other) for column in columns for other in column.instead_of]
    return {other for name, other in pairs if name in given} | {name for name, other in pairs if other in given}


@dataclass(frozen=True, kw_only=True)
class ClipInputs:
    """One clip, cut as it is trained or drawn, with the files that go with it."""

    clip: Path | None
    """The clip itself; None where a sample is drawn from a prompt."""
    start_seconds: float = 0.0
    """Where the clip's window begins; control videos begin there too."""
    files: Mapping[str, str] = field(default_factory=dict)
    """By column: a path, or a text."""
    frames: int
    height: int
    """Pixels, as `width`."""
    width: int
    fps: float
    """Frames per second; 0 for a still image."""


@runtime_checkable
class Conditioner(Protocol):
    """Encodes one condition of a clip; loaded only between `load` and `unload`."""

    kind: str
    """Folder of the cache; different for each conditioner of a model."""
    identity: str
    """Digest of weights and settings, known without loading: part of the cache key."""
    optional: bool
    """Whether a model can be trained without it as well, so that `train.control_dropout` may leave it out."""
    items_at_once: int
    """How many items one call takes."""

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The columns that are read of this clip, and "" for the clip itself; () where there is nothing to add.

        "" where there is no clip says that there is a condition which nothing is read for.

        Raises:
            UserError: If what is there does not make a condition.
        """
        ...

    def check(self, controls: ClipInputs) -> None:
        """Read of a clip or a drawing what `encode` reads, as it does, without weights: whatever can be wrong with it shows here.

        Raises:
            UserError: Whenever `uses` or `encode` would.
        """
        ...

    def load(self) -> None:
        """Read the weights onto the device."""
        ...

    def encode(self, items: Sequence[Any], advance: Any = ...) -> list[dict[str, Tensor]]:
        """CPU tensors by name for each `ClipInputs`, without a batch dimension; they become part of the training item."""
        ...

    def unload(self) -> None:
        """Free the weights."""
        ...
