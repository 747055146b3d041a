"""Adapters to files that other programs load: written, read back, compared, and only then named."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ditkit_core.adapter_files import DIFFUSERS_METADATA, open_adapter
from ditkit_core.errors import UserError
from ditkit_core.model import Part, StateDictNames
from ditkit_core.safetensors_file import write_safetensors
from ditkit_core.stacking import Assembly, Matrices, join

_PREFIX = {"official": "diffusion_model.", "diffusers": "transformer."}


def write_adapter(
    path: Path,
    state: Mapping[str, Tensor],
    scaling: float,
    names: StateDictNames,
    *,
    form: str,
    dtype: torch.dtype,
    metadata: Mapping[str, str],
) -> None:
    """Write an adapter file, and read it back, name by name and value by value, before it gets its name.

    The scale is folded into B, so that alpha = rank, which is what every reader assumes of a file without alpha.

    Args:
        path: The file.
        state: The adapters by canonical name, from `adapters.adapter_state`.
        scaling: What B·A is multiplied with in the model.
        names: The model's names.
        form: `official` or another form of the model's.
        dtype: Of the tensors in the file.
        metadata: Strings for the header: base, data hash, config, versions.

    Raises:
        UserError: If the form cannot say what the adapter is, or the file cannot be written or read back.
    """
    adapters = _adapters(state, scaling, dtype)
    use_dora = any(matrices.magnitude is not None for matrices in adapters.values())
    check_form(form, names, use_dora=use_dora)
    check_stacks(form, names, adapters, use_dora=use_dora)
    stacked = _in_form(adapters, names, form)
    tensors = _file_tensors(stacked, form, dtype)
    if form == "diffusers":
        metadata = {**metadata, DIFFUSERS_METADATA: _diffusers_metadata(stacked, use_dora=use_dora)}

    def read_back(written: Path) -> None:
        _compare(written, adapters, names, form)

    shapes = {key: (tuple(tensor.shape), dtype) for key, tensor in tensors.items()}
    write_safetensors(path, shapes, tensors.__getitem__, metadata, check=read_back)


def check_form(form: str, names: StateDictNames, *, use_dora: bool) -> None:
    """Refuse a form that cannot say what the adapter is: before training, and again when it is written.

    DoRA in the official form is refused: diffusers rejects its magnitudes, and ComfyUI divides them by the norm of the base
    instead of the merged weight, so that it would draw other pictures without a word. In the diffusers form it is exact.

    Raises:
        UserError: If the model has no such form, or its readers would make another adapter of it.
    """
    forms = [known for known in _PREFIX if known in names.from_native]
    if form not in forms:
        raise UserError(f"export.forms: {form!r} is not a form of this model; choose of {', '.join(forms)}")
    if use_dora and form == "official":
        raise UserError(
            "export.forms: programs that read the official form do not reproduce DoRA; "
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


def _assembly(modules: Iterable[str], names: StateDictNames, form: str) -> Assembly:
    """The form's modules put together of ours."""
    assembly = Assembly()
    for module in modules:
        parts = names.from_native[form](f"{module}.weight")
        theirs = [replace(part, name=part.name.removesuffix(".weight")) for part in parts]
        assert assembly.add(module, theirs), f"{module} shares rows with another"
    return assembly


def _adapters(state: Mapping[str, Tensor], scaling: float, dtype: torch.dtype) -> dict[str, Matrices]:
    """The adapters by module as a file holds them: with the scale in B, rounded to the file's dtype."""

    def rounded(name: str, scale: float = 1.0) -> Tensor:
        return (state[name].detach().to("cpu", torch.float32) * scale).to(dtype).float()

    adapters = {}
    for name in state:
        module, part = re.split(r"\.(?=lora_(?:A|B|magnitude_vector)\.weight$)", name)
        if part == "lora_A.weight":
            magnitude = f"{module}.lora_magnitude_vector.weight"
            adapters[module] = Matrices(
                rounded(name), rounded(f"{module}.lora_B.weight", scaling), rounded(magnitude) if magnitude in state else None
            )  # fmt: skip
    assert len(state) == sum(2 + (adapter.magnitude is not None) for adapter in adapters.values()), "names are unknown"
    return adapters


def _in_form(adapters: Mapping[str, Matrices], names: StateDictNames, form: str) -> dict[str, Matrices]:
    """The adapters by the form's modules."""

    def rows(part: Part | None) -> tuple[str, Matrices] | None:
        return None if part is None else (part.name, adapters[part.name].rows(part.index, part.of))

    return {
        name: join([rows(part) for part in parts]) for name, parts in _assembly(adapters, names, form).found.items()
    }


def _file_tensors(stacked: Mapping[str, Matrices], form: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Keys and values as they stand in the file."""
    tensors: dict[str, Tensor] = {}
    for name, matrices in stacked.items():
        tensors[f"{_PREFIX[form]}{name}.lora_A.weight"] = matrices.down.to(dtype)
        tensors[f"{_PREFIX[form]}{name}.lora_B.weight"] = matrices.up.to(dtype)
        if matrices.magnitude is not None:  # named as peft does, without the last component
            tensors[f"{_PREFIX[form]}{name}.lora_magnitude_vector"] = matrices.magnitude.to(dtype)
    return tensors


def _diffusers_metadata(stacked: Mapping[str, Matrices], *, use_dora: bool) -> str:
    """What diffusers needs to know of peft's configuration; keys that another peft may not know are left out.

    diffusers asks the header alone, not the tensors, for ranks: those of modules that were stacked are told one by one.
    """
    ranks = {name: len(matrices.down) for name, matrices in stacked.items()}
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


def _compare(path: Path, adapters: Mapping[str, Matrices], names: StateDictNames, form: str) -> None:
    """Check that a file says, to our own reader, what the adapters say.

    Columns of zeros in B, and A's rows for them, say nothing: where modules are stacked they are not always told from others'.

    Raises:
        UserError: If a module, a scale or a value differs.
    """
    file = open_adapter(path, names, _layer_shapes(adapters, names, form))
    for module, expected in adapters.items():
        found = file.modules.get(module)
        read = None if found is None else file.read(module)
        if (found is not None and found.scale != 1) or not _say_the_same(read, expected):
            raise UserError(f"{path} could not be read back as it was written ({module}); check the disk")


def _layer_shapes(adapters: Mapping[str, Matrices], names: StateDictNames, form: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the layers that the form's modules are: those with an adapter, and those stacked with them."""
    shapes: dict[str, tuple[int, ...]] = {name: (len(one.up), one.down.shape[1]) for name, one in adapters.items()}
    for name, parts in _assembly(adapters, names, form).found.items():
        if None in parts:
            adapted = next(part for part in parts if part is not None)
            num_out, width = shapes[adapted.name]
            for part in names.to_native(f"{name}.weight") or ():
                module = part.name.removesuffix(".weight")
                shapes.setdefault(module, (num_out // adapted.of * part.of, width))
    return shapes


def _say_the_same(read: Matrices | None, expected: Matrices) -> bool:
    if read is None:
        return not expected.up.any() and expected.magnitude is None
    if (read.magnitude is None) != (expected.magnitude is None):
        return False
    if read.down.shape == expected.down.shape:
        pairs = [(read.down, expected.down), (read.up, expected.up)]
    else:
        used, expected_used = (matrices.up.any(0) for matrices in (read, expected))
        pairs = [(read.down[used], expected.down[expected_used]), (read.up[:, used], expected.up[:, expected_used])]
    if read.magnitude is not None and expected.magnitude is not None:
        pairs.append((read.magnitude, expected.magnitude))
    return all(torch.equal(one, other) for one, other in pairs)
