"""A model on the host whose matrices are read from its files at each use.

It computes in fp32, whatever a run trains in, and a base of any size needs the memory of its
largest matrix. Exports are verified with it.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ditkit_core.adapters.config import AdapterConfig, BaseConfig
from ditkit_core.adapters.inject import (
    adapter_layers,
    canonical_name,
    initialise,
    trainable_parameters,
)
from ditkit_core.loading.model import Model
from ditkit_core.loading.on_meta import model_on_meta
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import ModelSpec, build_on_meta
from ditkit_core.nn.weight_at_use import make_at_use
from ditkit_core.weights.load import load_into

_HOST = torch.device("cpu")
_MAGNITUDE = "lora_magnitude_vector.weight"
_PROCESS_BYTES = 900 * 2**20
"""Host memory of a process once it has imported what verifying takes; measured with torch 2.15 and
diffusers 0.42."""


def read_at_use(
    spec: ModelSpec,
    components: ModelPaths,
    adapter: AdapterConfig,
    base: BaseConfig,
    *,
    component: str = "transformer",
) -> Model:
    """Build a model whose matrices stay in their files; everything else, a few percent of it, is
    read now. Its adapter has zeros for values; of the base's settings what is merged counts, but
    for an assistant, and nothing is quantized."""
    # Without an assistant: an export is for the base without it.
    base = replace(base, quantize="none", compute="dtype", assistant="", assistant_low="")
    precision = Precision(matmul=torch.float32)
    model = model_on_meta(
        spec, components, adapter, base, precision=precision, component=component, keeps_codes=False
    )
    module, stored = model.module, model.origin.stored
    modules = {
        canonical_name(f"{name}.weight"): m
        for name, m in module.named_modules()
        if isinstance(m, nn.Linear)
    }
    linears = {name: layer for name, layer in modules.items() if name in stored.mapping}
    others = {name: parts for name, parts in stored.mapping.items() if name not in linears}
    dtype_of = lambda name: torch.float32
    load_into(
        module,
        stored.source,
        others,
        device_of=lambda name: _HOST,
        dtype_of=dtype_of,
        edits=stored.edits,
    )
    for name, layer in linears.items():
        make_at_use(layer, torch.float32, partial(stored.read, name))
    widths = {
        module: layer.get_base_layer().out_features
        for module, layer in adapter_layers(module).items()
    }
    # Values come from a save: a DoRA's magnitudes made here would read all matrices.
    start = (
        (lambda name: {_MAGNITUDE: torch.ones(widths[name])})
        if model.origin.adapter.use_dora
        else None
    )
    initialise(module, 0, device_of=lambda name: _HOST, start=start)
    module.eval()
    model.trainable = trainable_parameters(module)
    return model


def bytes_at_use(spec: ModelSpec, arch: Any, adapter_bytes: int) -> int:
    """Host memory of a process of its own that runs a model so, next to another program's: with a
    base in 16 bits, and an adapter of this size in fp32."""
    model = build_on_meta(spec, arch, Precision())
    matrices = [
        module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)
    ]
    others = sum(parameter.numel() for parameter in model.parameters()) - sum(matrices)
    # The largest matrix as it is read, in fp32, and once more while the one before is still there;
    # of the adapter, the save's values and average, and the model's.
    return _PROCESS_BYTES + 10 * max(matrices) + 4 * others + 3 * adapter_bytes
