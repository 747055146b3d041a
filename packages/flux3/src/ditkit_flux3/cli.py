"""The commands flux3-train, flux3-encode, flux3-sample, flux3-export, flux3-watch and flux3-caption."""

from functools import partial
from pathlib import Path
from pkgutil import resolve_name

from ditkit_core.commands.cli import Family, commands
from ditkit_flux3.presets import PRESETS

FAMILY = Family(
    name="flux3",
    presets=tuple(PRESETS),
    demo=Path(__file__).parent / "demo" / "demo.toml",
    # by name: it imports torch, which help and mistakes do without
    spec=partial(resolve_name, "ditkit_flux3.spec:FLUX3"),
)
train, encode, sample, export, watch, caption = commands(FAMILY)
