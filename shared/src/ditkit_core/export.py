"""What a run hands to other programs: its adapter, or the whole transformer with the adapter merged in."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ditkit_core.adapter_writer import check_form, check_stacks, write_adapter
from ditkit_core.adapters import AdapterConfig, adapter_layers, adapter_state, canonical_name, is_adapter_name
from ditkit_core.errors import UserError
from ditkit_core.files import atomic_write, write_text
from ditkit_core.model import ModelSpec, Part
from ditkit_core.precision import parse_dtype
from ditkit_core.safetensors_file import SafetensorsSource, write_safetensors
from ditkit_core.settings import setting
from ditkit_core.stacking import Assembly, rows_of
from ditkit_core.weights import match

SHARD_BYTES = 5_000_000_000
"""Most bytes in one file of a transformer, as on the hub."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """The `[export]` section: what is written beside each save and at the end."""

    forms: tuple[str, ...] = setting(("official",), resume="free")
    """Names in the files: `official` (ComfyUI and diffusers load it), `diffusers`, or both."""
    dtype: str = setting("bf16", resume="free")
    """Dtype of the files: bf16 or fp32."""
    merged: bool = setting(False, resume="free")
    """Write the whole transformer too, with the adapter merged in, as a full fine-tune does: beside each save and at the end."""

    def __post_init__(self) -> None:
        if self.dtype not in ("bf16", "fp32"):
            raise UserError(f"export.dtype = {self.dtype!r}: choose bf16 or fp32")
        if not self.forms or len(set(self.forms)) < len(self.forms):
            raise UserError(f"export.forms = {list(self.forms)}: name at least one form, and each once")


def check_export(spec: ModelSpec, config: ExportConfig, adapter: AdapterConfig) -> None:
    """Refuse, before training, what could not be exported after it.

    Raises:
        UserError: If a form is unknown, or does not hold what will be trained.
    """
    for form in config.forms:
        check_form(form, spec.names, use_dora=adapter.use_dora and adapter.method == "lora")


def check_adapted(spec: ModelSpec, config: ExportConfig, model: Any) -> None:
    """Refuse, before training, an adapter that a form's readers would ignore or misread.

    Args:
        spec: The model's family.
        config: The forms.
        model: The model with its adapter, if it has one.

    Raises:
        UserError: If there is such a form.
    """
    layers = adapter_layers(model)
    use_dora = any(layer.lora_magnitude_vector for layer in layers.values())
    for form in config.forms if layers else ():
        check_stacks(form, spec.names, layers, use_dora=use_dora)
        spec.check_adapter(form, layers)


def export_adapter(
    model: Any,
    spec: ModelSpec,
    folder: Path,
    stem: str,
    config: ExportConfig,
    *,
    metadata: Mapping[str, str],
    exact: bool = False,
) -> list[Path]:
    """Write the adapter in each form.

    Args:
        model: The model with its adapter.
        spec: The model's family.
        folder: Where to.
        stem: `adapter`, or `adapter-step-000020`; the official form takes it as its name, others append theirs.
        config: Forms and dtype.
        metadata: Strings for the headers: base, data hash, config, versions.
        exact: Append nothing; there is one form.

    Returns:
        The files, in the order of the forms; each was read back and compared before it got its name.

    Raises:
        UserError: If a form cannot say what the adapter is, or a file cannot be written.
    """
    layers = adapter_layers(model)
    assert layers, "the model has no adapter"
    check_adapted(spec, config, model)
    (scaling,) = {layer.scaling["default"] for layer in layers.values()}
    state, files = adapter_state(model), []
    for form in config.forms:
        path = folder / (f"{stem}.safetensors" if exact or form == "official" else f"{stem}_{form}.safetensors")
        write_adapter(path, state, scaling, spec.names, form=form, dtype=parse_dtype(config.dtype), metadata=metadata)
        files.append(path)
    return files


def export_merged(
    model: Any,
    spec: ModelSpec,
    folder: Path,
    config: ExportConfig,
    *,
    metadata: Mapping[str, str],
    config_json: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write the whole transformer, an adapter merged in, in each form; of a full fine-tune this is the export.

    Args:
        model: The model; it is not changed.
        spec: The model's family; its fp32 parameters stay fp32 in the file.
        folder: Holds one folder `transformer_<form>` per form afterwards.
        config: Forms and dtype.
        metadata: Strings for the headers.
        config_json: The base's config.json, copied beside the diffusers form, whose readers want it.
        shard_bytes: Most bytes per file.

    Returns:
        The folders, in the order of the forms. A folder that has no index and more than one file was never finished.

    Raises:
        UserError: If a form is unknown, or a file cannot be written or read back with every name of the model in it.
    """
    folders = []
    for form in config.forms:
        check_form(form, spec.names, use_dora=False)
        target = folder / f"transformer_{form}"
        _write_transformer(model, spec, target, form, parse_dtype(config.dtype), metadata, shard_bytes)
        if form == "diffusers" and config_json is not None:
            with atomic_write(target / "config.json") as temporary:
                shutil.copyfile(config_json, temporary)
        folders.append(target)
    return folders


def _write_transformer(
    model: Any,
    spec: ModelSpec,
    folder: Path,
    form: str,
    dtype: torch.dtype,
    metadata: Mapping[str, str],
    shard_bytes: int,
) -> None:
    tensors = _base_tensors(model)
    assembly = Assembly()
    for name in tensors:
        assert assembly.add(name, spec.names.from_native[form](name)), f"{name} shares rows with another parameter"
    natives = assembly.complete
    assert len(natives) == len(assembly.found), "the form has rows that the model does not"

    def about(parts: Sequence[Part]) -> tuple[tuple[int, ...], torch.dtype]:
        pieces = [rows_of(tensors[part.name], part.index, part.of) for part in parts]
        wide = any(spec.keep_fp32(part.name) for part in parts)
        return _stacked_shape(pieces), torch.float32 if wide else dtype

    shapes = {key: about(parts) for key, parts in natives.items()}
    layers = adapter_layers(model)

    def tensor_of(key: str) -> Tensor:
        pieces = []
        for part in natives[key]:
            module = part.name.removesuffix(".weight")
            if module in layers and module != part.name:
                rows = merged_weight(layers[module], part.index, part.of)
            else:
                rows = rows_of(tensors[part.name], part.index, part.of)
            pieces.append(rows.detach().to("cpu", shapes[key][1]))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    shards = list(_shards(shapes, shard_bytes))
    for old in folder.glob("diffusion_pytorch_model*.safetensors*"):
        old.unlink()
    stem = "diffusion_pytorch_model"
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, shard, tensor_of, metadata)
        where |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        total = sum(_num_bytes(*about) for about in shapes.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_text(folder / f"{stem}.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    match(SafetensorsSource.open(folder), spec.names, {name: tuple(tensor.shape) for name, tensor in tensors.items()})


def _base_tensors(model: Any) -> dict[str, Tensor]:
    """Parameters and persistent buffers of the model without its adapter, by canonical name."""
    return {canonical_name(name): tensor for name, tensor in model.state_dict().items() if not is_adapter_name(name)}


def _stacked_shape(pieces: Sequence[Tensor]) -> tuple[int, ...]:
    first, *others = pieces
    return (sum(len(piece) for piece in pieces), *first.shape[1:]) if others else tuple(first.shape)


def merged_weight(layer: Any, index: int = 0, of: int = 1) -> Tensor:
    """The fp32 weight of an adapted layer with the adapter in it: what the layer multiplies with, outside of training.

    Args:
        layer: The layer.
        index: Which of the equal parts of its rows.
        of: How many parts.
    """
    weight = rows_of(layer.get_base_layer().weight.detach(), index, of).float()
    down, up = layer.lora_A["default"].weight.detach(), rows_of(layer.lora_B["default"].weight.detach(), index, of)
    merged = torch.addmm(weight, up.float(), down.float(), alpha=layer.scaling["default"])
    if layer.lora_magnitude_vector:
        norm = torch.linalg.vector_norm(merged, dim=1)
        magnitude = rows_of(layer.lora_magnitude_vector["default"].weight.detach(), index, of)
        merged *= (magnitude / norm)[:, None]
    return merged


def _shards(
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], shard_bytes: int
) -> Iterator[dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Split tensors, in their order, into files of at most so many bytes; a larger tensor has one to itself."""
    shard: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    size = 0
    for name, about in shapes.items():
        if shard and size + _num_bytes(*about) > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = about
        size += _num_bytes(*about)
    yield shard


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
