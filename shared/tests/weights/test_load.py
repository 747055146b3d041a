"""Weights from files to parameters: every name and shape accounted for, in bounded memory."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource, write_safetensors
from ditkit_core.models.precision import Precision
from ditkit_core.models.state_dict import StateDictNames, TensorSlice
from ditkit_core.testing.toy import TOY, ToyArch, ToyModel, in_form
from ditkit_core.weights.load import Advice, ParameterReader, load_into, match

CPU = torch.device("cpu")


def toy(depth: int = 2) -> ToyModel:
    torch.manual_seed(0)
    return ToyModel(ToyArch(depth=depth), Precision())


def on_meta(arch: ToyArch | None = None) -> ToyModel:
    with torch.device("meta"):
        return ToyModel(arch or ToyArch(), Precision())


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def official(model: nn.Module, prefix: str = "", form: str = "official") -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in in_form(model.state_dict(), form).items()}


def shard(folder: Path, tensors: dict[str, torch.Tensor], count: int) -> None:
    """Write tensors as diffusers does: numbered files and an index."""
    folder.mkdir(parents=True)
    weight_map = {}
    for number in range(count):
        part = dict(list(tensors.items())[number::count])
        name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("layout", ["file", "folder", "shards", "index"])
@pytest.mark.parametrize("form", ["official", "diffusers"])
def test_a_model_is_loaded_from_every_layout_and_form(tmp_path, prefix, layout, form):
    model = toy()
    tensors = official(model, prefix, form)
    if layout in ("file", "folder"):
        save_file(tensors, tmp_path / "x.safetensors")
    else:
        shard(tmp_path / "s", tensors, 3)
    where = {
        "file": "x.safetensors",
        "folder": ".",
        "shards": "s",
        "index": "s/model.safetensors.index.json",
    }
    loaded = on_meta()
    source = SafetensorsSource.open(tmp_path / where[layout])
    mapping = match(source, TOY.architecture.names, shapes(loaded))
    load_into(
        loaded, source, mapping, device_of=lambda name: CPU, dtype_of=lambda name: torch.float32
    )
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_each_parameter_gets_its_own_dtype_and_keeps_requires_grad(tmp_path):
    save_file(official(toy()), tmp_path / "x.safetensors")
    model = on_meta()
    model.layers[0].requires_grad_(False)
    source = SafetensorsSource.open(tmp_path)
    load_into(
        model, source, match(source, TOY.architecture.names, shapes(model)),
        device_of=lambda name: CPU,
        dtype_of=lambda name: torch.float32 if TOY.precision.keep_fp32(name) else torch.bfloat16,
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (
            torch.float32 if TOY.precision.keep_fp32(name) else torch.bfloat16
        ), name
        assert parameter.requires_grad == (not name.startswith("layers.0.")), name
        assert not parameter.is_meta, name


def test_an_edit_gets_its_tensor_in_fp32_and_no_other_is_touched(tmp_path):
    save_file(
        {name: tensor.half() for name, tensor in official(toy()).items()},
        tmp_path / "x.safetensors",
    )
    model, source = on_meta(), SafetensorsSource.open(tmp_path)
    seen = []

    def double(tensor):
        seen.append((tensor.dtype, tuple(tensor.shape)))
        tensor *= 2

    load_into(
        model, source, match(source, TOY.architecture.names, shapes(model)),
        device_of=lambda name: CPU,
        dtype_of=lambda name: torch.float16 if "layers" in name else torch.float32,
        edits={"head.out.weight": double, "layers.1.out.weight": double},
    )  # fmt: skip
    assert sorted(seen) == [(torch.float32, (4, 32)), (torch.float32, (32, 32))]
    for name, tensor in toy().state_dict().items():
        factor = 2 if name in ("head.out.weight", "layers.1.out.weight") else 1
        assert torch.equal(model.state_dict()[name].float(), tensor.half().float() * factor), name


def test_missing_unexpected_and_misshapen_keys_are_listed_ten_of_each(tmp_path):
    tensors = official(toy(depth=4))
    gone = [name for name in tensors if name.startswith("blocks.3.")] + ["blocks.0.out.weight"]
    for name in gone:
        del tensors[name]
    tensors["head.out.bias"] = torch.zeros(7)
    tensors |= {f"extra.{number}": torch.zeros(1) for number in range(12)}
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(UserError) as error:
        match(SafetensorsSource.open(tmp_path), TOY.architecture.names, shapes(toy(depth=4)))
    message = one_line(error)
    assert f"{len(gone)} missing" in message
    assert "12 unexpected: extra.0, " in message
    assert "and 2 more" in message
    assert "1 mis-shaped: head.out.bias [7] instead of [4]" in message
    assert message.count("extra.") == 10


def test_another_number_of_blocks_is_named_as_the_reason(tmp_path):
    save_file(official(toy(depth=3)), tmp_path / "x.safetensors")
    with pytest.raises(
        UserError, match="does not fit the weights, which have 3 layers where it has 2"
    ) as error:
        match(SafetensorsSource.open(tmp_path), TOY.architecture.names, shapes(toy(depth=2)))
    one_line(error)


def test_weights_of_another_model_are_named_as_such(tmp_path):
    save_file({"conv.weight": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="weights of another model"):
        match(SafetensorsSource.open(tmp_path), TOY.architecture.names, shapes(toy()))


def test_scales_that_belong_to_no_weight_are_named_as_such(tmp_path):
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in official(toy()).items()}
    save_file({**tensors, "blocks.0.out.scale_weight": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="scales for 8-bit weights that it lacks; fetch it again"):
        match(SafetensorsSource.open(tmp_path), TOY.architecture.names, shapes(toy()))


def test_left_over_names_may_be_ignored_by_the_caller_alone(tmp_path):
    save_file(
        {**official(toy()), "first_stage_model.conv": torch.zeros(2)}, tmp_path / "x.safetensors"
    )
    source = SafetensorsSource.open(tmp_path)
    with pytest.raises(UserError, match="1 unexpected: first_stage_model.conv"):
        match(source, TOY.architecture.names, shapes(toy()))
    found = match(
        source,
        TOY.architecture.names,
        shapes(toy()),
        ignore=lambda name: name.startswith("first_stage_model."),
    )
    assert found.keys() == shapes(toy()).keys()


def test_two_names_of_one_parameter_are_refused(tmp_path):
    names = StateDictNames.renaming(to_native={"a": "x", "b": "x"}.get)
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="1 unexpected: b"):
        match(SafetensorsSource.open(tmp_path), names, {"x": (1,)})


# A file's tensor of two parameters, and a parameter of two tensors with its rows in the other
# order.
STACKED = {
    "kv": (TensorSlice("k"), TensorSlice("v")),
    "shift": (TensorSlice("mod", 1, 2),),
    "scale": (TensorSlice("mod", 0, 2),),
    "halves": (TensorSlice("mod", 1, 2), TensorSlice("mod", 0, 2)),
    "mod": (TensorSlice("mod"),),
}
STACKED_NAMES = StateDictNames(prefixes=(), to_native=STACKED.get, from_native={})
STACKED_SHAPES = {"k": (2, 3), "v": (2, 3), "mod": (4, 3)}


def numbered(rows: int, start: int = 0) -> torch.Tensor:
    """[rows, 3] that counts on from a number."""
    return torch.arange(start, start + 3 * rows, dtype=torch.float32).view(rows, 3)


def stacked_model() -> nn.Module:
    with torch.device("meta"):
        model = nn.Module()
        for name, shape in STACKED_SHAPES.items():
            model.register_parameter(name, nn.Parameter(torch.empty(shape)))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("edited", [False, True])
def test_rows_of_a_parameter_are_found_where_they_lie(tmp_path, dtype, edited):
    save_file(
        {"kv": numbered(4), "shift": numbered(2, 12), "scale": numbered(2, 18)},
        tmp_path / "x.safetensors",
    )
    model, source = stacked_model(), SafetensorsSource.open(tmp_path)
    edits = {name: lambda tensor: tensor.add_(1) for name in STACKED_SHAPES} if edited else {}
    mapping = match(source, STACKED_NAMES, STACKED_SHAPES)
    load_into(
        model, source, mapping, device_of=lambda name: CPU, dtype_of=lambda name: dtype, edits=edits
    )
    expected = {
        "k": numbered(4)[:2],
        "v": numbered(4)[2:],
        "mod": torch.cat([numbered(2, 18), numbered(2, 12)]),
    }
    for name, tensor in expected.items():
        assert torch.equal(model.state_dict()[name], (tensor + edited).to(dtype)), name


def test_of_a_stacked_tensor_only_the_rows_that_are_wanted_are_read(tmp_path, monkeypatch):
    save_file({"kv": numbered(4), "halves": numbered(4)}, tmp_path / "x.safetensors")
    source, read, model = SafetensorsSource.open(tmp_path), [], stacked_model()
    whole = SafetensorsSource.read

    def counted(self, name, buffer=None, **rows):
        tensor = whole(self, name, buffer, **rows)
        read.append((name, tensor.numel() * tensor.element_size()))
        return tensor

    monkeypatch.setattr(SafetensorsSource, "read", counted)
    mapping = match(source, STACKED_NAMES, STACKED_SHAPES)
    load_into(
        model, source, mapping, device_of=lambda name: CPU, dtype_of=lambda name: torch.float32
    )
    assert sorted(read) == [("halves", 24), ("halves", 24), ("kv", 24), ("kv", 24)]
    assert torch.equal(model.state_dict()["mod"], torch.cat([numbered(4)[2:], numbered(4)[:2]]))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"kv": 4, "shift": 2}, "1 missing: mod$"),
        ({"kv": 5, "mod": 4}, r"1 mis-shaped: kv \[5, 3\] instead of \[4, 3\]$"),
        ({"kv": 4, "shift": 1, "scale": 2}, r"1 mis-shaped: shift \[1, 3\] instead of \[2, 3\]$"),
        ({"kv": 4, "halves": 4, "shift": 2}, "1 unexpected: shift$"),
        ({"kv": 4, "mod": 4, "scale": 2}, "1 unexpected: scale$"),
    ],
)
def test_stacked_tensors_are_held_to_every_name_and_shape_too(tmp_path, tensors, said):
    save_file({name: numbered(rows) for name, rows in tensors.items()}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=said) as error:
        match(SafetensorsSource.open(tmp_path), STACKED_NAMES, STACKED_SHAPES)
    one_line(error)


def test_a_part_of_a_tensor_that_the_model_does_not_have_makes_the_tensor_unexpected(tmp_path):
    save_file({"kv": numbered(4), "mod": numbered(4)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="1 missing: k; 1 unexpected: kv"):
        match(SafetensorsSource.open(tmp_path), STACKED_NAMES, {"k": (2, 3), "mod": (4, 3)})


def test_a_convolution_of_one_pixel_is_a_matrix(tmp_path):
    save_file(
        {"mod": torch.rand(4, 3, 1, 1), "kv": torch.rand(4, 3, 1)}, tmp_path / "x.safetensors"
    )
    model, source = stacked_model(), SafetensorsSource.open(tmp_path)
    mapping = match(source, STACKED_NAMES, STACKED_SHAPES)
    load_into(
        model, source, mapping, device_of=lambda name: CPU, dtype_of=lambda name: torch.float32
    )
    assert torch.equal(model.state_dict()["mod"], source.read("mod").view(4, 3))
    save_file({"mod": torch.rand(4, 1, 3), "kv": torch.rand(4, 3)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"mod \[4, 1, 3\] instead of \[4, 3\]"):
        match(SafetensorsSource.open(tmp_path), STACKED_NAMES, STACKED_SHAPES)


def test_the_words_about_what_does_not_fit_are_the_callers(tmp_path):
    advice = Advice(described_by="its config", remedy="A")
    wider = {**official(toy()), "head.out.bias": torch.zeros(7)}
    for tensors, said in (
        ({"conv.weight": torch.zeros(2)}, "unknown names; A;"),
        (
            official(toy(depth=3)),
            "its config does not fit the weights, which have 3 layers where it has 2; A;",
        ),
        (wider, "its config does not fit the weights; A;"),
    ):
        save_file(tensors, tmp_path / "x.safetensors")
        with pytest.raises(UserError, match=said):
            match(
                SafetensorsSource.open(tmp_path),
                TOY.architecture.names,
                shapes(toy()),
                advice=advice,
            )


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    whole = path.read_bytes()
    for length in (0, 5, 8, 20, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="fetch it again") as error:
            SafetensorsSource.open(path)
        assert str(path) in one_line(error)


@pytest.mark.parametrize(
    "content", [b"PK\x03\x04 a zip file, which torch.save writes", b"\xff" * 64, (8).to_bytes(8, "little") + b"not json",
                (2).to_bytes(8, "little") + b"[]", (13).to_bytes(8, "little") + b'{"a": "text"}', b"<html>not found</html>"]
)  # fmt: skip
def test_a_foreign_file_is_refused(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        SafetensorsSource.open(path)
    assert str(path) in one_line(error)


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [0, 100]},
        {"shape": [3]},
        {"dtype": "F4096"},
        {"data_offsets": [-8, 0]},
        {"shape": [-1, -2]},
    ],
    ids=str,
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, change):
    header = json.dumps(
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **change}}
    ).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(UserError) as error:
        SafetensorsSource.open(tmp_path)
    one_line(error)


def test_a_pickle_is_refused_before_it_is_opened(tmp_path):
    (tmp_path / "model.pth").write_bytes(b"")
    for path in (tmp_path, tmp_path / "model.pth"):
        with pytest.raises(UserError, match="is a pickle"):
            SafetensorsSource.open(path)


def test_an_empty_folder_and_a_missing_path_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"contains no .safetensors file"):
        SafetensorsSource.open(tmp_path)
    with pytest.raises(UserError, match="there is no"):
        SafetensorsSource.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/secret.safetensors", "..\\secret.safetensors", "a.bin"]
)
def test_an_index_may_not_point_elsewhere(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match=r"not a .safetensors file of its own folder"):
        SafetensorsSource.open(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', "\x00"])
def test_a_broken_index_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match="is not an index"):
        SafetensorsSource.open(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    shard(tmp_path / "s", {"a": torch.zeros(1), "b": torch.zeros(1)}, 2)
    (tmp_path / "s" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="model-00002-of-00002.safetensors, which is missing"):
        SafetensorsSource.open(tmp_path / "s")


def test_one_name_in_two_files_is_refused(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "y.safetensors")
    with pytest.raises(UserError, match=r"'a' is in x.safetensors and in y.safetensors"):
        SafetensorsSource.open(tmp_path)


def test_every_dtype_and_shape_comes_back_as_the_library_wrote_it(tmp_path):
    tensors = {
        str(dtype): torch.randn(3, 5).mul(9).to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64,
        torch.int8, torch.uint8,
                      torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
    } | {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 4)}  # fmt: skip
    save_file(tensors, tmp_path / "x.safetensors", {"who": "library"})
    source = SafetensorsSource.open(tmp_path / "x.safetensors")
    assert source.metadata["who"] == "library"
    for name, tensor in tensors.items():
        read = source.read(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(
            read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        ), name


def test_what_is_written_is_what_the_library_reads(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {"a": torch.randn(3, 4).bfloat16(), "b": torch.randn(5, 2).T, "c": torch.tensor(1.5)}
    write_safetensors(
        path,
        {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()},
        tensors.__getitem__,
        {"k": "ü"},
    )
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert SafetensorsSource.open(path).metadata == {"format": "pt", "k": "ü"}


def test_a_file_that_fails_its_check_never_gets_its_name(tmp_path):
    def check(written: Path) -> None:
        assert SafetensorsSource.open(written).tensors.keys() == {"a"}
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        write_safetensors(
            tmp_path / "x.safetensors",
            {"a": ((1,), torch.float32)},
            lambda name: torch.zeros(1),
            {},
            check=check,
        )
    assert list(tmp_path.iterdir()) == []


MEASURE = """
import sys
from pathlib import Path
import torch
from torch import nn
from ditkit_core.models.spec import StateDictNames
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.weights.load import load_into, match

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

names = StateDictNames.renaming(to_native=lambda name: name)
source = SafetensorsSource.open(Path(sys.argv[1]))

def load(layers, dtype):
    with torch.device("meta"):
        model = nn.ModuleDict({layer: nn.Linear(1024, 2048, bias=False) for layer in layers})
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    mapping = match(source, names, shapes, ignore=lambda name: True)
    edits = {"0.weight": lambda tensor: tensor.mul_(2)}
    load_into(model, source, mapping, device_of=lambda name: torch.device("cpu"), dtype_of=lambda name: dtype, edits=edits)
    return sum(p.numel() * p.element_size() for p in model.parameters())

dtype = getattr(torch, sys.argv[2])
load(["0", "1"], dtype)  # so that code and scratch of a first call are not counted
Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
before = status("VmRSS")
total = load([name.removesuffix(".weight") for name in source.tensors], dtype)
print(status("VmHWM") - before, total, sum(t.num_bytes for t in source.tensors.values()))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures through /proc")
@pytest.mark.slow
def test_the_host_holds_at_most_the_model_and_one_tensor_while_loading(tmp_path):
    """Each dtype in a process of its own: an allocator that keeps freed memory would hide the
    second load in the first."""
    layer_bytes = 1024 * 2048 * 4
    shard(
        tmp_path / "model", {f"{number}.weight": torch.rand(2048, 1024) for number in range(12)}, 4
    )
    for dtype, model in (("bfloat16", 6 * layer_bytes), ("float32", 12 * layer_bytes)):
        command = [sys.executable, "-c", MEASURE, str(tmp_path / "model"), dtype]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        peak, loaded, stored = map(int, result.stdout.split())
        assert (stored, loaded) == (12 * layer_bytes, model)
        assert 0.9 * model < peak, "the measurement sees nothing"
        assert peak <= model + layer_bytes + 2**20, f"{peak:,} > {model:,} + {layer_bytes:,}"
    shutil.rmtree(tmp_path / "model")  # 101 MB


def test_a_constant_may_be_in_a_file_and_a_vector_may_have_more_axes_of_one(tmp_path):
    """As of official files of Wan's Animate: kernels of blurs, and biases of images as [1,
    channels, 1, 1]."""
    bias = torch.arange(6.0)
    save_file(
        {"bias": bias.view(1, 6, 1, 1), "kernel": torch.ones(4, 4)}, tmp_path / "x.safetensors"
    )
    source = SafetensorsSource.open(tmp_path / "x.safetensors")
    slices = {"bias": (TensorSlice("bias"),), "kernel": ()}
    mapping = match(
        source, StateDictNames(prefixes=(), to_native=slices.get, from_native={}), {"bias": (6,)}
    )
    assert mapping == {"bias": (TensorSlice("bias"),)}
    with pytest.raises(UserError, match="1 unexpected: kernel"):
        match(
            source,
            StateDictNames(prefixes=(), to_native={"bias": slices["bias"]}.get, from_native={}),
            {"bias": (6,)},
        )
    reader, rows, whole = ParameterReader(source), torch.empty(2), torch.empty(6)
    reader.fill(whole, mapping["bias"])
    reader.fill(rows, mapping["bias"], rows=range(2, 4), num_rows=6)  # a rank's part
    assert torch.equal(whole, bias) and torch.equal(rows, bias[2:4])
