"""The commands qwenimage-train, qwenimage-encode, qwenimage-sample, qwenimage-export, qwenimage-watch and qwenimage-caption."""

from functools import partial
from pathlib import Path
from pkgutil import resolve_name

from ditkit_core.commands.cli import Family, commands
from ditkit_qwenimage.presets import PRESETS

FAMILY = Family(
    name="qwenimage",
    presets=tuple(PRESETS),
    demo=Path(__file__).parent / "demo" / "demo.toml",
    # by name: it imports torch, which help and mistakes do without
    spec=partial(resolve_name, "ditkit_qwenimage.spec:QWENIMAGE"),
)
train, encode, sample, export, watch, caption = commands(FAMILY)
