"""The commands zed-train, zed-encode, zed-sample, zed-export, zed-watch and zed-caption."""

from functools import partial
from pathlib import Path
from pkgutil import resolve_name

from ditkit_zed.presets import PRESETS

from ditkit_core.commands.cli import Family, commands

FAMILY = Family(
    name="zed",
    presets=tuple(PRESETS),
    demo=Path(__file__).parent / "demo" / "demo.toml",
    # by name: it imports torch, which help and mistakes do without
    spec=partial(resolve_name, "ditkit_zed.spec:ZED"),
)
# A later core may have more commands, behind these.
train, encode, sample, export, watch, caption, *_ = commands(FAMILY)
