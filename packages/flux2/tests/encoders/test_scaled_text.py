"""Text encoders whose matrices are 8-bit codes with a scale, as ComfyUI's files have them: held so,
or read layer by layer."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_encoders import write_mistral, write_qwen

from ditkit_core.families.text import LanguageModelEncoder
from ditkit_core.models.encoders import Streaming
from ditkit_core.models.paths import ModelPaths
from ditkit_core.nn.quantized_linear import QuantizedLinear
from ditkit_core.weights import layer_streaming as streamed_module
from ditkit_flux2.encoders import TEXT

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
LAYERS = (2, 4, 6)
SHALLOW = replace(TEXT, models=tuple(replace(family, layers=LAYERS) for family in TEXT.models))
"""The published encoders read layers of 30."""
CAPTIONS = ["a red circle", ""]


@pytest.fixture(scope="module", params=[write_mistral, write_qwen], ids=["mistral", "qwen"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder in folders: as it is, scaled, and with the values that the scaled one stands
    for."""
    folder = tmp_path_factory.mktemp("scaled")
    write: Callable[..., object] = request.param
    write(folder / "exact", layers=LAYERS[-1] + 1)
    format_of = torch.tensor(
        list(json.dumps({"format": "float8_e4m3fn"}).encode()), dtype=torch.uint8
    )
    codes, values = {}, {}
    for name, tensor in load_file(folder / "exact" / "text_encoder" / "model.safetensors").items():
        if name.endswith("_proj.weight") and "vision" not in name:
            scale = tensor.abs().max() / 448
            codes[name] = (tensor / scale).to(FP8)
            codes[name.replace("weight", "weight_scale")] = scale
            codes[name.replace("weight", "input_scale")] = torch.tensor(0.5)
            codes[name.replace("weight", "comfy_quant")] = format_of.clone()
            values[name] = codes[name].float() * scale
        else:
            codes[name] = tensor.bfloat16()
            values[name] = codes[name].float()
    for kind, state in (("scaled", codes), ("values", values)):
        (folder / kind).mkdir()
        config = (folder / "exact" / "text_encoder" / "config.json").read_text()
        (folder / kind / "config.json").write_text(config)
        save_file(state, folder / kind / "model.safetensors")
    return folder


def made(base: Path, kind: str, dtype: torch.dtype, streaming: Streaming) -> LanguageModelEncoder:
    where = (
        ModelPaths(base=str(base / "exact"), text_encoder=str(base / kind))
        if kind != "exact"
        else ModelPaths(base=str(base / kind))
    )
    return LanguageModelEncoder(SHALLOW, where, CPU, dtype, streaming)


def loaded(base: Path, kind: str, dtype: torch.dtype, streaming: Streaming) -> LanguageModelEncoder:
    encoder = made(base, kind, dtype, streaming)
    encoder.load()
    return encoder


@cache
def features_of(base: Path, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Of an encoder that is loaded whole; tests only read them."""
    return features(loaded(base, kind, dtype, "never"))


def features(encoder: LanguageModelEncoder) -> torch.Tensor:
    return torch.stack([encoder.encode([caption])[0]["text"] for caption in CAPTIONS])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scaled_matrices_stay_in_8_bits_and_give_what_their_values_give(
    base: Path, dtype: torch.dtype
) -> None:
    resident, expected = loaded(base, "scaled", dtype, "never"), features_of(base, "values", dtype)
    matrices = [
        module for module in resident._model.modules() if isinstance(module, QuantizedLinear)
    ]
    assert len(matrices) == 7 * len(resident._model.layers) and {
        m.weight.dtype for m in matrices
    } == {FP8}
    assert expected.dtype == dtype and torch.equal(features(resident), expected)
    streamed = loaded(base, "scaled", dtype, "always")
    assert streamed.streams and torch.equal(features(streamed), expected)
    others = made(base, "values", dtype, "never")
    assert streamed.identity == resident.identity != others.identity


def test_the_error_is_that_of_8_bits(base: Path) -> None:
    # the scaled ones are as the values are, which another test compares
    found, exact = (features_of(base, kind, torch.float32) for kind in ("values", "exact"))
    # 0.026 of a matrix (three bits of fraction) and 0.002 of the rest in bf16, through six layers
    assert 0.01 < (found - exact).norm() / exact.norm() < 0.4


def test_it_is_unloaded_and_loaded_again(base: Path) -> None:
    encoder = loaded(base, "scaled", torch.float32, "never")
    encoder.unload()
    assert all(parameter.is_meta for parameter in encoder._model.parameters())
    encoder.load()
    assert torch.equal(features(encoder), features_of(base, "values", torch.float32))


def test_matrices_count_a_byte_to_a_number_where_memory_is_asked(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def free(device: torch.device) -> int:
        return 2**40

    def too_large(needed: int, free_bytes: int) -> bool:
        asked.append(needed)
        return False

    monkeypatch.setattr(streamed_module, "free_memory_bytes", free)
    monkeypatch.setattr(streamed_module, "too_large", too_large)
    for kind in ("scaled", "values"):
        encoder = loaded(base, kind, torch.bfloat16, "auto")
        matrices = [
            (layer.in_features - 4) * layer.out_features  # a byte less each, and a scale to a row
            for layer in encoder._model.modules()
            if hasattr(layer, "in_features")
        ]
    assert asked[1] - asked[0] == sum(matrices) > 0
