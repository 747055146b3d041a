"""The commands krea2-train, krea2-encode, krea2-sample, krea2-export, krea2-watch and
krea2-caption."""

from pathlib import Path
from typing import TYPE_CHECKING

from ditkit_core.commands.cli import Family, commands
from ditkit_krea2.presets import PRESETS

if TYPE_CHECKING:
    from ditkit_core.models.spec import ModelSpec


def _spec() -> "ModelSpec":
    from ditkit_krea2.spec import (
        KREA2,
    )  # here: it imports torch, which help and mistakes do without

    return KREA2


FAMILY = Family(
    name="krea2",
    presets=tuple(PRESETS),
    demo=Path(__file__).parent / "demo" / "demo.toml",
    spec=_spec,
)
train, encode, sample, export, watch, caption = commands(FAMILY)
