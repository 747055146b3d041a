"""Files of scaled 8-bit weights, as ComfyUI writes them: held as they are, and written."""

import json
from pathlib import Path

import pytest
import torch
from base_files import State, dense_weight_of, original, prepared, values_of, write
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from toy_world import World, equal

from ditkit_core.adapters.config import AdapterConfig, ExportConfig
from ditkit_core.adapters.files.export import check_export, export_adapter, export_merged
from ditkit_core.adapters.inject import adapter_layers
from ditkit_core.commands import cli
from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import Precision
from ditkit_core.nn.quantized_linear import quantized_weights
from ditkit_core.testing.combinations import every_pair
from ditkit_core.testing.toy import TOY, official_name, toy_items
from ditkit_core.weights.fp8_scaled import num_scaled, open_weights

FP8 = torch.float8_e4m3fn


def scaled(
    state: State, *, rows: bool = False, rest: torch.dtype = torch.bfloat16
) -> tuple[State, State, State]:
    """Codes, scales by the weight's name, and what they stand for: blocks' matrices are scaled, the
    rest is not."""
    codes, scales, values = {}, {}, {}
    for name, tensor in state.items():
        if tensor.ndim == 2 and "blocks." in name:
            largest = tensor.abs().amax(1) if rows else tensor.abs().max()
            scales[name] = largest / 448
            codes[name] = (tensor / scales[name].reshape(-1, 1)).to(FP8)
            values[name] = codes[name].float() * scales[name].reshape(-1, 1)
        else:
            codes[name] = tensor.to(rest)
            values[name] = codes[name].float()
    return codes, scales, values


def legacy(codes: State, scales: State) -> tuple[State, dict[str, str]]:
    beside = {name.replace("weight", "scale_weight"): scale for name, scale in scales.items()}
    inputs = {name.replace("weight", "scale_input"): torch.ones(()) for name in scales}
    return {"scaled_fp8": torch.empty(0).to(FP8), **codes, **beside, **inputs}, {}


def marked(codes: State, scales: State) -> tuple[State, dict[str, str]]:
    about = torch.tensor(list(json.dumps({"format": "float8_e4m3fn"}).encode()), dtype=torch.uint8)
    beside = {
        name.replace("weight", "weight_scale"): scale.reshape(-1) for name, scale in scales.items()
    }
    return {
        **codes,
        **beside,
        **{name.replace("weight", "comfy_quant"): about.clone() for name in scales},
    }, {}


def in_header(codes: State, scales: State) -> tuple[State, dict[str, str]]:
    beside = {
        f"model.{name.replace('weight', 'weight_scale')}": scale for name, scale in scales.items()
    }
    beside |= {
        f"model.{name.replace('weight', 'input_scale')}": torch.tensor(0.3) for name in scales
    }
    layers = {
        f"model.{name.removesuffix('.weight')}": {"format": "float8_e4m3fn"} for name in scales
    }
    header = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    return {**{f"model.{name}": code for name, code in codes.items()}, **beside}, header


WRITERS = {"legacy": legacy, "comfy_quant": marked, "header": in_header}


def outputs(model: nn.Module) -> torch.Tensor:
    items = toy_items(1)
    with torch.no_grad():
        inputs = TOY.training.make_inputs([items[0]["latents"]], torch.tensor([0.4]), items, 1.0)
        return model.eval()(inputs)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("equal_steps_are_profiled_once")
def test_a_scaled_file_is_planned_as_it_is_held(tmp_path, capsys):
    codes, scales, values = scaled(original("official"))
    found = {}
    for name, tensors in (("scaled", legacy(codes, scales)), ("dense", (values, {}))):
        path = write(tmp_path / name, *tensors)
        argv = [
            "--model.transformer",
            str(path),
            "--model.preset",
            "tiny",
            "--plan",
            "--json",
            "--gpus",
            "24GiB",
        ]
        for quantize in ("none", "fp8"):
            assert (
                cli.run(
                    TOY,
                    "train",
                    [*argv, "--run.folder", str(tmp_path / "run"), "--base.quantize", quantize],
                )
                == 0
            )
            found[name, quantize] = json.loads(capsys.readouterr().out)
    weights = {key: plan["devices"][0]["weights"] for key, plan in found.items()}
    assert weights["scaled", "none"] == weights["dense", "fp8"] < weights["dense", "none"]
    assert "is in fp8: planned as it is stored" in found["scaled", "none"]["notes"][0]
    assert found["dense", "none"]["notes"] == []


@pytest.mark.parametrize("rows", [False, True], ids=["tensor", "rows"])
def test_a_scaled_file_is_multiplied_as_it_is(tmp_path, rows):
    """Its codes, with the scale of the file, in products of fp8."""
    codes, scales, _ = scaled(original("official"), rows=rows)
    path, lines = write(tmp_path, *legacy(codes, scales)), list[str]()
    stored, computed = prepared(path), prepared(path, compute="fp8", say=lines.append)
    layers = quantized_weights(computed.module)
    assert (
        lines[-1]
        == f"base.compute = fp8: {len(layers)} matrices are multiplied in 8 bits, forward and backward"
    )
    assert layers and all(layer.in_8_bits for layer in layers.values())
    plain, found = outputs(stored.module), outputs(computed.module)
    assert 1e-3 < float((found - plain).norm() / plain.norm()) < 0.2


@pytest.mark.parametrize(
    ("kind", "form", "rows"), every_pair([*WRITERS], ["official", "diffusers"], [False, True])
)
def test_a_scaled_file_is_held_as_it_is(tmp_path, form, kind, rows):
    """In the diffusers form rows of a module are three tensors' and several modules one tensor's,
    each with its scale."""
    codes, scales, values = scaled(original(form), rows=rows)
    path = write(tmp_path / "scaled", *WRITERS[kind](codes, scales))
    lines: list[str] = []
    model = prepared(path, say=lines.append).module
    assert (
        f"{path}: 12 matrices stay as they are stored, in fp8; the base takes" in lines[0]
        and len(lines) == 1
    )
    held = quantized_weights(model)
    assert len(held) == 12 and {layer.kind for layer in held.values()} == {"fp8"}
    dense = write(tmp_path / "dense", values)
    expected = prepared(dense).module
    for name, layer in held.items():
        weight = dense_weight_of(expected, name)
        assert torch.equal(layer.dequantize(), weight), name
        assert layer.weight.dtype == FP8
    assert torch.equal(outputs(model), outputs(expected))
    in_16 = (prepared(each, precision=Precision()).module for each in (path, dense))
    assert torch.equal(*map(outputs, in_16))
    assert equal(values_of(path, quantize="fp8"), values_of(path))


def test_the_rounding_is_that_of_8_bits(tmp_path):
    state = original("official")
    codes, scales, _ = scaled(state)
    found = values_of(write(tmp_path, *legacy(codes, scales)))
    for name in scales:
        error = (found[name.replace("blocks", "layers")] - state[name]).norm() / state[name].norm()
        assert 0.01 < error < 0.04, name


def test_plain_8_bit_matrices_and_dense_ones_next_to_scaled_ones_stay_what_they_are(tmp_path):
    state = original("official")
    codes, scales, values = scaled(state)
    for name, dtype in {"blocks.0.out.weight": FP8, "blocks.1.query.weight": torch.float16}.items():
        codes[name] = state[name].to(dtype)
        values[name] = codes[name].float()
        del scales[name]
    path = write(tmp_path / "scaled", *legacy(codes, scales))
    assert len(quantized_weights(prepared(path).module)) == 10
    assert len(quantized_weights(prepared(path, "fp8").module)) == 12
    assert equal(values_of(path), values_of(write(tmp_path / "dense", values)))
    mark_alone = write(
        tmp_path / "plain",
        {"scaled_fp8": torch.zeros(2).to(FP8), **{n: t.to(FP8) for n, t in state.items()}},
    )
    assert quantized_weights(prepared(mark_alone).module) == {}


def test_matrices_outside_of_the_blocks_and_those_in_fp32_are_dense(tmp_path):
    codes, scales, values = scaled(original("official"))
    for name in ("text_in.weight", "head.out.weight"):
        codes[name], scales[name] = (values[name] * 100).to(FP8), torch.tensor(0.01)
        values[name] = codes[name].float() * 0.01
    path = write(tmp_path / "scaled", *legacy(codes, scales))
    assert len(quantized_weights(prepared(path).module)) == 12
    assert equal(values_of(path), values_of(write(tmp_path / "dense", values)))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_another_form_is_made_of_its_values_and_said(tmp_path, kind):
    codes, scales, values = scaled(original("official"))
    path, lines = write(tmp_path / "scaled", *legacy(codes, scales)), []
    found = values_of(path, quantize=kind, say=lines.append)
    assert "rounded once more; a bf16 file or base.quantize = none loses less" in lines[0]
    assert equal(found, values_of(write(tmp_path / "dense", values), quantize=kind))


def test_an_adapter_is_merged_into_the_values_and_rounded_once_more(tmp_path):
    codes, scales, values = scaled(original("official"))
    path, dense = (
        write(tmp_path / "scaled", *legacy(codes, scales)),
        write(tmp_path / "dense", values),
    )
    model = prepared(dense, adapter=AdapterConfig(rank=4, targets=("qkv",))).module
    for layer in adapter_layers(model).values():
        nn.init.normal_(layer.lora_B["default"].weight)
    (file,) = export_adapter(
        model, TOY, tmp_path, "adapter", ExportConfig(dtype="fp32"), metadata={}
    )
    lines: list[str] = []
    merged = prepared(path, merge=(str(file),), say=lines.append)
    assert "those that a merged adapter changes are rounded once more" in lines[0]
    expected, plain = (values_of(dense, quantize=q, merge=(str(file),)) for q in ("fp8", "none"))
    for name, layer in quantized_weights(merged.module).items():
        if "qkv" in name:
            assert torch.equal(layer.dequantize(), expected[name]), name
            assert torch.equal(merged.origin.stored.read(name), plain[name])
        else:
            assert torch.equal(layer.dequantize(), plain[name]), name
    lines.clear()
    unchanged = quantized_weights(prepared(path, merge=(f"{file}@0",), say=lines.append).module)
    assert "base.merge" not in lines[0], (
        "nothing is changed at strength 0, which says that an expert has no file"
    )
    assert all(
        torch.equal(layer.weight, codes[official_name(name)]) for name, layer in unchanged.items()
    )


def test_a_full_fine_tune_of_it_is_refused(tmp_path):
    codes, scales, _ = scaled(original("official"))
    path = write(tmp_path, *legacy(codes, scales))
    with pytest.raises(
        UserError, match="get the bf16 file, or set adapter.method = lora"
    ) as caught:
        prepared(path, adapter=AdapterConfig(method="full"))
    assert "\n" not in str(caught.value)


def test_a_scale_is_part_of_the_fingerprint(tmp_path):
    codes, scales, _ = scaled(original("official"))
    first = open_weights(write(tmp_path / "a", *legacy(codes, scales))).fingerprint()
    assert open_weights(write(tmp_path / "b", *legacy(codes, scales))).fingerprint() == first
    scales["blocks.1.out.weight"] = scales["blocks.1.out.weight"] * 2
    assert open_weights(write(tmp_path / "c", *legacy(codes, scales))).fingerprint() != first


BLOCK = "blocks.0.out"
OTHERS = {
    "nvfp4": {f"{BLOCK}.weight": torch.zeros(32, 16, dtype=torch.uint8),
    f"{BLOCK}.weight_scale": torch.ones(32, 2).to(FP8)},
    "two scales": {f"{BLOCK}.weight_scale_2": torch.ones(())},
    "inverse": {f"{BLOCK}.weight_scale_inv": torch.ones(1, 1)},
    "smoothed": {f"{BLOCK}.pre_quant_scale": torch.ones(32)},
    "blocks": {f"{BLOCK}.weight_scale": torch.ones(2, 2)},
    "int8": {f"{BLOCK}.weight": torch.ones(32, 32, dtype=torch.int8),
    f"{BLOCK}.weight_scale": torch.ones(())},
    "e5m2": {f"{BLOCK}.weight": torch.ones(32, 32).to(torch.float8_e5m2),
    f"{BLOCK}.weight_scale": torch.ones(())},
    "format": {f"{BLOCK}.comfy_quant": torch.tensor(list(b'{"format": "svdquant_w4a4"}'),
    dtype=torch.uint8)},
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_other_forms_are_refused_in_a_line(tmp_path, other):
    codes, scales, _ = scaled(original("official"))
    del scales[f"{BLOCK}.weight"]
    state, _ = marked(codes, scales)
    path = write(tmp_path, {**state, **OTHERS[other]})
    with pytest.raises(
        UserError, match=f"{BLOCK}.*is not supported; get the bf16 or the fp8_scaled file"
    ) as caught:
        prepared(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", [b"{", b"[]", b"{}"])
def test_a_format_that_cannot_be_read_is_one_line(tmp_path, damage):
    path = write(tmp_path, {"a.comfy_quant": torch.tensor(list(damage), dtype=torch.uint8)})
    with pytest.raises(UserError, match="cannot be read.*fetch it again") as caught:
        open_weights(path)
    assert "\n" not in str(caught.value)


def test_scales_without_their_matrices_are_named_as_such(tmp_path):
    codes, scales, _ = scaled(original("official"))
    del codes["blocks.0.out.weight"]
    path = write(tmp_path, *legacy(codes, scales))
    with pytest.raises(
        UserError, match="has scales for 8-bit weights that it lacks; fetch it again"
    ):
        prepared(path)


# Written


def adapted(path: Path, quantize: str = "none") -> Model:
    result = prepared(path, quantize, adapter=AdapterConfig(rank=4, targets=("qkv", "mlp.0")))
    torch.manual_seed(1)
    for layer in adapter_layers(result.module).values():
        nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    return result


def exported(result: Model, folder: Path, dtype: str = "fp8_scaled", **settings: object) -> Path:
    config = ExportConfig(dtype=dtype, merged=True)
    (target,) = export_merged(
        result.module, TOY, folder, config, metadata={"a": "b"}, original=result.origin.stored.read,
        **settings
    )  # fmt: skip
    return target


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_a_merged_model_is_written_in_that_form_and_read_back(tmp_path, quantize):
    base = write(tmp_path / "base", original("official"))
    result = adapted(base, quantize)
    dense = load_file(
        exported(result, tmp_path / "dense", "fp32") / "diffusion_pytorch_model.safetensors"
    )
    folder = exported(result, tmp_path / "scaled")
    state = load_file(folder / "diffusion_pytorch_model.safetensors")
    matrices = {
        name for name, tensor in dense.items() if tensor.ndim == 2 and name.startswith("blocks.")
    }
    assert len(matrices) == 12
    assert state.keys() == dense.keys() | {"scaled_fp8"} | {
        name.replace("weight", "scale_weight") for name in matrices
    }
    assert state["scaled_fp8"].dtype == FP8 and len(state["scaled_fp8"]) == 2
    found = values_of(folder)
    for name, tensor in dense.items():
        ours = (
            "embed." + name.replace("_in", "")
            if "_in." in name
            else name.replace("blocks", "layers")
        )
        if name in matrices:
            scale = state[name.replace("weight", "scale_weight")]
            assert (
                scale.shape == ()
                and scale.dtype == torch.float32
                and torch.equal(scale, tensor.abs().max() / 448)
            )
            assert torch.equal(state[name].float(), (tensor / scale).to(FP8).float()), name
            assert torch.equal(found[ours], state[name].float() * scale), name
        else:
            kept = torch.float32 if name.startswith(("time_in", "head")) else torch.bfloat16
            assert state[name].dtype == kept and torch.equal(
                found[ours], tensor.to(kept).float()
            ), name
    with safe_open(folder / "diffusion_pytorch_model.safetensors", "pt") as file:
        assert file.metadata()["a"] == "b"


def test_a_sharded_one_reads_back_the_same(tmp_path):
    result = adapted(write(tmp_path / "base", original("official")))
    whole, parts = (
        exported(result, tmp_path / "whole"),
        exported(result, tmp_path / "parts", shard_bytes=5000),
    )
    assert len(list(parts.glob("*.safetensors"))) > 3
    assert num_scaled(open_weights(parts)) == 12
    assert equal(values_of(parts), values_of(whole))


def test_zeros_are_written_as_zeros(tmp_path):
    state = original("official")
    state["blocks.0.out.weight"].zero_()
    found = values_of(exported(prepared(write(tmp_path / "base", state)), tmp_path / "out"))
    assert not found["layers.0.out.weight"].any() and all(
        tensor.isfinite().all() for tensor in found.values()
    )


def test_adapters_and_other_forms_are_not_written_in_8_bits(tmp_path):
    with pytest.raises(
        UserError, match=r"set export.merged = true \(--merge\), or export.dtype = bf16"
    ):
        check_export(TOY, ExportConfig(dtype="fp8_scaled"), AdapterConfig())
    with pytest.raises(UserError, match="set export.forms = \\['official'\\]"):
        ExportConfig(dtype="fp8_scaled", forms=("diffusers",), merged=True)
    check_export(TOY, ExportConfig(dtype="fp8_scaled"), AdapterConfig(method="full"))
    config = ExportConfig(dtype="fp8_scaled", merged=True)
    check_export(TOY, config, AdapterConfig())
    result = adapted(write(tmp_path, original("official")))
    (file,) = export_adapter(result.module, TOY, tmp_path, "adapter", config, metadata={})
    assert {stored.dtype for stored in SafetensorsSource.open(file).tensors.values()} == {
        torch.bfloat16
    }


def test_a_run_trains_over_what_another_wrote(tmp_path, capsys):
    world = World(tmp_path)
    assert world.train("first", 2, "--export.merged", "true", "--export.dtype", "fp8_scaled") == 0
    written = world.folder / "first" / "exports" / "transformer_official"
    where = ("--model.transformer", str(written))
    assert world.train("whole", 3, *where) == 0
    assert world.train("parts", 1, *where) == 0
    assert (
        world.train("parts", 3, *where, "--base.quantize", "fp8", "--train.checkpointing", "full")
        == 0
    )
    assert "12 matrices stay as they are stored, in fp8" in capsys.readouterr().out
    assert equal(world.adapter("whole"), world.adapter("parts"))
    folder = ("--run.folder", str(world.folder / "whole"), *where)
    assert world.run("export", *folder, "--dtype", "fp8_scaled") == 1
    assert "set export.merged = true (--merge)" in capsys.readouterr().err
    out = world.folder / "out"
    assert world.run("export", *folder, "--dtype", "fp8_scaled", "--merge", "--out", str(out)) == 0
    assert num_scaled(open_weights(out / "transformer_official")) == 12
