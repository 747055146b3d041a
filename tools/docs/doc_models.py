"""The published models that are known by their hub id: what a run loads of them, and their
licence."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ditkit_core.adapters.files.identify import parameters_of
from ditkit_core.models.meta import on_meta
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.spec import ModelSpec
from ditkit_flux2.spec import FLUX2
from ditkit_flux3.spec import FLUX3
from ditkit_krea2.spec import KREA2
from ditkit_ltx.spec import LTX
from ditkit_qwen.spec import QWEN
from ditkit_qwenimage.spec import QWENIMAGE
from ditkit_wan.spec import WAN
from ditkit_zimage.spec import ZIMAGE

SPECS = (WAN, FLUX2, FLUX3, KREA2, LTX, QWEN, QWENIMAGE, ZIMAGE)
LICENCES = {
    "black-forest-labs/FLUX.2-klein-4B": "Apache 2.0",
    "black-forest-labs/FLUX.2-klein-9B": "FLUX Non-Commercial",
    "black-forest-labs/FLUX.2-klein-base-4B": "Apache 2.0",
    "black-forest-labs/FLUX.2-klein-base-9B": "FLUX Non-Commercial",
    "black-forest-labs/FLUX.2-dev": "FLUX Non-Commercial",
    **dict.fromkeys(
        (
            "Qwen/Qwen-Image",
            "Qwen/Qwen-Image-2512",
            "Qwen/Qwen-Image-Edit",
            "Qwen/Qwen-Image-Edit-2509",
            "Qwen/Qwen-Image-Edit-2511",
        ),
        "Apache 2.0",
    ),
    "Tongyi-MAI/Z-Image": "Apache 2.0",
    "Tongyi-MAI/Z-Image-Turbo": "Apache 2.0",
}
"""By hub id, as the pages of the packages have them."""


def _gigabytes(module: nn.Module) -> float:
    return 2 * sum(each.numel() for each in module.parameters()) / 1e9


def sizes(spec: ModelSpec, arch: Any) -> dict[str, float]:
    """GB of each part in bf16, from shapes alone: all transformers, then the encoders that every
    run loads."""
    count = max(1, len(spec.architecture.experts(arch)))
    name = "transformer" if count == 1 else f"{count} transformers"
    shapes = parameters_of(spec.architecture.build, arch).values()
    found = {name: count * 2 * sum(map(math.prod, shapes)) / 1e9}
    for model in spec.for_arch(arch).auxiliary.models(arch, ModelPaths()):
        if model.stage == "encode":
            with on_meta():
                found[model.name.removesuffix(" encoder") if model.tiles else model.name] = (
                    _gigabytes(model.build(torch.bfloat16))
                )
    return found


def row(spec: ModelSpec, hub_id: str) -> str:
    """The line of a published model."""
    preset = spec.architecture.hub_presets[hub_id]
    found = sizes(spec, spec.architecture.presets[preset])
    name, size = next(iter(found.items()))
    two = " (two)" * name.startswith("2 ")
    licence = LICENCES.get(hub_id, "")
    total = sum(found.values())
    return f"| `{hub_id}` | `{preset}` | {size:.1f}{two} | {total:.1f} | {licence} |"


def models() -> Iterator[str]:
    """A row for each hub id that a preset belongs to."""
    yield "| `model.base` | preset | transformer, GB | with encoders | licence, if it is known |"
    yield "|---|---|---:|---:|---|"
    for spec in SPECS:
        for hub_id in spec.architecture.hub_presets:
            yield row(spec, hub_id)
