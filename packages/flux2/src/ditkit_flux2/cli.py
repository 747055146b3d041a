"""The commands flux2-train, flux2-encode, flux2-sample, flux2-export, flux2-watch and flux2-caption."""

from functools import partial
from pathlib import Path
from pkgutil import resolve_name

from ditkit_core.commands.cli import Family, commands
from ditkit_flux2.presets import PRESETS

FAMILY = Family(
    name="flux2",
    presets=tuple(PRESETS),
    demo=Path(__file__).parent / "demo" / "demo.toml",
    # by name: it imports torch, which help and mistakes do without
    spec=partial(resolve_name, "ditkit_flux2.spec:FLUX2"),
)
train, encode, sample, export, watch, caption = commands(FAMILY)
