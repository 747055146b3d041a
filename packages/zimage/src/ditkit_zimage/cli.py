"""The commands zimage-train, zimage-encode, zimage-sample, zimage-export, zimage-watch and zimage-caption."""

from functools import partial
from pathlib import Path
from pkgutil import resolve_name

from ditkit_core.commands.cli import Family, commands
from ditkit_zimage.presets import PRESETS

FAMILY = Family(
    name="zimage",
    presets=tuple(PRESETS),
    demo=Path(__file__).parent / "demo" / "demo.toml",
    # by name: it imports torch, which help and mistakes do without
    spec=partial(resolve_name, "ditkit_zimage.spec:ZIMAGE"),
)
train, encode, sample, export, watch, caption = commands(FAMILY)
