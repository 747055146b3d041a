"""An assistant in layers whose DoRA is trained.

A row of a DoRA's weight is f · (W + s·B·A), where a trained magnitude and the norm of that row make
f. An assistant C that is merged into W would be scaled with it: the trained change, (f - 1) · (W +
C) + f·s·B·A, would contain some of C, which samples must not have. So these layers keep the base's
own W, and compute f · (W + s·B·A) + C, as peft does with two active adapters. All other layers have
C merged into W.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ditkit_core.adapters.files.read import AdapterFile
from ditkit_core.adapters.inject import adapter_layers
from ditkit_core.errors import UserError, argument
from ditkit_core.models.meta import on_meta
from ditkit_core.models.protocol import StagedModel
from ditkit_core.nn.lora import ASSISTANT


def ranks_next_to_dora(file: AdapterFile, doras: Collection[str], key: str) -> dict[str, int]:
    """The rank of an assistant's LoRA of each module whose DoRA is trained (`doras`); `key` is the
    setting that names the assistant."""
    both = {module: file_module for module, file_module in file.modules.items() if module in doras}
    for module, file_module in both.items():
        if file_module.method != "lora" or file_module.use_dora:
            kind = "DoRA" if file_module.use_dora else file_module.method
            raise UserError(
                f"{key} = {file.source.path} is a {kind} ({module}), and next to a DoRA that is "
                "trained an assistant must be a LoRA; train a LoRA, LoKr or LoHa or leave its "
                f"layers out of {argument('adapter.targets')}, or make a LoRA of the assistant: "
                "merge it with the export command's --merge, then --extract"
            )
    return {module: file_module.rank for module, file_module in both.items()}


def add_assistant(model: nn.Module, ranks: Mapping[str, int]) -> None:
    """Give the layers with an adapter, on `meta`, an assistant too, of the rank of their module, if
    it has one."""
    for module, layer in adapter_layers(model).items():
        if (rank := ranks.get(module)) is not None:
            with on_meta():
                layer.lora_A[ASSISTANT] = nn.Linear(
                    layer.in_features, rank, bias=False
                ).requires_grad_(False)
                layer.lora_B[ASSISTANT] = nn.Linear(
                    rank, layer.out_features, bias=False
                ).requires_grad_(False)


def put_next_to_doras(
    model: nn.Module, merged: list[tuple[AdapterFile, float]], key: str
) -> tuple[AdapterFile, float] | None:
    """Give layers with a DoRA, on `meta`, the last of the files to merge as their assistant; it is
    merged into the other layers alone.

    `key` is the setting that names the assistant; empty for none. Returns the assistant and its
    strength.
    """
    if not key:
        return None
    (file, strength), doras = merged[-1], adapter_layers(model)
    add_assistant(model, ranks_next_to_dora(file, doras, key))
    others = {
        module: file_module for module, file_module in file.modules.items() if module not in doras
    }
    merged[-1] = (replace(file, modules=others), strength)
    return file, strength


def load_assistant(
    model: nn.Module | StagedModel,
    assistant: tuple[AdapterFile, float] | None,
    *,
    device_of: Callable[[str], torch.device],
    put: Callable[[nn.Module, str, Tensor], None] | None,
) -> None:
    """Give assistants their values, in fp32, with scale and strength in B; `put` sets a parameter
    whose rows ranks divide."""
    if assistant is None:
        return
    file, strength = assistant
    for module, layer in adapter_layers(model).items():
        if ASSISTANT in getattr(layer, "lora_A", ()):
            read, device = file.read(module), device_of(module)
            up = read.up * (strength * file.modules[module].scale)
            for child, value in (
                (layer.lora_A[ASSISTANT], read.down),
                (layer.lora_B[ASSISTANT], up),
            ):
                value = value.to(device, torch.float32).contiguous()
                if put is None:
                    child.weight = nn.Parameter(value, requires_grad=False)
                else:
                    put(child, "weight", value)
