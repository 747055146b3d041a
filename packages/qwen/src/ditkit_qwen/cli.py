"""The commands qwen-train, qwen-encode, qwen-sample, qwen-export, qwen-watch and qwen-caption."""

from functools import partial
from pathlib import Path
from pkgutil import resolve_name

from ditkit_core.commands.cli import Family, commands
from ditkit_qwen.presets import PRESETS

FAMILY = Family(
    name="qwen",
    presets=tuple(PRESETS),
    demo=Path(__file__).parent / "demo" / "demo.toml",
    # by name: it imports torch, which help and mistakes do without
    spec=partial(resolve_name, "ditkit_qwen.spec:QWEN"),
)
train, encode, sample, export, watch, caption = commands(FAMILY)
