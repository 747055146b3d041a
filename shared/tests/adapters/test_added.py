"""Adapters that are added to a loaded model for samples."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from ditkit_core.adapters.added import AddedAdapter, AddedLora, added, added_bytes
from ditkit_core.adapters.files.read import open_adapter
from ditkit_core.testing.toy import TOY, ToyArch
from ditkit_core.testing.world import make_model


def test_the_bytes_of_a_plan_are_those_of_the_matrices(tmp_path: Path) -> None:
    """In each parameter's own dtype, and on one device only what is there."""
    model = make_model(TOY, ToyArch())
    shapes = {name: tuple(m.weight.shape) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    modules = {"blocks.0.qkv": "layers.0.qkv", "blocks.1.mlp.0": "layers.1.mlp.0", "head.out": "head.out"}
    tensors = {}
    for rank, (key, name) in enumerate(modules.items(), start=2):
        out, into = shapes[name]
        tensors[f"diffusion_model.{key}.lora_A.weight"] = torch.randn(rank, into)
        tensors[f"diffusion_model.{key}.lora_B.weight"] = torch.randn(out, rank)
    save_file(tensors, tmp_path / "fast.safetensors")
    adapters = [AddedAdapter(open_adapter(tmp_path / "fast.safetensors", TOY.architecture.names, shapes), 1.0)]

    def dtype_of(name: str) -> torch.dtype:
        return torch.float32 if name.startswith("head") else torch.bfloat16

    before = dict(model.named_modules())
    with added(model, adapters, dtype_of):
        layers = {name: module for name, module in model.named_modules() if isinstance(module, AddedLora)}
        assert layers.keys() == set(modules.values())
        matrices = {name: (layer._down, layer._up) for name, layer in layers.items()}
    assert dict(model.named_modules()) == before
    for within in (shapes.keys(), {"head.out"}):
        stored = sum(tensor.nbytes for name in within & matrices.keys() for tensor in matrices[name])
        assert added_bytes(adapters, shapes, dtype_of, within) == stored > 0


def test_lokr_and_loha_are_added_as_they_are_merged_also_where_a_file_has_layers_together_or_apart(
    tmp_path: Path,
) -> None:
    model = make_model(TOY, ToyArch())
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    shapes = {name: tuple(module.weight.shape) for name, module in layers.items()}
    names, random = TOY.architecture.names, torch.Generator().manual_seed(0)
    owners = {"layers.0.qkv": "loha", "layers.0.out": "lokr", "layers.0.query": "lokr", "layers.1.qkv": "lokr"}
    tensors: dict[str, torch.Tensor] = {}
    for module, method in owners.items():
        out, into = shapes[module]
        parts = names.from_native["diffusers"](f"{module}.weight")
        for part in parts:
            key, rows = f"transformer.{part.name.removesuffix('.weight')}", part.of * out // len(parts)
            sizes = {"lokr_w1": (2, 2), "lokr_w2_a": (rows // 2, 3), "lokr_w2_b": (3, into // 2)}
            if method == "loha":
                sizes = {f"hada_w{i}_{side}": (rows, 2) if side == "a" else (2, into) for i in (1, 2) for side in "ab"}
            tensors |= {f"{key}.{name}": torch.randn(size, generator=random) for name, size in sizes.items()}
    save_file(tensors, tmp_path / "fast.safetensors")
    adapter = AddedAdapter(open_adapter(tmp_path / "fast.safetensors", names, shapes), 0.5)
    assert owners.keys() <= adapter.file.modules.keys()
    inputs = {name: torch.randn(5, shapes[name][1], generator=random) for name in adapter.file.modules}
    with torch.no_grad(), added(model, [adapter], lambda name: torch.float32):
        found = {name: model.get_submodule(name)(x) for name, x in inputs.items()}
    for name, x in inputs.items():
        expected = layers[name](x) + x @ (0.5 * adapter.file.change_of(name)).T
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-4, msg=name)
        assert (found[name] - layers[name](x)).norm() > 0.1 * expected.norm()
    own = added_bytes([adapter], shapes, lambda name: torch.bfloat16, {"layers.1.qkv"})
    (piece, *others) = adapter.file.factored("layers.1.qkv")
    stored = [tensor for matrices, _ in (piece, *others) for tensor in matrices.tensors()]
    assert own == sum(tensor.nbytes for tensor in stored), "in fp32, whatever the layer's dtype"
    loha = added_bytes([adapter], shapes, lambda name: torch.bfloat16, {"layers.0.qkv"})
    assert loha > 12 * layers["layers.0.qkv"].weight.numel()
