"""The commands ltx-train, ltx-encode, ltx-sample, ltx-export, ltx-watch and ltx-caption."""

from pathlib import Path
from typing import TYPE_CHECKING

from ditkit_core.commands.cli import Family, commands
from ditkit_ltx.presets import PRESETS

if TYPE_CHECKING:
    from ditkit_core.models.spec import ModelSpec


def _spec() -> "ModelSpec":
    from ditkit_ltx.spec import LTX  # here: it imports torch, which help and mistakes do without

    return LTX


FAMILY = Family(
    name="ltx",
    presets=tuple(PRESETS),
    demo=Path(__file__).parent / "demo" / "demo.toml",
    spec=_spec,
)
train, encode, sample, export, watch, caption = commands(FAMILY)
