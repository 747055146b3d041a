"""Alpha in the header of an adapter file: peft's configuration, as diffusers writes it, or as peft
writes it next to its own files."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ditkit_core.errors import UserError
from ditkit_core.io.files import parse_json_object, read_json_object
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.adapter_formats import FORMATS

# The header key and the naming are diffusers' (`LORA_ADAPTER_METADATA_KEY` in its
# loaders/lora_base.py).
DIFFUSERS_METADATA = "lora_adapter_metadata"
_PEFT, _PEFT_OF_HOLDER = FORMATS["peft"].prefixes
_PEFT_CONFIG = "adapter_config.json"
_REMEDY = "fetch it again, or merge the file with the program that made it"
# A name as peft and diffusers write it into `alpha_pattern`: plain, anchored by `^`, or behind
# `.*\.`; dots and hyphens may be escaped.
_LITERAL = re.compile(r"(?P<before>\^|\.\*\\\.)?(?P<name>(?:[\w.-]|\\[.-])+)\$?")
_DOT = re.compile(r"\.")


@dataclass(frozen=True)
class AlphaHeader:
    """What the header of a file says about the scale of its modules."""

    alpha: float | None
    """Alpha of all other modules; None: their rank."""
    alphas: Mapping[str, tuple[int, float]]
    """Alpha of some modules, and its position in the file: by `^` and a name in the file's form, or
    by a dot and the end of one."""
    use_rslora: bool

    @classmethod
    def of(cls, source: SafetensorsSource) -> "AlphaHeader":
        """Read the header of a file."""
        raw = source.metadata.get(DIFFUSERS_METADATA, "{}")
        where = f"{source.path}: the header's {DIFFUSERS_METADATA}"
        config_file = source.path.with_name(_PEFT_CONFIG)
        # Only for peft's own keys: a folder may have another adapter's configuration next to this
        # file.
        of_peft = (
            raw == "{}"
            and any(key.startswith(_PEFT) for key in source.tensors)
            and config_file.is_file()
        )
        where = str(config_file) if of_peft else where
        cannot = "cannot be read: it"
        entries = (
            read_json_object(config_file, _REMEDY, cannot)
            if of_peft
            else parse_json_object(raw, f"{where} {cannot}", _REMEDY)
        )
        config = {key.removeprefix("transformer."): value for key, value in entries.items()}
        alphas: dict[str, tuple[int, float]] = {}
        # Patterns are of names below peft's prefix, which may begin with the module that holds the
        # transformer.
        is_held = any(key.startswith(_PEFT_OF_HOLDER) for key in source.tensors)
        holder = "transformer." if is_held else ""
        try:
            alpha = _finite(config["lora_alpha"]) if "lora_alpha" in config else None
            for position, (pattern, other) in enumerate(
                (config.get("alpha_pattern") or {}).items()
            ):
                for key in _literal(pattern, holder):
                    alphas.setdefault(key, (position, _finite(other)))
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise UserError(f"{where} cannot be read ({error}); {_REMEDY}") from error
        return cls(alpha, alphas, bool(config.get("use_rslora")))

    def scale(self, rank: int, module_names: Collection[str]) -> float:
        """The factor of up·down of a module of this rank, by its names in all forms."""
        keys = [
            key
            for name in module_names
            for key in (f"^{name}", *(name[dot.start() :] for dot in _DOT.finditer(name)))
        ]
        # The first that fits counts, as in peft's `get_pattern_key`.
        fitting = min((self.alphas[key] for key in keys if key in self.alphas), default=None)
        alpha = fitting[1] if fitting else rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _literal(pattern: str, holder: str) -> list[str]:
    """The keys in `AlphaHeader.alphas` of an entry of `alpha_pattern`; `holder` may begin the
    names."""
    # Not compiled, as peft does: some expressions take longer than a life, and let no signal
    # through.
    match = _LITERAL.fullmatch(pattern)
    if match is None:
        raise ValueError(f"{pattern[:80]!r} in its alpha_pattern is not the name of a module")
    name = (
        match["name"].replace("\\", "").removeprefix("" if match["before"] == r".*\." else holder)
    )
    return {"^": [f"^{name}"], None: [f"^{name}", f".{name}"]}.get(match["before"], [f".{name}"])


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"alpha is {number}")
    return number
