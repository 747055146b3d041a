"""The commands krea2-train, krea2-encode, krea2-sample, krea2-export, krea2-watch and
krea2-caption."""

from functools import partial
from pathlib import Path
from pkgutil import resolve_name

from ditkit_core.commands.cli import Family, commands
from ditkit_krea2.presets import PRESETS

FAMILY = Family(
    name="krea2",
    presets=tuple(PRESETS),
    demo=Path(__file__).parent / "demo" / "demo.toml",
    # by name: it imports torch, which help and mistakes do without
    spec=partial(resolve_name, "ditkit_krea2.spec:KREA2"),
)
train, encode, sample, export, watch, caption = commands(FAMILY)
