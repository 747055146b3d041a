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
