"""Bases of the toy as files, and models that are prepared from them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from ditkit_core.adapters.config import AdapterConfig, BaseConfig
from ditkit_core.engine.placement import place_blocks
from ditkit_core.loading.model import Model
from ditkit_core.loading.on_meta import model_on_meta
from ditkit_core.loading.weights import load_weights
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.nn.quantized_linear import quantized_weights
from ditkit_core.testing.toy import TOY, ToyArch, ToyModel, in_form

FP32 = Precision(matmul=torch.float32)
CPU = torch.device("cpu")
ADAPTER = AdapterConfig(rank=4, targets=("qkv",))
"""On one layer of a block: injecting adapters takes most of the time of preparing a toy."""
State = dict[str, torch.Tensor]


@cache
def _original(form: str) -> State:
    torch.manual_seed(0)
    return {
        name: tensor.detach().clone()
        for name, tensor in in_form(ToyModel(ToyArch(), FP32).state_dict(), form).items()
    }


def original(form: str) -> State:
    """The toy's values, whose tensors are not to be changed."""
    return dict(_original(form))


def write(folder: Path, state: State, header: dict[str, str] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "x.safetensors", metadata=header or {})
    return folder / "x.safetensors"


def prepared(
    path: Path, quantize: str = "none", *, adapter: AdapterConfig | None = None, merge: tuple[str, ...] = (),
    precision: Precision = FP32, say: Callable[[str], None] = lambda line: None, compute: str = "dtype",
) -> Model:  # fmt: skip
    unloaded = model_on_meta(
        TOY, ModelPaths(transformer=str(path), preset="tiny"), adapter or ADAPTER,
        BaseConfig(quantize=quantize, compute=compute, merge=merge), precision=precision, say=say,
    )  # fmt: skip
    return load_weights(unloaded, placement=place_blocks(unloaded.module, [CPU]), seed=0)


def dense_weight_of(model: nn.Module, name: str) -> torch.Tensor:
    """The weight of this name, whether its layer has an adapter or not."""
    layer = model.get_submodule(name.removesuffix(".weight"))
    weight: torch.Tensor = getattr(layer, "base_layer", layer).weight
    return weight


def values_of(path: Path, **settings: object) -> State:
    """What the model holds, dequantized."""
    model = prepared(path, **settings).module
    held = quantized_weights(model)
    dense = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    }
    return {
        name: held[name].dequantize() if name in held else tensor.float()
        for name, tensor in dense.items()
        if ".weight_" not in name  # scales
    }
