"""The commands qwenimage-train, qwenimage-encode, qwenimage-sample, qwenimage-export, qwenimage-watch and qwenimage-caption."""

from pathlib import Path
from typing import TYPE_CHECKING

from ditkit_core.commands.cli import Family, commands
from ditkit_qwenimage.presets import PRESETS

if TYPE_CHECKING:
    from ditkit_core.models.spec import ModelSpec


def _spec() -> "ModelSpec":
    from ditkit_qwenimage.spec import (
        QWENIMAGE,  # here: it imports torch, which help and mistakes do without
    )

    return QWENIMAGE


FAMILY = Family(
    name="qwenimage",
    presets=tuple(PRESETS),
    demo=Path(__file__).parent / "demo" / "demo.toml",
    spec=_spec,
)
train, encode, sample, export, watch, caption = commands(FAMILY)
