"""The commands flux3-train, flux3-encode, flux3-sample, flux3-export, flux3-watch and flux3-caption."""

from pathlib import Path
from typing import TYPE_CHECKING

from ditkit_core.commands.cli import Family, commands
from ditkit_flux3.presets import PRESETS

if TYPE_CHECKING:
    from ditkit_core.models.spec import ModelSpec


def _spec() -> "ModelSpec":
    from ditkit_flux3.spec import (
        FLUX3,  # here: it imports torch, which help and mistakes do without
    )

    return FLUX3


FAMILY = Family(
    name="flux3",
    presets=tuple(PRESETS),
    demo=Path(__file__).parent / "demo" / "demo.toml",
    spec=_spec,
)
train, encode, sample, export, watch, caption = commands(FAMILY)
