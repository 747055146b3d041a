"""Tiny models with adapters that do something, and their files."""

import re
from pathlib import Path
from typing import Any

import torch
from tiny_flux2 import tiny_model
from torch import nn

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.files.write import trained_adapters, write_adapter
from ditkit_core.adapters.inject import adapter_layers, initialise, inject
from ditkit_core.io.rng import generator
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.protocol import run_plain
from ditkit_core.nn.factored import parts_of
from ditkit_flux2.state_dict import NAMES
from ditkit_flux2.verify import DIFFUSERS

ADALN = "head.adaLN_modulation.1"


def kinds_of_layers(kind: str) -> list[str]:
    """The Linear layers, as patterns: one for all blocks."""
    linears = [
        name for name, module in tiny_model(kind).named_modules() if isinstance(module, nn.Linear)
    ]
    return list(dict.fromkeys(re.sub(r"(?<=blocks\.)\d+", "*", name) for name in linears))


class Adapted:
    """A model with a trained adapter."""

    def __init__(
        self,
        kind: str,
        targets: tuple[str, ...],
        *,
        size: float = 0.3,
        dtype: torch.dtype = torch.float32,
        **config: Any,
    ):
        self.model = tiny_model(kind, dtype)
        inject(self.model, AdapterConfig(rank=3, targets=targets, **config), {})
        initialise(self.model, 0, device_of=lambda name: torch.device("cpu"))
        with torch.no_grad():
            for name, layer in adapter_layers(self.model).items():
                if config.get("method", "lora") != "lora":
                    for part in parts_of(layer, config["method"]).values():
                        part.add_(size * torch.randn(part.shape, generator=generator("up", name)))
                    continue
                up = layer.lora_B["default"].weight
                up.copy_(size * torch.randn(up.shape, generator=generator("up", name)))

    def write(self, folder: Path, form: str, dtype: torch.dtype = torch.float32) -> Path:
        """The file, without asking whether its readers understand it."""
        path = folder / "adapter.safetensors"
        adapters = trained_adapters(adapter_layers(self.model))
        write_adapter(path, adapters, NAMES, form=form, dtype=dtype, metadata={})
        return path

    def verify(self, file: Path) -> str:
        return DIFFUSERS.verify(
            file, ModelPaths(transformer="tiny.safetensors"), self.model, run_plain
        )
