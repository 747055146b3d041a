"""Files with matrices in int8, mxfp8 and nvfp4, as ComfyUI's have them: read by the formats'
definitions, number by number."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from base_files import dense_weight_of, original, prepared, values_of, write
from safetensors.torch import save_file
from torch import nn
from toy_world import World, equal

from ditkit_core.adapters.config import AdapterConfig, ExportConfig
from ditkit_core.adapters.files.export import export_adapter
from ditkit_core.adapters.inject import adapter_layers
from ditkit_core.config.resolve import resolve
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import Precision
from ditkit_core.nn.quantized_layouts import of_all_rows, quantized_layout
from ditkit_core.nn.quantized_linear import quantized_weights
from ditkit_core.planner.profiler import profile
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.plans.plan import planned_step
from ditkit_core.testing.combinations import every_value
from ditkit_core.testing.toy import TOY, toy_items
from ditkit_core.weights.fp8_scaled import num_packed, open_weights
from ditkit_core.weights.load import ParameterReader

pytestmark = pytest.mark.usefixtures("equal_steps_are_profiled_once")

State = dict[str, torch.Tensor]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8 = torch.float8_e4m3fn


def described(**about: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)


def in_tiles(scales: torch.Tensor) -> torch.Tensor:
    """uint8 scales at the offsets that cuBLAS documents, padded with zeros."""
    rows, columns = scales.shape
    down, across = math.ceil(rows / 128), math.ceil(columns / 4)
    tiles = torch.zeros(down * across * 512, dtype=torch.uint8)
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * across + column // 4
            tiles[512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scales[
                row, column
            ]
    return tiles.view(down * 128, across * 4)


def int8(
    rows: int, columns: int, random: torch.Generator, *, by_row: bool = True, group: int = 0
) -> tuple[State, torch.Tensor]:
    codes = torch.randint(-128, 128, (rows, columns), generator=random, dtype=torch.int8)
    scale = torch.rand((rows, 1) if by_row else (), generator=random) / 500
    values = codes.double() * scale.double()
    about: dict[str, object] = {"format": "int8_tensorwise"}
    if group:
        about |= {"convrot": True, "convrot_groupsize": group}
        quarter = (
            torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]).double() / 2
        )
        rotation = quarter
        while len(rotation) < group:
            rotation = torch.kron(rotation, quarter)
        values = (values.view(-1, group) @ rotation.T).view(rows, columns)
    return {"weight": codes, "weight_scale": scale, "comfy_quant": described(**about)}, values


def mxfp8(rows: int, columns: int, random: torch.Generator) -> tuple[State, torch.Tensor]:
    codes = torch.randn(rows, columns, generator=random).to(FP8)
    exponents = torch.randint(115, 123, (rows, columns // 32), generator=random, dtype=torch.uint8)
    values = torch.tensor(
        [
            [
                float(codes[i, j].float()) * 2.0 ** (int(exponents[i, j // 32]) - 127)
                for j in range(columns)
            ]
            for i in range(rows)
        ]
    ).double()
    scale = in_tiles(exponents).view(torch.float8_e8m0fnu)
    return {
        "weight": codes,
        "weight_scale": scale,
        "comfy_quant": described(format="mxfp8"),
    }, values


def nvfp4(rows: int, columns: int, random: torch.Generator) -> tuple[State, torch.Tensor]:
    codes = torch.randint(0, 256, (rows, columns // 2), generator=random, dtype=torch.uint8)
    scales = (torch.rand(rows, columns // 16, generator=random) * 10).to(FP8)
    total = torch.tensor(0.01)
    values = torch.zeros(rows, columns, dtype=torch.float64)
    for i in range(rows):
        for j in range(columns):
            code = int(codes[i, j // 2]) >> 4 if j % 2 == 0 else int(codes[i, j // 2]) & 15
            level = E2M1[code & 7] * (-1 if code & 8 else 1)
            values[i, j] = level * float(scales[i, j // 16].float()) * float(total)
    tiles = in_tiles(scales.view(torch.uint8)).view(FP8)
    return {
        "weight": codes,
        "weight_scale": tiles,
        "weight_scale_2": total,
        "comfy_quant": described(format="nvfp4"),
    }, values


Writer = Callable[[int, int, torch.Generator], tuple[State, torch.Tensor]]
WRITERS: dict[str, Writer] = {
    "int8 by row": int8,
    "int8 by tensor": lambda *sizes: int8(*sizes, by_row=False),
    "int8 rotated": lambda *sizes: int8(*sizes, group=16),
    "mxfp8": mxfp8,
    "nvfp4": nvfp4,
}


def layer_file(folder: Path, tensors: State) -> Path:
    save_file({f"x.{name}": tensor for name, tensor in tensors.items()}, folder / "x.safetensors")
    return folder / "x.safetensors"


@pytest.mark.parametrize("size", [(32, 32), (40, 160), (132, 64)], ids=str)
@pytest.mark.parametrize("name", WRITERS)
def test_a_matrix_has_the_values_of_its_definition(
    tmp_path: Path, name: str, size: tuple[int, int]
) -> None:
    tensors, values = WRITERS[name](*size, torch.Generator().manual_seed(0))
    source = open_weights(layer_file(tmp_path, tensors))
    assert list(source.tensors) == ["x.weight"] and num_packed(source) == 1
    read = source.read("x.weight")
    assert read.shape == size and read.dtype == torch.float32
    # Two roundings to fp32; sums of a rotation are exact.
    torch.testing.assert_close(read.double(), values, rtol=2e-7, atol=1e-15)


@pytest.mark.parametrize("name", WRITERS)
def test_parts_of_a_matrix_are_those_of_all_of_it(tmp_path: Path, name: str) -> None:
    tensors, _ = WRITERS[name](48, 64, torch.Generator().manual_seed(0))
    source = open_weights(layer_file(tmp_path, tensors))
    read = source.read("x.weight")
    for part, expected in (
        (source.read("x.weight", rows=range(5, 9)), read[5:9]),
        (source.read("x.weight", index=2, of=3), read[32:]),
        (
            source.read(
                "x.weight",
                torch.empty(4 * 4 * 64, dtype=torch.uint8),
                index=1,
                of=3,
                rows=range(2, 6),
            ),
            read[18:22],
        ),
    ):
        assert torch.equal(part, expected)


def test_a_large_matrix_is_unpacked_some_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, _ = nvfp4(48, 64, torch.Generator().manual_seed(0))
    source = open_weights(layer_file(tmp_path, tensors))
    expected = source.read("x.weight").clone()
    monkeypatch.setattr("ditkit_core.io.safetensors._UNPACKED_AT_ONCE", 7 * 64)
    assert torch.equal(source.read("x.weight"), expected)


def test_scales_of_columns_multiply_the_matrix(tmp_path: Path) -> None:
    tensors, values = nvfp4(32, 32, torch.Generator().manual_seed(0))
    columns = torch.linspace(0.5, 2, 32)
    source = open_weights(layer_file(tmp_path, {**tensors, "pre_quant_scale": columns}))
    torch.testing.assert_close(
        source.read("x.weight").double(), values * columns.double(), rtol=3e-7, atol=0
    )


def test_other_codes_and_other_scales_are_other_weights(tmp_path: Path) -> None:
    tensors, _ = nvfp4(32, 32, torch.Generator().manual_seed(0))
    prints = set()
    for name in ("", "weight", "weight_scale", "weight_scale_2"):
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        if name:
            changed[name].reshape(-1).view(torch.uint8)[0] ^= 1
        prints.add(open_weights(layer_file(tmp_path, changed)).fingerprint())
    assert len(prints) == 4


DAMAGES: dict[str, tuple[Callable[[State], State], str]] = {
    "no scale": (
        lambda state: {name: x for name, x in state.items() if name != "weight_scale"},
        "'weight_scale'",
    ),
    "few scales": (
        lambda state: {**state, "weight_scale": state["weight_scale"][:64].clone()},
        "bytes of scales for 32 rows",
    ),
    "another dtype": (
        lambda state: {**state, "weight": state["weight"].view(torch.int8)},
        "in int8",
    ),
    "columns": (lambda state: {**state, "pre_quant_scale": torch.ones(31)}, "for 32 columns"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_fit_its_format_is_one_line(tmp_path: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    path = layer_file(tmp_path, change(nvfp4(32, 32, torch.Generator().manual_seed(0))[0]))
    with pytest.raises(UserError, match=f"x .*{message}.*fetch the file again") as caught:
        open_weights(path)
    assert "\n" not in str(caught.value)


@cache
def _packed_base(name: str, form: str) -> State:
    random, packed = torch.Generator().manual_seed(1), original(form)
    for key in list(packed):
        if packed[key].ndim == 2 and "blocks." in key:
            tensors, _ = WRITERS[name](*packed.pop(key).shape, random)
            packed |= {
                f"{key.removesuffix('weight')}{leaf}": tensor for leaf, tensor in tensors.items()
            }
    return packed


def packed_base(name: str, form: str = "official") -> State:
    """The toy's file with its blocks in a format. Its tensors are not to be changed."""
    return dict(_packed_base(name, form))


KINDS = {name: "int8" for name in WRITERS} | {
    "int8 rotated": "int8_rotated_16",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}


def unpacked(path: Path, folder: Path) -> Path:
    """The same base with its values in fp32."""
    source = open_weights(path)
    return write(folder, {key: source.read(key) for key in source.tensors})


@pytest.mark.parametrize(("name", "form"), every_value([*WRITERS], ["official", "diffusers"]))
def test_a_model_holds_its_file_as_it_is_stored(tmp_path: Path, name: str, form: str) -> None:
    """Bitwise the values, outputs and gradients of the unpacked file; in the form diffusers modules
    are parts of tensors, and fused of several."""
    lines: list[str] = []
    path = write(tmp_path / "packed", packed_base(name, form))
    dense = unpacked(path, tmp_path / "dense")
    for precision in (Precision(matmul=torch.float32), Precision()):
        model, expected = (
            prepared(file, precision=precision, say=lines.append) for file in (path, dense)
        )
        held = quantized_weights(model.module)
        assert len(held) == 12 and {layer.kind for layer in held.values()} == {KINDS[name]}
        for weight, layer in held.items():
            dense_weight = dense_weight_of(expected.module, weight)
            assert torch.equal(layer.dequantize(precision.matmul), dense_weight), weight
        assert all(map(torch.equal, gradients(model), gradients(expected)))
    assert (
        f"12 matrices stay as they are stored, in {KINDS[name]}; the base takes" in lines[0]
        and len(lines) == 2
    )


def gradients(model: Model) -> list[torch.Tensor]:
    """Prediction, and gradients of the adapters."""
    items = toy_items(1)
    inputs = TOY.training.make_inputs([items[0]["latents"]], torch.tensor([0.4]), items, 1.0)
    model.module.train()
    for layer in adapter_layers(model.module).values():
        nn.init.ones_(layer.lora_B["default"].weight)
    prediction = model.module(inputs)[0]
    prediction.square().sum().backward()
    return [prediction, *(parameter.grad for parameter in model.trainable.values())]


@pytest.mark.parametrize("quantize", ["int8", "nf4"])
def test_another_format_is_made_of_the_values(tmp_path: Path, quantize: str) -> None:
    lines: list[str] = []
    path = write(tmp_path / "packed", packed_base("nvfp4"))
    dense = unpacked(path, tmp_path / "dense")
    assert equal(
        values_of(path, quantize=quantize, say=lines.append), values_of(dense, quantize=quantize)
    )
    assert (
        "is in nvfp4, and rounded once more; a bf16 file or base.quantize = none loses less"
        in lines[0]
    )


def test_the_format_of_the_file_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "packed", packed_base("int8 by row"))
    assert equal(values_of(path, quantize="int8"), values_of(path))


def test_matrices_that_no_layer_can_hold_are_unpacked_and_said(tmp_path: Path) -> None:
    """With scales of columns, and outside of the blocks."""
    state = packed_base("nvfp4")
    state["blocks.0.out.pre_quant_scale"] = torch.linspace(0.5, 2, 32)
    tensors, _ = int8(*state.pop("head.out.weight").shape, torch.Generator().manual_seed(2))
    state |= {f"head.out.{leaf}": tensor for leaf, tensor in tensors.items()}
    lines: list[str] = []
    path = write(tmp_path / "packed", state)
    model = prepared(path, say=lines.append).module
    assert len(quantized_weights(model)) == 11
    assert "2 matrices in 8 or 4 bits are unpacked" in lines[1]
    assert equal(values_of(path), values_of(unpacked(path, tmp_path / "dense")))


@pytest.mark.parametrize("name", ["int8 rotated", "mxfp8", "nvfp4"])
def test_an_adapter_is_merged_into_the_values_and_rounded_once_more(
    tmp_path: Path, name: str
) -> None:
    path = write(tmp_path / "packed", packed_base(name))
    model = prepared(path, adapter=AdapterConfig(rank=4, targets=("qkv",))).module
    for layer in adapter_layers(model).values():
        nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    (file,) = export_adapter(
        model, TOY, tmp_path, "adapter", ExportConfig(dtype="fp32"), metadata={}
    )
    lines: list[str] = []
    merged = prepared(path, merge=(str(file),), say=lines.append)
    assert "those that a merged adapter changes are rounded once more" in lines[0]
    exact = values_of(unpacked(path, tmp_path / "dense"), merge=(str(file),))
    for weight, layer in quantized_weights(merged.module).items():
        error = (layer.dequantize() - exact[weight]).norm() / exact[weight].norm()
        assert (1e-4 < error < 0.2) if "qkv" in weight else error == 0, weight


@pytest.mark.parametrize("kind", ["int8_rotated_16", "mxfp8", "nvfp4"])
def test_rounding_to_a_format_keeps_its_numbers_and_is_near_to_others(kind: str) -> None:
    """What the format has stays bitwise; the error of normal numbers is one of 8 or 4 bits."""
    layout, random = quantized_layout(kind), torch.Generator().manual_seed(0)
    weight, again = torch.randn(48, 64, generator=random), torch.empty(48, 64)
    weight[3], weight[5, :32] = 0, 0
    layout.dequantize(layout.quantize(weight.clone(), of_all_rows), again)
    error = (again - weight).norm() / weight.norm()
    assert 1e-3 < error < {"int8_rotated_16": 0.01, "mxfp8": 0.03, "nvfp4": 0.1}[kind]
    assert not again[3].any() or kind == "int8_rotated_16"
    if kind == "mxfp8":  # its scales are powers of two
        twice = torch.empty(48, 64)
        layout.dequantize(layout.quantize(again.clone(), of_all_rows), twice)
        assert torch.equal(twice, again)


@pytest.mark.parametrize("name", ["int8 by row", "int8 rotated"])
def test_products_of_its_codes_are_near_to_those_of_its_values(tmp_path: Path, name: str) -> None:
    """`base.compute = int8`: of a rotated matrix, inputs and their gradients are turned."""
    path, lines = write(tmp_path / "packed", packed_base(name)), list[str]()
    computed = prepared(path, compute="int8", say=lines.append)
    assert (
        lines[-1]
        == "base.compute = int8: 12 matrices are multiplied in 8 bits, forward and backward"
    )
    for result, plain in zip(gradients(computed), gradients(prepared(path)), strict=True):
        assert 1e-4 < (result - plain).norm() / plain.norm() < 0.1


def test_rows_over_ranks_are_those_of_the_whole(tmp_path: Path) -> None:
    """Fused parts, a rank without rows, and what belongs to no row."""
    path = write(tmp_path / "packed", packed_base("int8 rotated", "diffusers"))
    loaded = prepared(path)
    layer = quantized_weights(loaded.module)["layers.1.qkv.weight"]
    reader, parts = (
        ParameterReader(loaded.origin.stored.source),
        loaded.origin.stored.mapping["layers.1.qkv.weight"],
    )
    assert len(parts) == 3
    for rows in (range(40), range(40, 80), range(80, 96), range(96, 96)):
        for name, value in reader.packed(parts, 96, rows).items():
            expected = layer.values()[name]
            assert torch.equal(
                value, expected if name == "weight_rotation" else expected[rows.start : rows.stop]
            ), name


def test_a_plan_has_the_bytes_of_what_is_loaded(tmp_path: Path) -> None:
    """Of a file with several formats and values: as many as the loaded blocks have."""
    state, others = (
        packed_base("nvfp4"),
        {name: packed_base(name) for name in ("int8 rotated", "mxfp8")},
    )
    for prefix, name in {"blocks.0.qkv.": "int8 rotated", "blocks.1.out.": "mxfp8"}.items():
        state = {key: tensor for key, tensor in state.items() if not key.startswith(prefix)}
        state |= {key: tensor for key, tensor in others[name].items() if key.startswith(prefix)}
    for leaf in ("weight", "weight_scale", "weight_scale_2", "comfy_quant"):
        del state[f"blocks.1.query.{leaf}"]
    state["blocks.1.query.weight"] = original("official")["blocks.1.query.weight"]
    path = write(tmp_path / "packed", state)
    config = resolve(
        RunConfig, flags={"model.transformer": str(path), "model.preset": "tiny", "adapter.rank": 4}
    )
    job = planned_step(create_run(TOY, config), "cpu").job
    assert (
        set(job.stored.values()) == {"nvfp4", "int8_rotated_16", "mxfp8"} and len(job.stored) == 11
    )
    blocks = prepared(path, precision=Precision()).module.blocks()
    loaded = [
        sum(p.nbytes for name, p in block.named_parameters() if "lora_" not in name)
        for block in blocks
    ]
    assert [stage.weights for stage in profile(job, splits=False).blocks] == loaded


def test_a_run_trains_on_a_rotated_base_and_exports_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    path = write(tmp_path / "packed", packed_base("int8 rotated"))
    flags = ("--model.transformer", str(path), "--model.preset", "tiny", "--sample.captions", "0")
    assert world.train("run", 2, *flags) == 0
    assert (tmp_path / "run" / "exports" / "run.safetensors").exists()


def test_a_full_fine_tune_refuses_such_a_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    path = write(tmp_path / "packed", packed_base("mxfp8"))
    flags = ("--model.transformer", str(path), "--model.preset", "tiny", "--sample.captions", "0")
    assert world.train("run", 2, *flags, "--adapter.method", "full") == 1
    assert (
        "contains quantized weights, and adapter.method = full trains the base"
        in capsys.readouterr().err
    )
