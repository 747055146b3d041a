"""Writes LoKr and LoHa to files that other programs load, and converts such files to other names.

A written file has the scale in the first factor. A form is written where each of its names is one of our layers: neither product can
represent rows of several layers together.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ditkit_core.adapters.files.read import AdapterFile, open_adapter, refuse_damaged
from ditkit_core.adapters.files.write import forms_of, fused_modules
from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import write_safetensors
from ditkit_core.models.adapter_formats import ADAPTER_FORMS, set_forms
from ditkit_core.models.state_dict import StateDictNames
from ditkit_core.nn.factored import parts_of
from ditkit_core.weights.factored import FactoredMatrices, low_rank_of

READER_METADATA = "ditkit.reader"
READ_BY_COMFYUI = "ComfyUI reads this LoKr or LoHa; diffusers has no reader of it, so ditkit compares it with peft's layers in diffusers' model"
"""Value of `READER_METADATA` in written files."""

Factored = Mapping[str, tuple[FactoredMatrices, float]]
"""LoKr or LoHa with the factors of their changes, by our name of the module."""


def trained_factors(layers: Mapping[str, Any], method: str) -> Factored:
    """The LoKr or LoHa of a model's layers."""

    def plain(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", torch.float32)

    return {
        module: (
            FactoredMatrices({part: plain(tensor) for part, tensor in parts_of(layer, method).items()}),
            float(layer.scaling["default"]),
        )
        for module, layer in layers.items()
    }


def read_factors(file: AdapterFile) -> Factored:
    """The LoKr or LoHa of a file.

    Raises:
        UserError: If it has LoRA too, a module has its factors with others, or a value is not finite.
    """
    path = file.source.path
    if other := [name for name, module in file.modules.items() if module.method == "lora"]:
        raise UserError(f"{path} mixes LoRA ({other[0]}) with LoKr or LoHa; merge it")
    factored = {name: (file.read_factored(name), module.scale) for name, module in file.modules.items()}
    if shared := [name for name, (matrices, _) in factored.items() if matrices.of > 1]:
        raise UserError(
            f"{path}: {shared[0]} shares its factors with other layers, which no other form can represent; merge it"
        )
    refuse_damaged(path, ((name, matrices.tensors()) for name, (matrices, _) in factored.items()))
    return factored


def check_one_to_one(form: str, names: StateDictNames, modules: Mapping[str, Any]) -> None:
    """Refuse a form that has a name for several of these modules, or several for one.

    Raises:
        UserError: Naming the first of them, and forms that can be written.
    """
    able = [candidate for candidate in forms_of(names) if _not_alone(candidate, names, modules) is None]
    instead = set_forms(able) if able else "merge it"
    if form not in able:
        name = _not_alone(form, names, modules)
        why = f"has {name} for more or less than one layer" if name else "is read by programs without LoKr and LoHa"
        raise UserError(
            f"the {form} form {why}, and a LoKr or LoHa is of one layer; {instead}, or change adapter.targets"
        )


def _not_alone(form: str, names: StateDictNames, modules: Mapping[str, Any]) -> str | None:
    """The first name of a form that is not one of these modules alone; empty if its readers have no LoKr or LoHa, None if all are."""
    if ADAPTER_FORMS[form].lora_only:
        return ""
    fused = fused_modules(modules, names, form).parts.items()
    return next(
        (name for name, parts in fused if len(parts) > 1 or any(part is None or part.of > 1 for part in parts)), None
    )


def write_factored(
    path: Path,
    adapters: Factored,
    names: StateDictNames,
    *,
    form: str,
    dtype: torch.dtype,
    metadata: Mapping[str, str],
) -> float:
    """Write LoKr or LoHa, and read them back before the file gets its name.

    Args:
        form: One of `ADAPTER_FORMS`.
        dtype: The dtype of the tensors in the file.

    Returns:
        The largest relative difference of a tensor, by norm, which rounding to the dtype caused.

    Raises:
        UserError: If the form cannot represent the adapter, or the file cannot be written or read back.
    """
    check_one_to_one(form, names, adapters)
    fused = fused_modules(adapters, names, form).parts.items()
    name_of = {part.name: name for name, parts in fused for part in parts if part is not None}
    tensors: dict[str, Tensor] = {}
    written: dict[str, FactoredMatrices] = {}
    worst = 0.0
    for module, (matrices, scale) in adapters.items():
        exact = matrices.scaled(scale).parts
        rounded = {part: tensor.to(dtype) for part, tensor in exact.items()}
        written[module] = FactoredMatrices({part: tensor.float() for part, tensor in rounded.items()})
        worst = max(worst, *(_difference(exact[part], tensor) for part, tensor in written[module].parts.items()))
        stem = ADAPTER_FORMS[form].stem(name_of[module])
        tensors |= {f"{stem}.{part}": tensor.contiguous() for part, tensor in rounded.items()}
        if ADAPTER_FORMS[form].alpha:
            rank = low_rank_of({part: tuple(tensor.shape) for part, tensor in rounded.items()})
            tensors[f"{stem}.alpha"] = torch.tensor(float(rank or 1))

    def read_back(temporary: Path) -> None:
        file = open_adapter(temporary, names, {module: matrices.shape for module, matrices in written.items()})
        for module, expected in written.items():
            file_module = file.modules.get(module)
            read = {} if file_module is None or file_module.scale != 1 else file.read_factored(module).parts
            same = read.keys() == expected.parts.keys()
            if not same or not all(torch.equal(read[part], tensor) for part, tensor in expected.parts.items()):
                raise UserError(f"{path} could not be read back as it was written ({module}); check the disk")

    shapes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    write_safetensors(
        path, shapes, tensors.__getitem__, {**metadata, READER_METADATA: READ_BY_COMFYUI}, check=read_back
    )
    return worst


def _difference(exact: Tensor, rounded: Tensor) -> float:
    size = float(torch.linalg.vector_norm(exact))
    return float(torch.linalg.vector_norm(exact - rounded)) / size if size else 0.0
