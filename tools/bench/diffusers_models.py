"""Models of diffusers with random weights, or with the weights and adapters of a model of ours, for
the benchmarks."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.diffusers_model import DiffusersModel
from ditkit_core.adapters.inject import initialise, inject
from ditkit_core.models.state_dict import StateDictNames


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside the block models are made in a dtype: in fp32 the weights of a published model may
    take more memory than a GPU has."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def wan(arch: Any) -> Any:
    """diffusers' Wan, with random weights."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=arch.heads, attention_head_dim=arch.head_dim,
        in_channels=arch.in_channels, out_channels=arch.out_channels,
        text_dim=arch.text_dim, ffn_dim=arch.ffn_dim, num_layers=arch.layers,
    )  # fmt: skip


def flux2(arch: Any) -> Any:
    """diffusers' FLUX.2, with random weights."""
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        num_layers=arch.double_layers, num_single_layers=arch.single_layers,
        num_attention_heads=arch.heads,
        attention_head_dim=arch.head_dim, joint_attention_dim=arch.text_dim,
        guidance_embeds=arch.guidance,
    )  # fmt: skip


def made(model: DiffusersModel, arch: Any) -> Any:
    """diffusers' model of an architecture, with random weights."""
    return resolve_name(f"diffusers:{model.kind(arch)}")(**model.config(arch))


def share_weights(
    ours: nn.Module,
    theirs: nn.Module,
    names: StateDictNames,
    keep_fp32: Callable[[str], bool],
    dtype: torch.dtype,
) -> None:
    """Give both the same values in the dtypes that each is trained in."""
    theirs.requires_grad_(False)
    keep = theirs._keep_in_fp32_modules or ()
    for name, parameter in theirs.named_parameters():
        if not any(part in keep for part in name.split(".")):
            parameter.data = parameter.data.to(dtype)
    pieces: dict[str, dict[int, Tensor]] = {}
    for name, tensor in theirs.state_dict().items():
        parts = names.to_native(name) or ()
        for part, rows in zip(parts, tensor.chunk(len(parts)), strict=True):
            pieces.setdefault(part.name, {})[part.index] = rows
    for name, parameter in ours.named_parameters():
        value = torch.cat([rows for _, rows in sorted(pieces[name].items())])
        parameter.data = value.float() if keep_fp32(name) else value.to(dtype)


def share_adapters(
    ours: nn.Module, theirs: nn.Module, names: StateDictNames, targets: tuple[str, ...],
    named_sets: Mapping[str, tuple[str, ...]], rank: int,
) -> None:  # fmt: skip
    """The same LoRA on the same layers, fp32 over any base."""
    from peft import LoraConfig, inject_adapter_in_model

    mirrors = {}
    for name in inject(ours, AdapterConfig(rank=rank, targets=targets), named_sets):
        (part,) = names.from_native["diffusers"](f"{name}.weight")
        mirrors[name] = part.name.removesuffix(".weight")
    device = next(ours.parameters()).device
    initialise(ours, 0, device_of=lambda module: device)
    pattern = "|".join(map(re.escape, mirrors.values()))
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=pattern), theirs)
    for name, mirror in mirrors.items():
        for half in ("lora_A", "lora_B"):
            weight = ours.get_submodule(f"{name}.{half}.default").weight
            weight.data = 0.02 * torch.randn(weight.shape).to(device)
            theirs.get_submodule(f"{mirror}.{half}.default").weight.data = weight.data.clone()
