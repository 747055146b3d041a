"""Writes adapters to files that other programs load. Each file is read back and compared before it
gets its name."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ditkit_core.adapters.dora import DORA_METADATA, OVER_BASE
from ditkit_core.adapters.files.alpha import DIFFUSERS_METADATA
from ditkit_core.adapters.files.read import AdapterFile, open_adapter
from ditkit_core.adapters.inject import method_of
from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import write_safetensors
from ditkit_core.models.adapter_formats import ADAPTER_FORMS, nearest_form, set_forms
from ditkit_core.models.state_dict import StateDictNames, TensorSlice
from ditkit_core.nn.factored import parts_of
from ditkit_core.weights.factored import FactoredMatrices
from ditkit_core.weights.fused_tensors import FusedTensors, LoraMatrices, join

Matrices = TypeVar("Matrices", bound=LoraMatrices | FactoredMatrices)
_READ_BY_COMFYUI = {
    "ditkit.reader": "ComfyUI reads this LoKr or LoHa; diffusers has no reader of it, so ditkit compares it with peft's layers in diffusers' model"
}


@dataclass(frozen=True)
class Scaled(Generic[Matrices]):
    """One module's adapter, and the factor of its change."""

    matrices: Matrices
    scale: float = 1.0


LoraAdapter = Scaled[LoraMatrices]


def trained_adapters(layers: Mapping[str, Any]) -> dict[str, Scaled[Any]]:
    """The adapters of a model's layers, in fp32 on the CPU."""

    def matrices(layer: Any) -> LoraMatrices | FactoredMatrices:
        if (method := method_of(layer)) != "lora":
            return FactoredMatrices(parts_of(layer, method))
        dicts = (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector)
        return LoraMatrices(*(parts["default"].weight for parts in dicts if parts))

    def plain(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", torch.float32)

    return {
        module: Scaled(matrices(layer).converted(plain), float(layer.scaling["default"]))
        for module, layer in layers.items()
    }


def zero_adapter(shape: tuple[int, ...]) -> LoraAdapter:
    """An adapter of rank 1 that changes nothing, for a layer with this weight shape [out, in]."""
    return Scaled(LoraMatrices(torch.zeros(1, shape[1]), torch.zeros(shape[0], 1)))


def write_adapter(
    path: Path,
    adapters: Mapping[str, Scaled[Any]],
    names: StateDictNames,
    *,
    form: str,
    dtype: torch.dtype,
    metadata: Mapping[str, str],
    check: Callable[[AdapterFile], None] = lambda file: None,
) -> None:
    """Write adapters, and read them back before the file gets its name.

    In a form without alpha the scale is folded into B. Then alpha = rank, which every reader
    assumes for a file without alpha. A form with alpha keeps B as it is, unless modules that it
    fuses into one tensor differ in scale: then all scales are folded. Of a LoKr or LoHa the scale
    is in the first factor in any form. `check` is called with the written file before it gets its
    name; it may raise.
    """
    is_lora = all(isinstance(adapter.matrices, LoraMatrices) for adapter in adapters.values())
    magnitudes = [
        adapter.matrices for adapter in adapters.values() if "magnitude" in adapter.matrices.parts
    ]
    use_dora = bool(magnitudes)
    if is_lora:
        check_form(form, names, use_dora=use_dora)
        check_stacks(form, names, adapters, use_dora=use_dora)
    else:
        check_one_to_one(form, names, adapters)
    over_base = use_dora and ADAPTER_FORMS[form].dora == "base"
    assert all(matrices.over_base == over_base for matrices in magnitudes)
    metadata = {key: value for key, value in metadata.items() if key != DORA_METADATA}
    metadata |= ({DORA_METADATA: OVER_BASE} if over_base else {}) | (
        {} if is_lora else _READ_BY_COMFYUI
    )
    stacks = fused_modules(adapters, names, form).parts
    # A tensor of the file has one alpha. If the modules fused in it differ in scale, the scale can
    # only go into B.
    with_alpha = (
        is_lora
        and ADAPTER_FORMS[form].scale == "alpha"
        and all(
            len({adapters[part.name].scale for part in parts if part is not None}) == 1
            for parts in stacks.values()
        )
    )
    written = {
        module: _rounded(adapter, dtype, with_alpha=with_alpha)
        for module, adapter in adapters.items()
    }
    fused = {name: _join_parts(parts, written) for name, parts in stacks.items()}
    tensors = _file_tensors(fused, form, dtype)
    if ADAPTER_FORMS[form].scale == "header" and is_lora:
        metadata = {**metadata, DIFFUSERS_METADATA: _diffusers_metadata(fused, use_dora=use_dora)}

    def read_back(temporary: Path) -> None:
        check(_compare(temporary, written, names, form))

    shapes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    # The file has a temporary name until `check` returns, so a file that fails it never exists
    # under its own.
    write_safetensors(path, shapes, tensors.__getitem__, metadata, check=read_back)


def forms_of(names: StateDictNames) -> list[str]:
    """The forms in which adapters of a model can be written."""
    return [form for form in ADAPTER_FORMS if _naming(form, names) in names.from_native]


def _naming(form: str, names: StateDictNames) -> str:
    return ADAPTER_FORMS[form].naming or names.bare


def check_form(form: str, names: StateDictNames, *, use_dora: bool) -> None:
    """Refuse a form that cannot represent the adapter: before training, and again when it is
    written.

    DoRA is written in the forms of diffusers and ComfyUI, whose norms are known (`dora.py`).
    """
    forms = forms_of(names)
    if form not in forms:
        hint = f"; did you mean {nearest_form(form)}?" if nearest_form(form) in forms else ""
        raise UserError(
            f"export.forms or --to: {form!r} is not a form of this model; choose one of "
            f"{', '.join(forms)}{hint}"
        )
    if use_dora and not ADAPTER_FORMS[form].dora:
        able = [name for name in forms if ADAPTER_FORMS[name].dora]
        raise UserError(
            f"programs that read the {form} form do not reproduce DoRA; {set_forms(able)}, or "
            f"adapter.use_dora = false"
        )


def check_stacks(
    form: str, names: StateDictNames, modules: Collection[str], *, use_dora: bool
) -> None:
    """Refuse DoRA for a module that a form fuses into one tensor with modules without an
    adapter."""
    if not use_dora:
        return
    for name, parts in fused_modules(modules, names, form).parts.items():
        if None in parts:
            ours = next(part.name for part in parts if part is not None)
            raise UserError(
                f"the {form} form has {ours} in {name} with modules that have no adapter, which "
                f"DoRA cannot represent; "
                f"add them to adapter.targets, or set adapter.use_dora = false, or leave {form} "
                f"out of export.forms (for the export command: --to another form)"
            )


def check_one_to_one(form: str, names: StateDictNames, modules: Collection[str]) -> None:
    """Refuse, for a LoKr or LoHa, a form that has a name for several of these modules, or several
    for one."""
    able = [
        candidate for candidate in forms_of(names) if _not_alone(candidate, names, modules) is None
    ]
    instead = set_forms(able) if able else "merge it"
    if form not in able:
        name = _not_alone(form, names, modules)
        why = (
            f"has {name} for more or less than one layer"
            if name
            else "is read by programs without LoKr and LoHa"
        )
        raise UserError(
            f"the {form} form {why}, and a LoKr or LoHa is of one layer; {instead}, or change "
            f"adapter.targets"
        )


def _not_alone(form: str, names: StateDictNames, modules: Collection[str]) -> str | None:
    """The first name of a form that is not one of these modules alone; empty if its readers have no
    LoKr or LoHa, None if all are."""
    if ADAPTER_FORMS[form].lora_only:
        return ""
    fused = fused_modules(modules, names, form).parts.items()
    return next((name for name, parts in fused if _single(parts) is None), None)


def _single(parts: Sequence[TensorSlice | None]) -> TensorSlice | None:
    """The part that is all of a form's module, and all of ours; None if there are several."""
    return parts[0] if len(parts) == 1 and parts[0] is not None and parts[0].of == 1 else None


def fused_modules(modules: Iterable[str], names: StateDictNames, form: str) -> FusedTensors:
    """A form's modules, assembled from these of ours."""
    return FusedTensors.of(modules, names.from_native[_naming(form, names)], ".weight")


def _rounded(adapter: Scaled[Any], dtype: torch.dtype, *, with_alpha: bool) -> Scaled[Any]:
    """An adapter as the file has it: rounded to its dtype, with the scale in a matrix unless the
    form has an alpha (`with_alpha`)."""
    scaled = adapter if with_alpha else Scaled(adapter.matrices.scaled(adapter.scale))
    return replace(
        scaled, matrices=scaled.matrices.converted(lambda tensor: tensor.to(dtype).float())
    )


def _join_parts(
    parts: Sequence[TensorSlice | None], adapters: Mapping[str, Scaled[Any]]
) -> Scaled[Any]:
    """The adapter of one of the form's modules, whose parts have one scale."""
    if (single := _single(parts)) is not None:
        return adapters[single.name]

    def rows(part: TensorSlice | None) -> tuple[str, LoraMatrices] | None:
        return (
            None
            if part is None
            else (part.name, adapters[part.name].matrices.rows(part.index, part.of))
        )

    (scale,) = {adapters[part.name].scale for part in parts if part is not None}
    return Scaled(join([rows(part) for part in parts]), scale)


def _file_tensors(
    fused: Mapping[str, Scaled[Any]], form: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The file's tensors, by key."""
    tensors: dict[str, Tensor] = {}
    for name, adapter in fused.items():
        keys, matrices = ADAPTER_FORMS[form].keys(name), adapter.matrices
        for part, tensor in matrices.parts.items():
            key = keys.get(part, f"{ADAPTER_FORMS[form].stem(name)}.{part}")
            # ComfyUI tells an output's norm from an input's by the shape.
            is_column = part == "magnitude" and matrices.over_base
            tensors[key] = (tensor[:, None] if is_column else tensor).to(dtype).contiguous()
        # In fp32, because for a single number precision is free.
        if ADAPTER_FORMS[form].scale == "alpha":
            tensors[keys["alpha"]] = torch.tensor(
                adapter.scale * matrices.rank, dtype=torch.float32
            )
    return tensors


def _diffusers_metadata(fused: Mapping[str, LoraAdapter], *, use_dora: bool) -> str:
    """peft's configuration for diffusers, without keys that another version of peft may not know.

    diffusers reads ranks from the header, not from the tensors, so each fused module with another
    rank is listed.
    """
    ranks = {name: len(adapter.matrices.down) for name, adapter in fused.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    # Escaped, because peft matches them as patterns; anchored, so that no longer name fits that
    # ends like one of them.
    others = {
        f"^{re.escape(name)}": module_rank
        for name, module_rank in sorted(ranks.items())
        if module_rank != rank
    }
    config = {
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(ranks),
        "use_dora": use_dora,
        "use_rslora": False,
        **({"rank_pattern": others, "alpha_pattern": others} if others else {}),
    }
    return json.dumps(
        {f"transformer.{key}": value for key, value in config.items()}, indent=2, sort_keys=True
    )


def _compare(
    path: Path, adapters: Mapping[str, Scaled[Any]], names: StateDictNames, form: str
) -> AdapterFile:
    """Compare a file, as our own reader sees it, with the adapters.

    Columns of zeros in B, and A's rows for them, are ignored: in fused tensors the reader cannot
    always attribute them to a module.
    """
    file = open_adapter(path, names, _layer_shapes(adapters, names, form))
    for module, expected in adapters.items():
        file_module = file.modules.get(module)
        reader = file.read if isinstance(expected.matrices, LoraMatrices) else file.read_factored
        read = None if file_module is None else reader(module)
        same_scale = file_module is None or math.isclose(
            file_module.scale, expected.scale, rel_tol=1e-6, abs_tol=1e-30
        )
        if not same_scale or not _is_equal(read, expected.matrices):
            raise UserError(
                f"{path} could not be read back as it was written ({module}); check the disk"
            )
    return file


def _layer_shapes(
    adapters: Mapping[str, Scaled[Any]], names: StateDictNames, form: str
) -> dict[str, tuple[int, ...]]:
    """Shapes of the layers with an adapter, and of those that the form fuses with them."""
    shapes: dict[str, tuple[int, ...]] = {
        name: adapter.matrices.shape for name, adapter in adapters.items()
    }
    for name, parts in fused_modules(adapters, names, form).parts.items():
        if None in parts:
            adapted = next(part for part in parts if part is not None)
            num_out, width = shapes[adapted.name]
            for part in names.to_native(f"{name}.weight") or ():
                module = part.name.removesuffix(".weight")
                shapes.setdefault(module, (num_out // adapted.of * part.of, width))
    return shapes


def _is_equal(read: Any, expected: Any) -> bool:
    if isinstance(expected, FactoredMatrices):
        parts = {} if read is None else read.parts
        return parts.keys() == expected.parts.keys() and all(
            torch.equal(parts[part], tensor) for part, tensor in expected.parts.items()
        )
    if read is None:
        return not expected.up.any() and expected.magnitude is None
    if (read.magnitude is None, read.over_base) != (expected.magnitude is None, expected.over_base):
        return False
    # If the reader attributed columns of zeros to another module, the ranks differ. Then only
    # columns with other values are compared.
    if read.down.shape == expected.down.shape:
        pairs = [(read.down, expected.down), (read.up, expected.up)]
    else:
        used, expected_used = (matrices.up.any(0) for matrices in (read, expected))
        pairs = [
            (read.down[used], expected.down[expected_used]),
            (read.up[:, used], expected.up[:, expected_used]),
        ]
    if read.magnitude is not None and expected.magnitude is not None:
        pairs.append((read.magnitude, expected.magnitude))
    return all(torch.equal(one, other) for one, other in pairs)
