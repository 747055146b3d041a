"""Adapters to files that other programs load: written, read back, compared, and only then named."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from ditkit_core.adapters.keys import modules_in_form
from ditkit_core.adapters.read import DIFFUSERS_METADATA, AdapterFile, open_adapter
from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import write_safetensors
from ditkit_core.models.adapter_formats import ADAPTER_FORMS, nearest_form
from ditkit_core.models.state_dict import StateDictNames, TensorSlice
from ditkit_core.weights.fused_tensors import FusedTensors, LoraMatrices, join


@dataclass(frozen=True)
class Scaled:
    """One module's adapter, and what its product is multiplied with."""

    matrices: LoraMatrices
    scale: float = 1.0


def write_adapter(
    path: Path,
    state: Mapping[str, Tensor],
    scaling: float,
    names: StateDictNames,
    *,
    form: str,
    dtype: torch.dtype,
    metadata: Mapping[str, str],
    fillers: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> None:
    """Write a model's adapter, and read it back, name by name and value by value, before it gets its name.

    Args:
        path: The file.
        state: The adapters by canonical name, from `adapters.adapter_state`.
        scaling: What B·A is multiplied with in the model.
        names: The model's names.
        form: One of `ADAPTER_FORMS`.
        dtype: Of the tensors in the file.
        metadata: Strings for the header: base, data hash, config, versions.
        fillers: Weight shapes of modules without an adapter that are written as zeros, by our name.

    Raises:
        UserError: If the form cannot say what the adapter is, or the file cannot be written or read back.
    """
    adapters = {module: Scaled(matrices, scaling) for module, matrices in _adapters(state).items()}
    adapters |= {module: zero_adapter(shape) for module, shape in fillers.items()}
    write_matrices(path, adapters, names, form=form, dtype=dtype, metadata=metadata)


def zero_adapter(shape: tuple[int, ...]) -> Scaled:
    """An adapter of rank 1 that changes nothing, of a layer of this weight shape [out, in]."""
    return Scaled(LoraMatrices(torch.zeros(1, shape[1]), torch.zeros(shape[0], 1)))


def write_matrices(
    path: Path,
    adapters: Mapping[str, Scaled],
    names: StateDictNames,
    *,
    form: str,
    dtype: torch.dtype,
    metadata: Mapping[str, str],
    check: Callable[[AdapterFile], None] = lambda file: None,
) -> None:
    """Write adapters, and read them back before the file gets its name.

    Where the form has no place for it the scale is folded into B, so that alpha = rank, which is what every reader assumes of a file
    without alpha. A form with a place keeps B as it is; if modules that it has in one tensor differ in scale, all are folded.

    Args:
        path: The file.
        adapters: By our name of the module.
        names: The model's names.
        form: One of `ADAPTER_FORMS`.
        dtype: Of the tensors in the file.
        metadata: Strings for the header.
        check: Looks at the written file before it gets its name; it may raise.

    Raises:
        UserError: If the form cannot say what the adapter is, or the file cannot be written or read back.
    """
    use_dora = any(adapter.matrices.magnitude is not None for adapter in adapters.values())
    check_form(form, names, use_dora=use_dora)
    check_stacks(form, names, adapters, use_dora=use_dora)
    stacks = _assembly(adapters, names, form).found
    # One tensor of the file has one alpha: where its modules of ours differ in scale, the scale can only go into B.
    kept = ADAPTER_FORMS[form].alpha and all(
        len({adapters[part.name].scale for part in parts if part is not None}) == 1 for parts in stacks.values()
    )
    written = {module: _rounded(adapter, dtype, kept=kept) for module, adapter in adapters.items()}
    stacked = {name: _put_together(parts, written) for name, parts in stacks.items()}
    tensors = _file_tensors(stacked, form, dtype)
    if form == "diffusers":
        metadata = {**metadata, DIFFUSERS_METADATA: _diffusers_metadata(stacked, use_dora=use_dora)}

    def read_back(temporary: Path) -> None:
        check(_compare(temporary, written, names, form))

    shapes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    write_safetensors(path, shapes, tensors.__getitem__, metadata, check=read_back)


def forms_of(names: StateDictNames) -> list[str]:
    """The forms that adapters of a model are written in."""
    return [form for form in ADAPTER_FORMS if _naming(form, names) in names.from_native]


def _naming(form: str, names: StateDictNames) -> str:
    return ADAPTER_FORMS[form].naming or names.bare


def check_form(form: str, names: StateDictNames, *, use_dora: bool) -> None:
    """Refuse a form that cannot say what the adapter is: before training, and again when it is written.

    DoRA is written in the diffusers form alone, where it is exact. In the official form diffusers rejects its magnitudes, and ComfyUI
    divides them by the norm of the base instead of the merged weight, so that it would draw other pictures without a word.

    Raises:
        UserError: If the model has no such form, or its readers would make another adapter of it.
    """
    forms = forms_of(names)
    if form not in forms:
        hint = f"; did you mean {nearest_form(form)}?" if nearest_form(form) in forms else ""
        raise UserError(f"export.forms: {form!r} is not a form of this model; choose of {', '.join(forms)}{hint}")
    if use_dora and form != "diffusers":
        raise UserError(
            f"export.forms: programs that read the {form} form do not reproduce DoRA; "
            "set export.forms = ['diffusers'], or adapter.use_dora = false"
        )


def check_stacks(form: str, names: StateDictNames, modules: Collection[str], *, use_dora: bool) -> None:
    """Refuse DoRA of a module that a form has in one tensor with others which have no adapter.

    Raises:
        UserError: If there is one: the magnitudes of the others' rows are unknown to an adapter.
    """
    if not use_dora:
        return
    for name, parts in _assembly(modules, names, form).found.items():
        if None in parts:
            ours = next(part.name for part in parts if part is not None)
            raise UserError(
                f"export.forms: the {form} form has {ours} in {name} with modules that have no adapter, which DoRA cannot say; "
                "add them to adapter.targets, or set adapter.use_dora = false"
            )


def _assembly(modules: Iterable[str], names: StateDictNames, form: str) -> FusedTensors:
    return modules_in_form(modules, names.from_native[_naming(form, names)])


def _adapters(state: Mapping[str, Tensor]) -> dict[str, LoraMatrices]:
    """The adapters of a model by module, in fp32 on the CPU."""

    def plain(name: str) -> Tensor:
        return state[name].detach().to("cpu", torch.float32)

    adapters = {}
    for name in state:
        module, part = re.split(r"\.(?=lora_(?:A|B|magnitude_vector)\.weight$)", name)
        if part == "lora_A.weight":
            magnitude = f"{module}.lora_magnitude_vector.weight"
            norms = plain(magnitude) if magnitude in state else None
            adapters[module] = LoraMatrices(plain(name), plain(f"{module}.lora_B.weight"), norms)
    assert len(state) == sum(2 + (adapter.magnitude is not None) for adapter in adapters.values()), "names are unknown"
    return adapters


def _rounded(adapter: Scaled, dtype: torch.dtype, *, kept: bool) -> Scaled:
    """An adapter as a file holds it: with the scale in B unless it is kept apart, rounded to the file's dtype."""

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(dtype).float()

    matrices, magnitude = adapter.matrices, adapter.matrices.magnitude
    up = matrices.up if kept else matrices.up * adapter.scale
    return Scaled(
        LoraMatrices(rounded(matrices.down), rounded(up), None if magnitude is None else rounded(magnitude)),
        adapter.scale if kept else 1.0,
    )


def _put_together(parts: Sequence[TensorSlice | None], adapters: Mapping[str, Scaled]) -> Scaled:
    """The adapter of one of the form's modules; those of its parts have one scale."""

    def rows(part: TensorSlice | None) -> tuple[str, LoraMatrices] | None:
        return None if part is None else (part.name, adapters[part.name].matrices.rows(part.index, part.of))

    (scale,) = {adapters[part.name].scale for part in parts if part is not None}
    return Scaled(join([rows(part) for part in parts]), scale)


def _file_tensors(stacked: Mapping[str, Scaled], form: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Keys and values as they stand in the file."""
    tensors: dict[str, Tensor] = {}
    for name, adapter in stacked.items():
        keys, matrices = ADAPTER_FORMS[form].keys(name), adapter.matrices
        tensors[keys["down"]] = matrices.down.to(dtype)
        tensors[keys["up"]] = matrices.up.to(dtype)
        if matrices.magnitude is not None:  # named as peft does, without the last component
            tensors[keys["magnitude"]] = matrices.magnitude.to(dtype)
        if ADAPTER_FORMS[form].alpha:  # of one number more precision costs nothing
            tensors[keys["alpha"]] = torch.tensor(adapter.scale * len(matrices.down), dtype=torch.float32)
    return tensors


def _diffusers_metadata(stacked: Mapping[str, Scaled], *, use_dora: bool) -> str:
    """What diffusers needs to know of peft's configuration; keys that another peft may not know are left out.

    diffusers asks the header alone, not the tensors, for ranks: those of modules that were stacked are told one by one.
    """
    ranks = {name: len(adapter.matrices.down) for name, adapter in stacked.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    others = {f"^{re.escape(name)}": own for name, own in sorted(ranks.items()) if own != rank}
    config = {
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(ranks),
        "use_dora": use_dora,
        "use_rslora": False,
        **({"rank_pattern": others, "alpha_pattern": others} if others else {}),
    }
    return json.dumps({f"transformer.{key}": value for key, value in config.items()}, indent=2, sort_keys=True)


def _compare(path: Path, adapters: Mapping[str, Scaled], names: StateDictNames, form: str) -> AdapterFile:
    """Check that a file says, to our own reader, what the adapters say, and return it.

    Columns of zeros in B, and A's rows for them, say nothing: where modules are stacked they are not always told from others'.

    Raises:
        UserError: If a module, a scale or a value differs.
    """
    file = open_adapter(path, names, _layer_shapes(adapters, names, form))
    for module, expected in adapters.items():
        found = file.modules.get(module)
        read = None if found is None else file.read(module)
        same_scale = found is None or math.isclose(found.scale, expected.scale, rel_tol=1e-6, abs_tol=1e-30)
        if not same_scale or not _say_the_same(read, expected.matrices):
            raise UserError(f"{path} could not be read back as it was written ({module}); check the disk")
    return file


def _layer_shapes(adapters: Mapping[str, Scaled], names: StateDictNames, form: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the layers that the form's modules are: those with an adapter, and those stacked with them."""
    shapes: dict[str, tuple[int, ...]] = {
        name: (len(one.matrices.up), one.matrices.down.shape[1]) for name, one in adapters.items()
    }
    for name, parts in _assembly(adapters, names, form).found.items():
        if None in parts:
            adapted = next(part for part in parts if part is not None)
            num_out, width = shapes[adapted.name]
            for part in names.to_native(f"{name}.weight") or ():
                module = part.name.removesuffix(".weight")
                shapes.setdefault(module, (num_out // adapted.of * part.of, width))
    return shapes


def _say_the_same(read: LoraMatrices | None, expected: LoraMatrices) -> bool:
    if read is None:
        return not expected.up.any() and expected.magnitude is None
    if (read.magnitude is None) != (expected.magnitude is None):
        return False
    # Where a reader took columns of zeros for another module's, the ranks differ: then only columns that say something are compared.
    if read.down.shape == expected.down.shape:
        pairs = [(read.down, expected.down), (read.up, expected.up)]
    else:
        used, expected_used = (matrices.up.any(0) for matrices in (read, expected))
        pairs = [(read.down[used], expected.down[expected_used]), (read.up[:, used], expected.up[:, expected_used])]
    if read.magnitude is not None and expected.magnitude is not None:
        pairs.append((read.magnitude, expected.magnitude))
    return all(torch.equal(one, other) for one, other in pairs)
