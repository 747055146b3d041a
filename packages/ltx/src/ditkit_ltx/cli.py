"""The commands ltx-train, ltx-encode, ltx-sample, ltx-export, ltx-watch and ltx-caption."""

from functools import partial
from pathlib import Path
from pkgutil import resolve_name

from ditkit_core.commands.cli import Family, commands
from ditkit_ltx.presets import PRESETS

FAMILY = Family(
    name="ltx",
    presets=tuple(PRESETS),
    demo=Path(__file__).parent / "demo" / "demo.toml",
    # by name: it imports torch, which help and mistakes do without
    spec=partial(resolve_name, "ditkit_ltx.spec:LTX"),
)
train, encode, sample, export, watch, caption = commands(FAMILY)
