"""Modules that are in memory only while they are used, and the decision for it."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.state_dict import TensorSlice
from ditkit_core.testing.gpu import GPU
from ditkit_core.weights import layer_streaming as streamed
from ditkit_core.weights.layer_streaming import (
    MARGIN_BYTES,
    LayerStreamer,
    below,
    decide,
    free_memory_bytes,
)

CPU = torch.device("cpu")


def two_modules(
    tmp_path: Path,
) -> tuple[torch.nn.ModuleDict, SafetensorsSource, dict[str, torch.Tensor]]:
    weights = {"a.weight": torch.randn(4, 2), "b.weight": torch.randn(4, 2)}
    save_file(weights, tmp_path / "m.safetensors")
    with torch.device("meta"):
        model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 4, bias=False) for name in "ab"})
    return model, SafetensorsSource.open(tmp_path / "m.safetensors"), weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_module_has_its_weights_on_the_host_while_it_is_used(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    check_weights_while_used(tmp_path, dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_module_has_its_weights_on_a_gpu_while_it_is_used(
    tmp_path: Path, dtype: torch.dtype, gpu: GPU
) -> None:
    check_weights_while_used(tmp_path, dtype, gpu.device)


def check_weights_while_used(tmp_path: Path, dtype: torch.dtype, device: torch.device) -> None:
    model, source, weights = two_modules(tmp_path)
    mapping = {name: (TensorSlice(name),) for name in weights}
    memory = LayerStreamer(source, device=device, dtype=dtype)
    addresses = set()
    for name in "abab":
        with memory.holding(model[name], below(name, mapping)) as module:
            assert torch.equal(module.weight, weights[f"{name}.weight"].to(device, dtype))
            assert not module.training and not module.weight.requires_grad
            addresses.add(module.weight.untyped_storage().data_ptr())
        assert all(parameter.is_meta for parameter in model.parameters())
    assert len(addresses) == 1


def test_a_weight_that_is_stored_in_parts_is_put_together(tmp_path: Path) -> None:
    model, source, weights = two_modules(tmp_path)
    parts = {"weight": (TensorSlice("b.weight", 1, 2), TensorSlice("a.weight", 0, 2))}
    with LayerStreamer(source, device=CPU, dtype=torch.float32).holding(
        model["a"], parts
    ) as module:
        assert torch.equal(
            module.weight, torch.cat([weights["b.weight"][2:], weights["a.weight"][:2]])
        )


def test_weights_go_when_what_uses_them_fails(tmp_path: Path) -> None:
    model, source, _ = two_modules(tmp_path)
    memory = LayerStreamer(source, device=CPU, dtype=torch.float32)
    with (
        pytest.raises(KeyError),
        memory.holding(model["a"], {"weight": (TensorSlice("a.weight"),)}),
    ):
        raise KeyError
    assert model["a"].weight.is_meta


def test_a_submodule_is_not_taken_for_one_with_a_longer_name() -> None:
    mapping = {name: (TensorSlice(name),) for name in ("layers.1.weight", "layers.10.weight")}
    assert list(below("layers.1", mapping).items()) == [
        ("weight", (TensorSlice("layers.1.weight"),))
    ]


def test_what_fits_with_a_margin_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "free_memory_bytes", lambda device: 10 * 2**30)
    fits = 10 * 2**30 - MARGIN_BYTES
    assert decide("auto", fits, CPU) == (False, "8.0 GiB of weights, 10.0 GiB free on cpu")
    assert decide("auto", fits + 1, CPU)[0]
    assert decide("never", 2**60, CPU) == (False, "encode.streaming = never")
    assert decide("always", 1, CPU) == (True, "encode.streaming = always")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_free_memory_of_the_host_is_less_than_all_of_it() -> None:
    import os

    free = free_memory_bytes(CPU)
    assert free is not None and 2**20 < free <= os.sysconf("SC_PAGE_SIZE") * os.sysconf(
        "SC_PHYS_PAGES"
    )


def test_a_container_may_use_what_its_group_leaves(tmp_path: Path) -> None:
    assert streamed._left_in_group(tmp_path) == sys.maxsize
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert streamed._left_in_group(tmp_path) == sys.maxsize
    (tmp_path / "memory.max").write_text("1000\n")
    assert streamed._left_in_group(tmp_path) == 300
    (tmp_path / "memory.stat").write_text("anon 600\ninactive_file 50\nactive_file 20\n")
    assert streamed._left_in_group(tmp_path) == 350
    (tmp_path / "memory.current").write_text("1100\n")
    assert streamed._left_in_group(tmp_path) == 0
