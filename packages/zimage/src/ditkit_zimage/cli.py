"""The commands zimage-train, zimage-encode, zimage-sample, zimage-export, zimage-watch and zimage-caption."""

from pathlib import Path
from typing import TYPE_CHECKING

from ditkit_core.commands.cli import Family, commands
from ditkit_zimage.presets import PRESETS

if TYPE_CHECKING:
    from ditkit_core.models.spec import ModelSpec


def _spec() -> "ModelSpec":
    from ditkit_zimage.spec import (
        ZIMAGE,
    )  # here: it imports torch, which help and mistakes do without

    return ZIMAGE


FAMILY = Family(
    name="zimage",
    presets=tuple(PRESETS),
    demo=Path(__file__).parent / "demo" / "demo.toml",
    spec=_spec,
)
train, encode, sample, export, watch, caption = commands(FAMILY)
