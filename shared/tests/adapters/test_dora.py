"""DoRA in files for diffusers and for ComfyUI, whose norms differ: both files are the trained
model."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ditkit_core.adapters.config import AdapterConfig, BaseConfig, ExportConfig
from ditkit_core.adapters.dora import DORA_METADATA
from ditkit_core.adapters.files.export import export_adapter
from ditkit_core.adapters.inject import adapter_layers
from ditkit_core.engine.placement import place_blocks
from ditkit_core.loading.on_meta import model_on_meta
from ditkit_core.loading.weights import load_weights
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, ToyModel, in_form, official_name

SPEC = altered(TOY, presets={"tiny": ToyArch()})
FP32 = Precision(matmul=torch.float32)
DORA = AdapterConfig(rank=4, alpha=3.0, use_dora=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("base") / "x.safetensors"
    save_file(in_form(ToyModel(ToyArch(), FP32).state_dict(), "official"), path)
    return path


def prepared(
    base: Path, adapter: AdapterConfig, *, quantize: str = "none", merge: tuple[str, ...] = ()
):
    unloaded = model_on_meta(
        SPEC,
        ModelPaths(transformer=str(base)),
        adapter,
        BaseConfig(merge=merge, quantize=quantize),
        precision=FP32,
    )
    return load_weights(
        unloaded, placement=place_blocks(unloaded.module, [torch.device("cpu")]), seed=0
    )


def trained(base: Path, quantize: str = "none"):
    result, generator = prepared(base, DORA, quantize=quantize), torch.Generator().manual_seed(1)
    for name, parameter in result.trainable.items():
        step = 0.1 * torch.randn(parameter.shape, generator=generator)
        parameter.data += step.abs() if "magnitude" in name else step
    return result


def export(result, folder: Path, form: str) -> Path:
    config = ExportConfig(forms=(form,), dtype="fp32")
    (file,) = export_adapter(result.module, SPEC, folder, "adapter", config, metadata={})
    return file


def merged_by_peft(layer) -> Tensor:
    """The weight that peft makes of a layer."""
    before = layer.base_layer.weight.data.clone()
    layer.merge()
    merged = layer.base_layer.weight.data.clone()
    layer.base_layer.weight.data = before
    layer.merged_adapters.clear()
    return merged


def merged_by_comfyui(weight: Tensor, tensors: dict[str, Tensor], key: str) -> Tensor:
    """What ComfyUI does with a file's tensors, from the description of its computation:
    `dora_scale` [out, 1] is divided by the norm of each row of the weight as it was before the
    product of the matrices was added."""
    scale, product = (
        tensors[f"{key}.dora_scale"],
        tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"],
    )
    assert scale.shape == (len(weight), 1)
    norm = weight.norm(dim=1, keepdim=True) + torch.finfo(weight.dtype).eps
    return (weight + product) * (scale / norm)


def test_comfyui_makes_of_the_official_file_what_peft_makes_of_the_model(
    base: Path, tmp_path: Path
) -> None:
    result = trained(base)
    file = export(result, tmp_path, "official")
    tensors = load_file(file)
    for name, layer in adapter_layers(result.module).items():
        weight = layer.base_layer.weight.data.clone()
        expected = merged_by_peft(layer)
        found = merged_by_comfyui(
            weight, tensors, f"diffusion_model.{official_name(f'{name}.weight')[: -len('.weight')]}"
        )
        assert (expected - weight).norm() > 0.05 * weight.norm(), name
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)
    with safe_open(file, "pt") as opened:
        assert "as ComfyUI computes it" in opened.metadata()[DORA_METADATA]


@pytest.mark.parametrize("form", ["official", "diffusers"])
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_training_goes_on_from_either_file_where_it_stopped(
    base: Path, tmp_path: Path, form: str, quantize: str
) -> None:
    result = trained(base, quantize)
    again = prepared(
        base, AdapterConfig(init=str(export(result, tmp_path, form))), quantize=quantize
    )
    for name, parameter in result.trainable.items():
        if "magnitude" in name:
            torch.testing.assert_close(
                again.trainable[name], parameter, rtol=1e-5, atol=1e-6, msg=name
            )


@pytest.mark.parametrize("form", ["official", "diffusers"])
def test_either_file_merged_into_the_base_is_what_peft_merges(
    base: Path, tmp_path: Path, form: str
) -> None:
    result = trained(base)
    again = prepared(
        base, AdapterConfig(targets=("out",)), merge=(str(export(result, tmp_path, form)),)
    )
    merged = {
        name: parameter
        for name, parameter in again.module.named_parameters()
        if name.endswith("qkv.weight")
    }
    for name, weight in merged.items():
        expected = merged_by_peft(adapter_layers(result.module)[name.removesuffix(".weight")])
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6, msg=name)
    assert merged


def test_a_row_of_zeros_in_the_base_is_exact_too(base: Path, tmp_path: Path) -> None:
    weights = load_file(base)
    name = next(name for name in weights if name.endswith("blocks.0.qkv.weight"))
    weights[name][3] = 0
    save_file(weights, tmp_path / "zero.safetensors")
    result = trained(tmp_path / "zero.safetensors")
    layer = adapter_layers(result.module)["layers.0.qkv"]
    tensors = load_file(export(result, tmp_path, "official"))
    found = merged_by_comfyui(
        layer.base_layer.weight.data.clone(), tensors, "diffusion_model.blocks.0.qkv"
    )
    torch.testing.assert_close(found, merged_by_peft(layer), rtol=1e-5, atol=1e-6)
