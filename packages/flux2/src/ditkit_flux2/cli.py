"""The commands flux2-train, flux2-encode, flux2-sample, flux2-export, flux2-watch and flux2-caption."""

from pathlib import Path
from typing import TYPE_CHECKING

from ditkit_core.commands.cli import Family, commands
from ditkit_flux2.presets import PRESETS

if TYPE_CHECKING:
    from ditkit_core.models.spec import ModelSpec


def _spec() -> "ModelSpec":
    from ditkit_flux2.spec import (
        FLUX2,
    )  # here: it imports torch, which help and mistakes do without

    return FLUX2


FAMILY = Family(
    name="flux2",
    presets=tuple(PRESETS),
    demo=Path(__file__).parent / "demo" / "demo.toml",
    spec=_spec,
)
train, encode, sample, export, watch, caption = commands(FAMILY)
