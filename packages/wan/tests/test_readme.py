"""The table of presets in the README says what the code says."""

import math
from pathlib import Path

from ditkit_core.adapters.files.identify import parameters_of
from ditkit_wan.conditioning.columns import columns
from ditkit_wan.presets import PRESETS
from ditkit_wan.spec import WAN

README = Path(__file__).parents[1] / "README.md"


def test_every_preset_is_in_the_readme_as_it_is() -> None:
    section = README.read_text(encoding="utf-8").partition("## Which model")[2]
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    found = {}
    for row in rows:
        name, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        found[name.strip("`")] = cells
    assert list(found) == list(PRESETS)
    for preset, (parameters, told, vae, transformers, size) in found.items():
        arch = PRESETS[preset]
        count = sum(map(math.prod, parameters_of(WAN.architecture.build, arch).values()))
        assert parameters == f"{count:,}", preset
        named = [
            f"*`{column.name}`*" if column.required else f"`{column.name}`"
            for column in columns(arch)
        ]
        assert told == ", ".join(named), preset
        assert vae == ("2.2" if arch.out_channels == 48 else "2.1")
        assert int(transformers) == (len(WAN.architecture.experts(arch)) or 1)
        spec = WAN.for_arch(arch)
        assert size == f"{' × '.join(map(str, spec.data.size))}, {spec.data.fps:g}", preset


def test_the_readme_has_every_named_set_of_layers() -> None:
    section = (
        README.read_text(encoding="utf-8").partition("## What is trained")[2].partition("\n## ")[0]
    )
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    assert [row[1].strip("`") for row in rows[1:]] == list(WAN.adapters.targets)
