"""The model families that are installed, found by their train commands."""

import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from ditkit_core.commands.cli import Family
from ditkit_core.config.toml import flatten
from ditkit_core.io.files import json_part
from ditkit_core.io.run_dir import RunFolder
from ditkit_ui import texts


@cache
def installed_families() -> Mapping[str, Family]:
    """The families by name, such as `wan`: each module behind a command `NAME-train` has a
    `FAMILY`.

    Raises:
        SystemExit: If none is installed.
    """
    entries = entry_points(group="console_scripts")
    modules = sorted({entry.module for entry in entries if entry.name.endswith("-train")})
    families = [vars(import_module(module)).get("FAMILY") for module in modules]
    by_name = {family.name: family for family in families if isinstance(family, Family)}
    if not by_name:
        raise SystemExit(texts.NO_FAMILY)
    return by_name


def family_of(folder: RunFolder, tables: Mapping[str, object]) -> str:
    """The family that a run file is most likely for: of the run in its folder, or by its preset and
    base; the first one otherwise. The page shows it, and it can be changed there."""
    families = installed_families()
    if (name := json_part(folder.about, "model").get("family")) in families:
        return str(name)
    values = flatten(tables)
    preset = values.get("model.preset")
    names = [name for name, family in families.items() if preset in family.presets] or [*families]
    base = _letters(str(values.get("model.base", "")))

    def likeness(name: str) -> tuple[int, int]:
        """How much of the base's name is the family's: `Qwen/Qwen-Image-2.1` begins as
        `Qwen/Qwen-Image` does, and has the preset 2.1 of another family."""
        parts = [_letters(part) for part in families[name].presets]
        return max((len(part) for part in parts if part in base), default=0), len(name)

    return max([name for name in names if name in base], key=likeness, default=names[0])


def _letters(name: str) -> str:
    return re.sub(r"[-._]", "", name.lower())
