"""The commands wan-train, wan-encode, wan-sample, wan-export, wan-watch and wan-caption."""

from pathlib import Path
from typing import TYPE_CHECKING

from ditkit_core.commands.cli import Family, commands
from ditkit_wan.presets import PRESETS

if TYPE_CHECKING:
    from ditkit_core.models.spec import ModelSpec


def _spec() -> "ModelSpec":
    from ditkit_wan.spec import WAN  # here: it imports torch, which help and mistakes do without

    return WAN


FAMILY = Family(
    name="wan",
    presets=tuple(PRESETS),
    demo=Path(__file__).parent / "demo" / "demo.toml",
    spec=_spec,
)
train, encode, sample, export, watch, caption = commands(FAMILY)
