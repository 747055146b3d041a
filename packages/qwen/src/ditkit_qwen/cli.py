"""The commands qwen-train, qwen-encode, qwen-sample, qwen-export, qwen-watch and qwen-caption."""

from pathlib import Path
from typing import TYPE_CHECKING

from ditkit_core.commands.cli import Family, commands
from ditkit_qwen.presets import PRESETS

if TYPE_CHECKING:
    from ditkit_core.models.spec import ModelSpec


def _spec() -> "ModelSpec":
    from ditkit_qwen.spec import QWEN  # here: it imports torch, which help and mistakes do without

    return QWEN


FAMILY = Family(
    name="qwen",
    presets=tuple(PRESETS),
    demo=Path(__file__).parent / "demo" / "demo.toml",
    spec=_spec,
)
train, encode, sample, export, watch, caption = commands(FAMILY)
