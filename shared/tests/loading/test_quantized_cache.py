"""A quantized base that is kept: read back bitwise without the weights that it was made of, and never another's."""

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from toy_world import World, equal

from ditkit_core.adapters.config import AdapterConfig, BaseConfig, ExportConfig
from ditkit_core.adapters.files.export import export_adapter
from ditkit_core.adapters.inject import adapter_layers, is_adapter_name
from ditkit_core.encoding import claims
from ditkit_core.engine.placement import place_blocks
from ditkit_core.io import safetensors as safetensors_file
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.loading import weights
from ditkit_core.loading.on_meta import model_on_meta
from ditkit_core.loading.quantized_cache import QuantizedCache
from ditkit_core.loading.weights import load_weights
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.testing.conformance_quantized import KINDS
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, ToyModel, in_form

BF16, FP32 = Precision(), Precision(matmul=torch.float32)
ARCH = ToyArch(dim=64)
SPEC = altered(TOY, presets={"tiny": ARCH})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_file(in_form(ToyModel(ARCH, FP32).state_dict(), "official"), tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


def prepared(
    base: Path, kind: str, say: Callable[[str], None] = lambda line: None, *, merge: tuple[str, ...] = (),
    precision: Precision = BF16, cache: Path | None = None, streamed: frozenset[int] = frozenset(),
) -> nn.Module:  # fmt: skip
    config = BaseConfig(quantize=kind, merge=merge, quantized_cache=str(cache or base.parent / "kept"))
    where = ModelPaths(transformer=str(base), preset="tiny")
    unloaded = model_on_meta(SPEC, where, AdapterConfig(rank=4), config, precision=precision)
    placement = replace(place_blocks(unloaded.module, [torch.device("cpu")]), streamed=streamed)
    result = load_weights(unloaded, placement=placement, seed=0, say=say)
    with result.readable():  # streamed weights are on the host
        result.module.values = {name: tensor.clone() for name, tensor in result.module.state_dict().items()}
    return result.module


def kept(base: Path) -> list[Path]:
    return sorted(path for path in (base.parent / "kept").iterdir() if path.suffix != ".lock")


def spoil(file: Path) -> None:
    """Everything but what a fingerprint is made of: the header, and both ends of every tensor."""
    tensors = SafetensorsSource.open(file).tensors.values()
    with open(file, "r+b") as stream:
        for stored in tensors:
            stream.seek(stored.offset + 1024)
            stream.write(b"\1" * max(0, stored.num_bytes - 2048))


@pytest.mark.parametrize("precision", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_read_bitwise_without_the_weights_that_it_was_made_of(base, kind, precision):
    lines: list[str] = []
    models = []
    for _ in range(2):
        models.append(prepared(base, kind, lines.append, precision=precision))
        spoil(base)
    (file,) = kept(base)
    assert lines == [
        f"base.quantized_cache: the quantized base is written to {file}",
        f"base.quantized_cache: the quantized base is read from {file}",
    ]
    first, second = (model.state_dict() for model in models)
    assert equal(first, second) and [t.dtype for t in first.values()] == [t.dtype for t in second.values()]
    assert [p.requires_grad for p in models[0].parameters()] == [p.requires_grad for p in models[1].parameters()]
    anew = prepared(base, kind, precision=precision, cache=base.parent / "other").state_dict()
    assert not equal(first, anew)  # the weights were spoilt


def test_blocks_that_are_streamed_are_read_too(base):
    first = prepared(base, "int8").state_dict()
    lines: list[str] = []
    assert equal(prepared(base, "int8", lines.append, streamed=frozenset({1})).values, first)
    assert "is read from" in lines[0]


def test_what_it_is_made_of_is_its_name(base, tmp_path):
    model = prepared(base, "none")
    assert not (tmp_path / "kept").exists()  # of a base that is not quantized nothing is kept
    for layer in adapter_layers(model).values():
        nn.init.normal_(layer.lora_B["default"].weight)
    (lora,) = export_adapter(model, SPEC, tmp_path / "lora", "adapter", ExportConfig(), metadata={})
    states = [prepared(base, "int8").state_dict()]
    states.append(prepared(base, "int8", merge=(str(lora),)).state_dict())
    states.append(prepared(base, "int8", merge=(f"{lora}@0.5",)).state_dict())
    states.append(prepared(base, "int8", merge=(f"{lora}@0",)).state_dict())
    assert equal(states.pop(), states[0]) and len(kept(base)) == 3, "nothing is merged"
    prepared(base, "int8", precision=FP32)
    prepared(base, "fp8")
    assert len(kept(base)) == 5
    code = "layers.0.qkv.base_layer.weight"
    assert not torch.equal(states[0][code], states[1][code]) and not torch.equal(states[1][code], states[2][code])
    tensors = {name: SafetensorsSource.open(base).read(name).clone() for name in SafetensorsSource.open(base).tensors}
    tensors["blocks.1.out.weight"][0, 0] += 1
    save_file(tensors, base)
    prepared(base, "int8")
    assert len(kept(base)) == 6


def flip(file: Path) -> None:
    stored = next(iter(SafetensorsSource.open(file).tensors.values()))
    data = bytearray(file.read_bytes())
    data[stored.offset + 5] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def foreign(file: Path) -> None:
    save_file({"layers.0.qkv.weight": torch.zeros(2)}, file)


@pytest.mark.parametrize("damage", [flip, cut, foreign])
def test_a_damaged_or_foreign_file_is_said_and_made_anew(base, damage):
    first = prepared(base, "nf4").state_dict()
    (file,) = kept(base)
    whole = file.read_bytes()
    damage(file)
    lines: list[str] = []
    assert equal(prepared(base, "nf4", lines.append).state_dict(), first)
    assert (
        f"{file} is damaged or foreign" in lines[0]
        and "the base is quantized again" in lines[0]
        and "\n" not in lines[0]
    )
    assert "is written to" in lines[1] and len(lines) == 2
    assert kept(base) == [file] and file.read_bytes() == whole


def test_a_full_disk_leaves_nothing_and_stops_nothing(base, monkeypatch):
    first, lines = prepared(base, "int8", cache=base.parent / "elsewhere").state_dict(), []

    def full(tensor: torch.Tensor) -> memoryview:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors_file, "_bytes_of", full)
    model = prepared(base, "int8", lines.append)
    assert "is not stored" in lines[0] and "No space left on device" in lines[0] and len(lines) == 1
    assert kept(base) == [] and equal(model.state_dict(), first)


def test_adapters_are_no_part_of_it(base):
    prepared(base, "int8")
    (file,) = kept(base)
    assert not any(is_adapter_name(name) for name in SafetensorsSource.open(file).tensors)


def test_a_run_goes_on_over_the_kept_base(tmp_path, capsys):
    world = World(tmp_path)
    flags = ("--base.quantize", "nf4")
    keeping = (*flags, "--base.quantized_cache", str(tmp_path / "kept"))
    assert world.train("plain", 3, *flags) == 0
    assert world.train("kept", 2, *keeping) == 0
    assert "the quantized base is written to" in capsys.readouterr().out
    assert world.train("kept", 3, *keeping) == 0
    assert "the quantized base is read from" in capsys.readouterr().out
    assert equal(world.adapter("plain"), world.adapter("kept"))


def test_of_two_processes_that_find_no_file_one_converts_and_the_other_waits_and_reads(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stand in for them: each has a lock of its own. The second one comes while the first converts."""
    load, converted, waits = weights.load_into, list[int](), Event()
    models, lines = list[nn.Module](), list[str]()
    second = Thread(target=lambda: models.append(prepared(base, "int8", lines.append)))

    def converting(*given: Any, **named: Any) -> None:
        converted.append(1)
        if len(converted) == 1:
            second.start()
            waits.wait(60)
        load(*given, **named)

    monkeypatch.setattr(weights, "load_into", converting)
    monkeypatch.setattr(claims, "say", lambda line: waits.set())
    models.append(prepared(base, "int8"))
    second.join()
    assert len(converted) == 1 and waits.is_set()
    assert lines == [f"base.quantized_cache: the quantized base is read from {kept(base)[0]}"]
    assert equal(models[0].values, models[1].values)


def test_ranks_that_divide_a_base_look_for_its_file_once(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run writes it while they look. One of them that read it now would wait in an exchange for the others, which convert."""
    cache, work = QuantizedCache(base.parent, "0"), list[str]()

    def missing(*given: Any, **named: Any) -> bool:
        work.append("look")
        cache.file.touch()
        return False

    monkeypatch.setattr(QuantizedCache, "_read", missing)
    monkeypatch.setattr(QuantizedCache, "_write", lambda *given: work.append("write"))
    given: Any = {"device_of": None, "dtype_of": lambda name: torch.float32, "say": None}
    cache.load(nn.Module(), lambda: work.append("convert"), division=object(), **given)
    assert work == ["look", "convert", "write"]
