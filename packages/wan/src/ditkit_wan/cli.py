"""The commands wan-train, wan-encode, wan-sample, wan-export, wan-watch and wan-caption."""

from functools import partial
from pathlib import Path
from pkgutil import resolve_name

from ditkit_core.commands.cli import Family, commands
from ditkit_wan.presets import PRESETS

FAMILY = Family(
    name="wan",
    presets=tuple(PRESETS),
    demo=Path(__file__).parent / "demo" / "demo.toml",
    # by name: it imports torch, which help and mistakes do without
    spec=partial(resolve_name, "ditkit_wan.spec:WAN"),
)
train, encode, sample, export, watch, caption = commands(FAMILY)
