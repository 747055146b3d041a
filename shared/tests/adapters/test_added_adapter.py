"""Adapters that are added to a loaded model for samples."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ditkit_core.adapters.added_adapter import AddedAdapter, AddedLora, adapters_added, added_bytes
from ditkit_core.adapters.assistant import load_assistant, put_next_to_doras, ranks_next_to_dora
from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.dora import DORA_METADATA
from ditkit_core.adapters.files.read import AdapterFile, open_adapter
from ditkit_core.adapters.inject import adapter_layers, trainable_parameters
from ditkit_core.errors import UserError
from ditkit_core.nn.quantized_linear import dense_weight
from ditkit_core.testing.toy import TOY, ToyArch
from ditkit_core.testing.world import make_model


def test_the_bytes_of_a_plan_are_those_of_the_matrices(tmp_path: Path) -> None:
    """In each parameter's own dtype, and on one device only what is there."""
    model = make_model(TOY, ToyArch())
    shapes = {
        name: tuple(m.weight.shape) for name, m in model.named_modules() if isinstance(m, nn.Linear)
    }
    modules = {
        "blocks.0.qkv": "layers.0.qkv",
        "blocks.1.mlp.0": "layers.1.mlp.0",
        "head.out": "head.out",
    }
    tensors = {}
    for rank, (key, name) in enumerate(modules.items(), start=2):
        out, into = shapes[name]
        tensors[f"diffusion_model.{key}.lora_A.weight"] = torch.randn(rank, into)
        tensors[f"diffusion_model.{key}.lora_B.weight"] = torch.randn(out, rank)
    save_file(tensors, tmp_path / "fast.safetensors")
    adapters = [
        AddedAdapter(
            open_adapter(tmp_path / "fast.safetensors", TOY.architecture.names, shapes), 1.0
        )
    ]

    def dtype_of(name: str) -> torch.dtype:
        return torch.float32 if name.startswith("head") else torch.bfloat16

    before = dict(model.named_modules())
    with adapters_added(model, adapters, dtype_of):
        layers = {
            name: module for name, module in model.named_modules() if isinstance(module, AddedLora)
        }
        assert layers.keys() == set(modules.values())
        matrices = {name: (layer._down, layer._up) for name, layer in layers.items()}
    assert dict(model.named_modules()) == before
    for within in (shapes.keys(), {"head.out"}):
        stored = sum(
            tensor.nbytes for name in within & matrices.keys() for tensor in matrices[name]
        )
        assert added_bytes(adapters, shapes, dtype_of, within) == stored > 0


def test_lokr_and_loha_are_added_as_they_are_merged_also_where_a_file_has_layers_together_or_apart(
    tmp_path: Path,
) -> None:
    model = make_model(TOY, ToyArch())
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    shapes = {name: tuple(module.weight.shape) for name, module in layers.items()}
    names, random = TOY.architecture.names, torch.Generator().manual_seed(0)
    owners = {
        "layers.0.qkv": "loha",
        "layers.0.out": "lokr",
        "layers.0.query": "lokr",
        "layers.1.qkv": "lokr",
    }
    tensors: dict[str, torch.Tensor] = {}
    for module, method in owners.items():
        out, into = shapes[module]
        parts = names.from_native["diffusers"](f"{module}.weight")
        for part in parts:
            key, rows = (
                f"transformer.{part.name.removesuffix('.weight')}",
                part.of * out // len(parts),
            )
            sizes = {"lokr_w1": (2, 2), "lokr_w2_a": (rows // 2, 3), "lokr_w2_b": (3, into // 2)}
            if method == "loha":
                sizes = {
                    f"hada_w{i}_{side}": (rows, 2) if side == "a" else (2, into)
                    for i in (1, 2)
                    for side in "ab"
                }
            tensors |= {
                f"{key}.{name}": torch.randn(size, generator=random) for name, size in sizes.items()
            }
    save_file(tensors, tmp_path / "fast.safetensors")
    adapter = AddedAdapter(open_adapter(tmp_path / "fast.safetensors", names, shapes), 0.5)
    assert owners.keys() <= adapter.file.modules.keys()
    inputs = {
        name: torch.randn(5, shapes[name][1], generator=random) for name in adapter.file.modules
    }
    with torch.no_grad(), adapters_added(model, [adapter], lambda name: torch.float32):
        found = {name: model.get_submodule(name)(x) for name, x in inputs.items()}
    for name, x in inputs.items():
        expected = layers[name](x) + x @ (0.5 * adapter.file.change_of(name)).T
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-4, msg=name)
        assert (found[name] - layers[name](x)).norm() > 0.1 * expected.norm()
    own = added_bytes([adapter], shapes, lambda name: torch.bfloat16, {"layers.1.qkv"})
    (piece, *others) = adapter.file.factored("layers.1.qkv")
    stored = [tensor for matrices, _ in (piece, *others) for tensor in matrices.parts.values()]
    assert own == sum(tensor.nbytes for tensor in stored), "in fp32, whatever the layer's dtype"
    loha = added_bytes([adapter], shapes, lambda name: torch.bfloat16, {"layers.0.qkv"})
    assert loha > 12 * layers["layers.0.qkv"].weight.numel()


NAMES, DORA = TOY.architecture.names, ("layers.0.qkv", "layers.1.mlp.0", "head.out")


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(m.weight.shape) for name, m in model.named_modules() if isinstance(m, nn.Linear)
    }


def written(
    path: Path, shapes: dict[str, tuple[int, ...]], seed: int, magnitude: str = ""
) -> AdapterFile:
    """A file with adapters of `DORA`; with magnitudes over the norm of the merged rows, or of the
    base's."""
    random, tensors = torch.Generator().manual_seed(seed), {}
    for name in DORA:
        (part,) = NAMES.from_native["official"](f"{name}.weight")
        stem = f"diffusion_model.{part.name.removesuffix('.weight')}"
        out, into = shapes[name]
        tensors[f"{stem}.lora_A.weight"] = torch.randn(3, into, generator=random) / into**0.5
        tensors[f"{stem}.lora_B.weight"] = torch.randn(out, 3, generator=random) / 3**0.5
        if magnitude:
            tensors[f"{stem}.dora_scale"] = 0.5 + torch.rand(out, 1, generator=random)
    save_file(tensors, path, {DORA_METADATA: "yes"} if magnitude == "base" else {})
    return open_adapter(path, NAMES, shapes)


def outputs(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {name: model.get_submodule(name)(x) for name, x in inputs.items()}


@pytest.mark.parametrize("magnitude", ["merged", "base"])
@pytest.mark.parametrize("trained", ["none", "lora", "lokr", "dora"])
def test_doras_are_added_as_they_are_merged_whatever_is_trained_over_them(
    tmp_path: Path, trained: str, magnitude: str
) -> None:
    """Two of them: each with its norm of the base, as peft has it."""
    options: dict[str, Any] = {"use_dora": True} if trained == "dora" else {}
    method = "lokr" if trained == "lokr" else "lora"
    config = None if trained == "none" else AdapterConfig(rank=4, method=method, **options)
    model = make_model(TOY, ToyArch(), adapter=config).eval()
    base = make_model(TOY, ToyArch())
    shapes = shapes_of(base)
    files = [written(tmp_path / f"{seed}.safetensors", shapes, seed, magnitude) for seed in (1, 2)]
    inputs = {
        name: torch.randn(5, shapes[name][1], generator=torch.Generator().manual_seed(3))
        for name in DORA
    }
    plain = outputs(model, inputs)
    adapters = [AddedAdapter(files[0], 0.5), AddedAdapter(files[1], 1.0)]
    with adapters_added(model, adapters, lambda name: torch.float32):
        found = outputs(model, inputs)
    assert {type(module).__name__ for module in model.modules()}.isdisjoint({"AddedDoras"})
    for name, x in inputs.items():
        layer: Any = model.get_submodule(name)
        frozen = layer if trained == "none" else layer.base_layer
        expected = plain[name]
        for file, strength in ((files[0], 0.5), (files[1], 1.0)):
            weight = frozen.weight.detach().clone()
            file.change(name, weight, strength)
            expected = expected + x @ (weight - frozen.weight.detach()).T
        # fp32 in another order
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5, msg=name)
        assert (expected - plain[name]).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize("assistant", ["", "merged", "base"])
def test_a_dora_is_over_the_base_that_an_assistant_is_taken_out_of(
    tmp_path: Path, assistant: str
) -> None:
    model = make_model(TOY, ToyArch(), adapter=AdapterConfig(rank=4)).eval()
    shapes = shapes_of(make_model(TOY, ToyArch()))
    merged = written(tmp_path / "assistant.safetensors", shapes, 1, assistant)
    dora = written(tmp_path / "dora.safetensors", shapes, 2, "merged")
    inputs = {
        name: torch.randn(5, shapes[name][1], generator=torch.Generator().manual_seed(3))
        for name in DORA
    }
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in DORA}
    before = {name: layer.base_layer.weight.detach().clone() for name, layer in layers.items()}
    plain = outputs(model, inputs)
    with adapters_added(model, [AddedAdapter(dora, 0.6)], lambda name: torch.float32):
        expected = outputs(model, inputs)
    for name, layer in layers.items():
        merged.change(name, layer.base_layer.weight.data, 0.8)
    taken_out = AddedAdapter(merged, 0.8, before.__getitem__)
    assert (outputs(model, inputs)[DORA[0]] - plain[DORA[0]]).norm() > 0.1
    for adapters, wanted in (
        ([taken_out], plain),
        ([AddedAdapter(dora, 0.6), taken_out], expected),
    ):
        with adapters_added(model, adapters, lambda name: torch.float32):
            for name, out in outputs(model, inputs).items():
                torch.testing.assert_close(out, wanted[name], rtol=1e-4, atol=1e-4, msg=name)


def test_an_assistant_that_leaves_nothing_of_a_row_is_refused(tmp_path: Path) -> None:
    model = make_model(TOY, ToyArch())
    shapes = shapes_of(model)
    file = written(tmp_path / "zero.safetensors", shapes, 1, "merged")
    tensors = {key: file.source.read(key) for key in file.source.tensors}
    tensors = {
        key: tensor * 0 if key.endswith("dora_scale") else tensor for key, tensor in tensors.items()
    }
    save_file(tensors, tmp_path / "zero.safetensors")
    file = open_adapter(tmp_path / "zero.safetensors", NAMES, shapes)
    before = dict(model.named_modules())
    weights = {name: dense_weight(model.get_submodule(name)) for name in DORA}
    taken_out = AddedAdapter(file, 1.0, weights.__getitem__)
    refused = pytest.raises(UserError, match="cannot be taken out of layers.0.qkv again")
    with refused, adapters_added(model, [taken_out], lambda name: torch.float32):
        pass
    assert dict(model.named_modules()) == before


def test_only_a_lora_is_an_assistant_next_to_a_dora(tmp_path: Path) -> None:
    """It is merged into the layers without a DoRA, and nothing of it is trained."""
    model = make_model(
        TOY, ToyArch(), adapter=AdapterConfig(rank=4, use_dora=True, targets=("qkv",))
    ).eval()
    shapes = shapes_of(make_model(TOY, ToyArch()))
    with pytest.raises(
        UserError, match=r"base.assistant = .*dora.safetensors is a DoRA \(layers.0.qkv\)"
    ):
        dora = written(tmp_path / "dora.safetensors", shapes, 1, "merged")
        ranks_next_to_dora(dora, adapter_layers(model), "base.assistant")
    assert (
        ranks_next_to_dora(
            dora, [name for name in shapes if name not in dora.modules], "base.assistant"
        )
        == {}
    )
    file = written(tmp_path / "lora.safetensors", shapes, 1)
    trained, x = set(trainable_parameters(model)), torch.randn(5, shapes["layers.0.qkv"][1])
    merged, layer = [(file, 0.5)], model.get_submodule("layers.0.qkv")
    before = layer(x)
    assistant = put_next_to_doras(model, merged, "base.assistant")
    load_assistant(model, assistant, device_of=lambda name: torch.device("cpu"), put=None)
    assert list(merged[0][0].modules) == ["layers.1.mlp.0", "head.out"] and merged[0][1] == 0.5
    assert set(trainable_parameters(model)) == trained
    read = file.read("layers.0.qkv")
    change = 0.5 * file.modules["layers.0.qkv"].scale * read.up @ read.down
    torch.testing.assert_close(layer(x), before + x @ change.T, rtol=1e-4, atol=1e-5)


def test_the_bytes_of_a_dora_are_planned(tmp_path: Path) -> None:
    model = make_model(TOY, ToyArch())
    shapes = shapes_of(model)
    plain = AddedAdapter(written(tmp_path / "lora.safetensors", shapes, 1), 1.0)
    dora = AddedAdapter(written(tmp_path / "dora.safetensors", shapes, 1, "base"), 1.0)

    def size(each: AddedAdapter) -> int:
        return added_bytes([each], shapes, lambda name: torch.bfloat16, set(DORA))

    rows = sum(shapes[name][0] for name in DORA)
    largest = max(out * into for out, into in (shapes[name] for name in DORA))
    assert size(dora) == size(plain) + 8 * rows + 8 * largest
