"""Adapters to files that other programs load: written, read back, compared, and only then named."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ditkit_core.adapter_files import DIFFUSERS_METADATA, open_adapter
from ditkit_core.errors import UserError
from ditkit_core.model import StateDictNames
from ditkit_core.safetensors_file import write_safetensors

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
    has_dora = any(name.endswith("lora_magnitude_vector.weight") for name in state)
    check_form(form, names, use_dora=has_dora)
    tensors = _file_tensors(state, scaling, names, form, dtype)
    if form == "diffusers":
        metadata = {**metadata, DIFFUSERS_METADATA: _diffusers_metadata(state, names, has_dora=has_dora)}

    def read_back(written: Path) -> None:
        _compare(written, state, scaling, names, dtype)

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


def _file_tensors(
    state: Mapping[str, Tensor], scaling: float, names: StateDictNames, form: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Keys and values as they stand in the file."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        module, part = _split(name)
        theirs = _PREFIX[form] + names.from_native[form](f"{module}.weight").removesuffix(".weight")
        tensor = tensor.detach().to("cpu", torch.float32)
        if part == "lora_B.weight":
            tensor = tensor * scaling
        elif part == "lora_magnitude_vector.weight":
            part = "lora_magnitude_vector"  # as peft writes it, without the last component
        tensors[f"{theirs}.{part}"] = tensor.to(dtype)
    assert len(tensors) == len(state), "two modules share a name"
    return tensors


def _split(name: str) -> tuple[str, str]:
    """Module and rest of an adapter parameter's canonical name."""
    module, part = re.split(r"\.(?=lora_(?:A|B|magnitude_vector)\.weight$)", name)
    return module, part


def _diffusers_metadata(state: Mapping[str, Tensor], names: StateDictNames, *, has_dora: bool) -> str:
    """What diffusers needs to know of peft's configuration; keys that another peft may not know are left out."""
    rank = next(len(tensor) for name, tensor in state.items() if name.endswith("lora_A.weight"))
    modules = sorted(
        names.from_native["diffusers"](f"{_split(name)[0]}.weight").removesuffix(".weight") for name in state
    )
    config = {
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(set(modules)),
        "use_dora": has_dora,
        "use_rslora": False,
    }
    return json.dumps({f"transformer.{key}": value for key, value in config.items()}, indent=2, sort_keys=True)


def _compare(
    path: Path, state: Mapping[str, Tensor], scaling: float, names: StateDictNames, dtype: torch.dtype
) -> None:
    """Check that a file says, to our own reader, what the state says.

    Raises:
        UserError: If a module, a scale or a value differs.
    """
    shapes = {
        _split(name)[0]: (len(tensor), state[name.replace("lora_B", "lora_A")].shape[1])
        for name, tensor in state.items()
        if name.endswith("lora_B.weight")
    }
    file = open_adapter(path, names, shapes)
    parts = {"lora_A.weight": "down", "lora_B.weight": "up", "lora_magnitude_vector.weight": "magnitude"}
    for name, tensor in state.items():
        module, part = _split(name)
        expected = tensor.detach().to("cpu", torch.float32) * (scaling if part == "lora_B.weight" else 1)
        found = file.modules[module]
        if found.scale != 1 or not torch.equal(file.read(module, parts[part]), expected.to(dtype).float()):
            raise UserError(f"{path} could not be read back as it was written ({name}); check the disk")
