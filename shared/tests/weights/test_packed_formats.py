"""Files with matrices in int8, mxfp8 and nvfp4, as ComfyUI's have them: read by the formats' definitions, number by number."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from base_files import original, prepared, values_of, write
from safetensors.torch import save_file
from toy_world import World, equal

from ditkit_core.errors import UserError
from ditkit_core.weights.fp8_scaled import num_packed, open_weights
from ditkit_core.weights.packed_formats import rotation

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
            tiles[512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scales[row, column]
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
        values = (values.view(-1, group) @ rotation(group).double().T).view(rows, columns)
    return {"weight": codes, "weight_scale": scale, "comfy_quant": described(**about)}, values


def mxfp8(rows: int, columns: int, random: torch.Generator) -> tuple[State, torch.Tensor]:
    codes = torch.randn(rows, columns, generator=random).to(FP8)
    exponents = torch.randint(115, 123, (rows, columns // 32), generator=random, dtype=torch.uint8)
    values = torch.tensor(
        [
            [float(codes[i, j].float()) * 2.0 ** (int(exponents[i, j // 32]) - 127) for j in range(columns)]
            for i in range(rows)
        ]
    ).double()
    scale = in_tiles(exponents).view(torch.float8_e8m0fnu)
    return {"weight": codes, "weight_scale": scale, "comfy_quant": described(format="mxfp8")}, values


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
def test_a_matrix_has_the_values_of_its_definition(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    tensors, values = WRITERS[name](*size, torch.Generator().manual_seed(0))
    source = open_weights(layer_file(tmp_path, tensors))
    assert list(source.tensors) == ["x.weight"] and num_packed(source) == 1
    read = source.read("x.weight")
    assert read.shape == size and read.dtype == torch.float32
    # Two roundings to fp32, and for a rotation those of a sum of 16.
    torch.testing.assert_close(
        read.double(), values, rtol=2e-7 if "rotated" not in name else 1e-5, atol=0 if "rotated" not in name else 1e-7
    )


@pytest.mark.parametrize("name", WRITERS)
def test_parts_of_a_matrix_are_those_of_all_of_it(tmp_path: Path, name: str) -> None:
    tensors, _ = WRITERS[name](48, 64, torch.Generator().manual_seed(0))
    source = open_weights(layer_file(tmp_path, tensors))
    read = source.read("x.weight")
    for part, expected in (
        (source.read("x.weight", rows=range(5, 9)), read[5:9]),
        (source.read("x.weight", index=2, of=3), read[32:]),
        (
            source.read("x.weight", torch.empty(4 * 4 * 64, dtype=torch.uint8), index=1, of=3, rows=range(2, 6)),
            read[18:22],
        ),
    ):
        torch.testing.assert_close(
            part, expected, rtol=0 if "rotated" not in name else 1e-6, atol=0 if "rotated" not in name else 1e-8
        )


def test_a_large_matrix_is_unpacked_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, _ = nvfp4(48, 64, torch.Generator().manual_seed(0))
    source = open_weights(layer_file(tmp_path, tensors))
    expected = source.read("x.weight").clone()
    monkeypatch.setattr("ditkit_core.io.safetensors._UNPACKED_AT_ONCE", 7 * 64)
    assert torch.equal(source.read("x.weight"), expected)


def test_scales_of_columns_multiply_the_matrix(tmp_path: Path) -> None:
    tensors, values = nvfp4(32, 32, torch.Generator().manual_seed(0))
    columns = torch.linspace(0.5, 2, 32)
    source = open_weights(layer_file(tmp_path, {**tensors, "pre_quant_scale": columns}))
    torch.testing.assert_close(source.read("x.weight").double(), values * columns.double(), rtol=3e-7, atol=0)


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
    "no scale": (lambda state: {name: x for name, x in state.items() if name != "weight_scale"}, "'weight_scale'"),
    "few scales": (
        lambda state: {**state, "weight_scale": state["weight_scale"][:64].clone()},
        "bytes of scales for 32 rows",
    ),
    "another dtype": (lambda state: {**state, "weight": state["weight"].view(torch.int8)}, "in int8"),
    "columns": (lambda state: {**state, "pre_quant_scale": torch.ones(31)}, "for 32 columns"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_fit_its_format_is_one_line(tmp_path: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    path = layer_file(tmp_path, change(nvfp4(32, 32, torch.Generator().manual_seed(0))[0]))
    with pytest.raises(UserError, match=f"x .*{message}.*fetch the file again") as caught:
        open_weights(path)
    assert "\n" not in str(caught.value)


def packed_base(name: str) -> State:
    """The toy's file with its blocks in a format."""
    random, packed = torch.Generator().manual_seed(1), dict(original("official"))
    for key in list(packed):
        if packed[key].ndim == 2 and "blocks." in key:
            tensors, _ = WRITERS[name](*packed.pop(key).shape, random)
            packed |= {f"{key.removesuffix('weight')}{leaf}": tensor for leaf, tensor in tensors.items()}
    return packed


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("name", ["int8 by row", "mxfp8", "nvfp4"])
def test_a_model_has_the_values_of_its_file(tmp_path: Path, name: str, quantize: str) -> None:
    lines: list[str] = []
    path = write(tmp_path / "packed", packed_base(name))
    source = open_weights(path)
    values = {key: source.read(key) for key in source.tensors}
    found = values_of(path, quantize=quantize)
    assert equal(found, values_of(write(tmp_path / "dense", values), quantize=quantize))
    prepared(path, quantize, say=lines.append)
    said = "kept in model.dtype" if quantize == "none" else "rounded once more"
    assert any("in int8, mxfp8 or nvfp4, and are unpacked" in line and said in line for line in lines)


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
    assert "contains quantized weights, and adapter.method = full trains the base" in capsys.readouterr().err
