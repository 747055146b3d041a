"""The commands zed-train, zed-encode, zed-sample, zed-export, zed-watch and zed-caption."""

from pathlib import Path
from typing import TYPE_CHECKING

from ditkit_zed.presets import PRESETS

from ditkit_core.commands.cli import Family, commands

if TYPE_CHECKING:
    from ditkit_core.models.spec import ModelSpec


def _spec() -> "ModelSpec":
    from ditkit_zed.spec import ZED  # here: it imports torch, which help and mistakes do without

    return ZED


FAMILY = Family(
    name="zed",
    presets=tuple(PRESETS),
    demo=Path(__file__).parent / "demo" / "demo.toml",
    spec=_spec,
)
# A later core may have more commands, behind these.
train, encode, sample, export, watch, caption, *_ = commands(FAMILY)
