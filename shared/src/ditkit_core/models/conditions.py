"""Conditions of a model besides text: images, control videos, music. The columns of a dataset they
come from, and how they are encoded."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from ditkit_core.io.console import NullProgress
from ditkit_core.models.encoders import Encoder


@dataclass(frozen=True, kw_only=True)
class Column:
    """A metadata column with a condition of each clip: a file, or a text."""

    name: str
    """Name of the column, and key in `ClipInputs.files`."""
    kind: Literal["image", "video", "audio", "table", "text"]
    """Kind of the value; `table` is a file of numbers, `text` is the value itself and not a
    file."""
    aliases: tuple[str, ...] = ()
    """Names of the column in other trainers. If several columns of a model share an alias, a list
    in that column fills them in order."""
    required: bool = False
    moment: Literal["", "begin", "end"] = ""
    """Frame of the clip that an image shows, if any; then the image fits only one window of a
    file."""
    in_step: bool = False
    """Whether a sound that lasts shorter or longer than its clip is probably out of step with it,
    as speech is."""
    in_front: bool = False
    """Whether it adds a latent frame in front of the clip's; `TrainingSpec.empty_item` gets it as a
    reference of the clip's size."""
    alternative_to: tuple[str, ...] = ()
    """Columns that give the same condition in another form. If a clip has both, this column is
    used. A column given for a generated sample replaces the clip's own columns of the other form.
    """
    doc: str = ""


def named_columns(columns: Sequence[Column]) -> dict[str, list[Column]]:
    """The columns by name and by alias; an alias with several columns stands for a list."""
    columns_by_name: dict[str, list[Column]] = {}
    for column in columns:
        for name in (column.name, *column.aliases):
            columns_by_name.setdefault(name, []).append(column)
    return columns_by_name


def alternatives_of(columns: Sequence[Column], names: Collection[str]) -> set[str]:
    """The columns that give the same conditions as some named ones, in another form
    (`Column.alternative_to`, in both directions)."""
    pairs = [(column.name, other) for column in columns for other in column.alternative_to]
    return {other for name, other in pairs if name in names} | {
        name for name, other in pairs if other in names
    }


@dataclass(frozen=True, kw_only=True)
class ClipInputs:
    """One clip for training or for a generated sample, with the files of its conditions."""

    clip: Path | None
    """The clip itself; None if a sample is generated from a prompt."""
    start_seconds: float = 0.0
    """Start of the clip's window in the file; control videos start at the same time."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Paths or texts by column."""
    frames: int
    height: int
    """Pixels; likewise `width`."""
    width: int
    fps: float
    """Frames per second; 0 for a still image."""
    is_mirrored: bool = False
    """Whether the clip is read mirrored left to right; images and videos of its conditions are then
    mirrored as well."""
    crop: tuple[float, float] = (0.5, 0.5)
    """Where the clip, its mask and what is aligned with it are cropped: `data.media.crop.Crop`."""


@runtime_checkable
class Conditioner(Encoder, Protocol):
    """Encodes one condition of a clip: each item is a `ClipInputs`, and its tensors become part of
    the training item."""

    kind: str
    """Subfolder of the cache; different for each conditioner of a model."""
    optional: bool
    """Whether a model can be trained without it as well, so that `train.control_dropout` may drop
    it."""

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The columns that this conditioner reads for a clip, and "" for the clip itself; () if it
        adds nothing.

        If there is no clip, "" means that there is a condition for which no file is read.

        Raises:
            UserError: If the given columns do not make a condition.
        """
        ...

    def check(self, controls: ClipInputs) -> None:
        """Read the files that `encode` would read for a clip or a prompt, without weights, so that
        every error shows early.

        Raises:
            UserError: Whenever `uses` or `encode` would.
        """
        ...


class ClipConditioner:
    """Base of the conditioners: they encode one clip at a time. Each has its `identity`, and
    defines its columns and its tensors."""

    kind: str
    optional = False
    items_at_once = 1

    def load(self) -> None:
        """Read the weights onto the device, if there are any."""

    def unload(self) -> None:
        """Free them."""

    def encode(
        self, items: Sequence[Any], advance: Callable[[float], None] = NullProgress.advance
    ) -> list[dict[str, Tensor]]:
        """The condition of one clip; reads its files."""
        (controls,) = items
        tensors = self.condition(controls)
        advance(1.0)
        return [tensors]

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """As `Conditioner.uses`."""
        raise NotImplementedError

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        """The condition's tensors by name, on the CPU.

        Raises:
            UserError: If a file cannot be read.
        """
        raise NotImplementedError
