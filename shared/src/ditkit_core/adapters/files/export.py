"""Exports a run for other programs: its adapter, or the complete transformer with the adapter
merged in."""

import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core.adapters.config import FP8_SCALED, AdapterConfig, ExportConfig
from ditkit_core.adapters.dora import in_norm_of
from ditkit_core.adapters.files.export_names import adapter_file
from ditkit_core.adapters.files.write import (
    check_form,
    check_one_to_one,
    check_stacks,
    trained_adapters,
    write_adapter,
    zero_adapter,
)
from ditkit_core.adapters.inject import adapter_layers, canonical_name, is_adapter_name, method_of
from ditkit_core.errors import UserError
from ditkit_core.io.files import atomic_write, write_text
from ditkit_core.io.safetensors import write_safetensors
from ditkit_core.models.adapter_formats import ADAPTER_FORMS, NO_READER, VERIFIED, set_forms
from ditkit_core.models.adapter_programs import NO_FACTORED, NO_MODEL, NOT_TRIED
from ditkit_core.models.precision import parse_dtype
from ditkit_core.models.protocol import StagedModel
from ditkit_core.models.spec import ModelSpec
from ditkit_core.models.state_dict import TensorSlice
from ditkit_core.nn.factored import parts_of, weight_change
from ditkit_core.nn.quantized_linear import dense_weight, quantized_weights, without_scales
from ditkit_core.weights.fp8_scaled import About, in_scaled_8_bits, open_weights
from ditkit_core.weights.fused_tensors import FusedTensors, rows_of
from ditkit_core.weights.load import match
from ditkit_core.weights.metadata import redact_description

SHARD_BYTES = {"diffusers": 5_000_000_000}
"""By form, the maximum bytes in one file of a transformer: as on the hub. ComfyUI, which reads the
official form, reads a model from one file."""

VERIFIED_LATER = (
    "loaded in diffusers after it was written; the result is in verified.json of the run"
)
"""The value of `VERIFIED` where something does, so that the file need not change after it was verified."""

_Tensors = Mapping[str, About]


def _dtype_of(config: ExportConfig) -> torch.dtype:
    """The dtype of all tensors that are not in 8 bits."""
    return torch.bfloat16 if config.scaled else parse_dtype(config.dtype)


def with_forms_of(config: ExportConfig, adapter: AdapterConfig, spec: ModelSpec) -> ExportConfig:
    """The section, in place of the default with what the trained adapter needs.

    A DoRA needs a file for ComfyUI and one for diffusers, because no file is for both; a LoKr or
    LoHa the form that has a name for each layer.
    """
    if config.forms != ExportConfig().forms or adapter.method == "full":
        return config
    if adapter.method != "lora":
        return replace(config, forms=(spec.adapters.rules.one_to_one,))
    return replace(config, forms=("official", "diffusers")) if adapter.use_dora else config


def has_magnitudes(layers: Mapping[str, Any]) -> bool:
    """Whether a model's layers with adapters have DoRA."""
    return any(
        method_of(layer) == "lora" and layer.lora_magnitude_vector for layer in layers.values()
    )


def method_of_all(layers: Mapping[str, Any]) -> str:
    """The method of a model's layers with adapters, which is one."""
    return next(map(method_of, layers.values()), "lora")


def check_export(spec: ModelSpec, config: ExportConfig, adapter: AdapterConfig) -> None:
    """Refuse, before training, a configuration that could not be exported after it."""
    if config.scaled and adapter.method != "full" and not config.merged:
        raise UserError(
            f"export.dtype = {FP8_SCALED} is for complete transformers, and an adapter of rank "
            f"{adapter.rank} gains nothing from it; "
            "set export.merged = true (--merge), or export.dtype = bf16"
        )
    for form in config.forms:
        check_form(
            form, spec.architecture.names, use_dora=adapter.use_dora and adapter.method == "lora"
        )
    if config.merged or adapter.method == "full":
        whole_forms(spec, config)


def whole_forms(spec: ModelSpec, config: ExportConfig) -> list[str]:
    """The configured forms in which complete transformers are written."""
    native_forms = spec.architecture.names.from_native
    forms = [form for form in config.forms if form in native_forms]
    if not forms:
        raise UserError(
            f"a whole transformer is not written in the form {' or '.join(config.forms)}; "
            f"{set_forms(list(native_forms))}"
        )
    return forms


def check_adapted(spec: ModelSpec, config: ExportConfig, model: StagedModel) -> None:
    """Refuse, before training, an adapter of a model that the readers of a configured form would
    ignore or misread."""
    layers = adapter_layers(model)
    method, use_dora = method_of_all(layers), has_magnitudes(layers)
    for form in config.forms if layers else ():
        check_stacks(form, spec.architecture.names, layers, use_dora=use_dora)
        if method != "lora":
            check_one_to_one(form, spec.architecture.names, layers)
        spec.adapters.check(form, layers)


def read_by(spec: ModelSpec, form: str, model: StagedModel) -> Mapping[str, str]:
    """For each program that reads adapter files: its problem with a model's adapter in a form,
    empty if it loads all of it."""
    layers = adapter_layers(model)
    method, use_dora = method_of_all(layers), has_magnitudes(layers)
    fillers = spec.adapters.rules.fillers(form, list(layers)) if method == "lora" else ()
    return readers_of(spec, form, [*layers, *fillers], use_dora=use_dora, method=method)


def readers_of(
    spec: ModelSpec, form: str, modules: Collection[str], *, use_dora: bool, method: str = "lora"
) -> Mapping[str, str]:
    """`read_by` for a file with adapters of these modules."""
    layout = ADAPTER_FORMS[form].layout(
        spec.architecture.names.bare, use_dora=use_dora, method=method
    )
    return spec.adapters.rules.readers(layout, modules)


def why_unverified(
    spec: ModelSpec, config: ExportConfig, form: str, model: StagedModel, *, complete: bool = False
) -> str:
    """Why diffusers cannot compare an export in a form with ours, as the predicate of a sentence
    about it; empty if it can.

    `complete` means a whole transformer; otherwise it is the model's adapter.
    """
    if complete:
        if spec.adapters.verify_whole is None:
            return "has no such model"
        return (
            "does not read scaled 8 bits"
            if config.scaled
            else spec.adapters.whole_unread.get(form, "")
        )
    limit = read_by(spec, form, model).get("diffusers", "")
    if limit == NO_FACTORED:  # compared with peft's layers in diffusers' model
        limit = ""
    return limit or "has no such model" * (spec.adapters.verify is None)


def _no_reader(limit: str) -> dict[str, str]:
    """What a file's header says where nothing verifies it."""
    return {VERIFIED: f"{NO_READER}diffusers {limit}"} if limit else {}


def loaded_by(read: Mapping[str, str]) -> str:
    """One line about the programs that load a file, from the result of `AdapterRules.readers`."""
    loading = (
        ", ".join(reader for reader, remark in read.items() if not remark)
        or "no program that is known"
    )
    others = "; ".join(
        f"{reader} {remark}"
        for reader, remark in read.items()
        if remark not in ("", NOT_TRIED, NO_MODEL)
    )
    return f"loaded whole by {loading}" + f" ({others})" * bool(others)


def export_adapter(
    model: StagedModel,
    spec: ModelSpec,
    folder: Path,
    stem: str,
    config: ExportConfig,
    *,
    metadata: Mapping[str, str],
    exact: bool = False,
    whole_in: Callable[[nn.Module], AbstractContextManager[None]] = lambda module: nullcontext(),
) -> list[Path]:
    """Write a model's adapter in each form; each file is read back and compared before it gets its
    name.

    Args:
        stem: First part of the file names, as for `adapter_file`.
        metadata: Strings for the headers: base, data hash, config, versions.
        exact: Append nothing to the stem, because there is only one form.
        whole_in: Opens a block in which the base's weights of one layer can be read: a DoRA's
            magnitudes may be over their norm.
    """
    layers = adapter_layers(model)
    assert layers, "the model has no adapter"
    check_adapted(spec, config, model)
    trained, base, files = trained_adapters(layers), base_tensors(model), []
    for form in config.forms:
        path = adapter_file(folder, stem, "official" if exact else form)
        adapters, is_lora = dict(trained), method_of_all(layers) == "lora"
        for module, adapter in trained.items() if is_lora else ():
            weight = partial(_base_weight, layers[module].get_base_layer(), whole_in)
            adapters[module] = replace(
                adapter, matrices=in_norm_of(form, adapter.matrices, adapter.scale, weight)
            )
        for module in spec.adapters.rules.fillers(form, list(layers)) if is_lora else ():
            adapters[module] = zero_adapter(tuple(base[f"{module}.weight"].shape))
        write_adapter(
            path,
            adapters,
            spec.architecture.names,
            form=form,
            dtype=_dtype_of(config),
            metadata={**metadata, **_no_reader(why_unverified(spec, config, form, model))},
        )
        files.append(path)
    return files


def _base_weight(
    layer: nn.Linear, whole_in: Callable[[nn.Module], AbstractContextManager[None]]
) -> Tensor:
    with whole_in(layer):
        return dense_weight(layer)


def export_merged(
    model: StagedModel,
    spec: ModelSpec,
    folder: Path,
    config: ExportConfig,
    *,
    metadata: Mapping[str, str],
    original: Callable[[str], Tensor] | None = None,
    config_json: Path | None = None,
    shard_bytes: int | None = None,
) -> list[Path]:
    """Write the complete transformer in each form, with an adapter merged in. For a full fine-tune
    this is the export.

    Where the base is quantized, the adapter is merged into the original weights. Users of the
    adapter add it to those, and the result is nearer to what was learnt than weights that are
    rounded twice.

    Args:
        folder: Afterwards contains one folder `transformer_<form>` per form; one with several files
            and no index was never finished.
        original: From a name to a base parameter's values before it was quantized; by default the
            model's own approximation is written. For a model on `meta` it gives every parameter,
            one after the other.
        config_json: The base's config.json, copied next to the diffusers form, whose readers need
            it.
        shard_bytes: Maximum bytes per file; None for the limit of the form.
    """
    folders = []
    for form in whole_forms(spec, config):
        target = folder / f"transformer_{form}"
        shapes, tensor_of = _transformer_in_form(model, spec, form, config, original)
        limit = why_unverified(spec, config, form, model, complete=True)
        most = SHARD_BYTES.get(form, sys.maxsize) if shard_bytes is None else shard_bytes
        _write_shards(target, shapes, tensor_of, {**metadata, **_no_reader(limit)}, most)
        ours = {name: tuple(tensor.shape) for name, tensor in base_tensors(model).items()}
        # Read back by the reader of bases, so that the export can be a base itself.
        match(open_weights(target), spec.architecture.names, ours)
        if form == "diffusers" and config_json is not None:
            with atomic_write(target / "config.json") as temporary:
                temporary.write_bytes(redact_description(config_json.read_bytes()))
        folders.append(target)
    return folders


def _transformer_in_form(
    model: StagedModel,
    spec: ModelSpec,
    form: str,
    config: ExportConfig,
    original: Callable[[str], Tensor] | None,
) -> tuple[_Tensors, Callable[[str], Tensor]]:
    """Shapes and dtypes of a file's tensors in this form, and a function that makes one: no two of
    them need to be in memory at once."""
    tensors, coarse, names = base_tensors(model), quantized_weights(model), spec.architecture.names
    form = names.scaled if config.scaled else form
    fused = FusedTensors.of(tensors, names.from_native[form])
    natives = fused.complete
    assert len(natives) == len(fused.parts), "the form has rows that the model does not"

    # Shapes are read off views: no quantized weight is dequantized for them.
    def about(parts: Sequence[TensorSlice]) -> tuple[tuple[int, ...], torch.dtype]:
        pieces = [rows_of(tensors[part.name], part.index, part.of) for part in parts]
        # One fp32 part makes the tensor fp32: rounding it would lose what the model keeps.
        wide = any(spec.precision.keep_fp32(part.name) for part in parts)
        first, *others = pieces
        shape = (sum(map(len, pieces)), *first.shape[1:]) if others else tuple(first.shape)
        return shape, torch.float32 if wide else _dtype_of(config)

    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    # of what the file has for a tensor, its name: constants stand next to some
    source_of: dict[str, str] = {}
    for name, parts in natives.items():
        shape, dtype = about(parts)
        for key, stored in names.stored(form, name, torch.empty(shape, device="meta")).items():
            shapes[key], source_of[key] = (tuple(stored.shape), dtype), name
    layers = adapter_layers(model)

    # The last one is kept: a form that splits our parameter into several tensors asks for it
    # several times in a row.
    @lru_cache(maxsize=1)
    def base_of(name: str) -> Tensor:
        if name not in coarse and not tensors[name].is_meta:
            return tensors[name]
        return dense_weight(coarse[name]) if original is None else original(name)

    def tensor_of(key: str) -> Tensor:
        pieces = []
        for part in natives[source_of[key]]:
            module = part.name.removesuffix(".weight")
            if module in layers and module != part.name:
                rows = merged_weight(layers[module], base_of(part.name), part.index, part.of)
            else:
                rows = rows_of(base_of(part.name), part.index, part.of)
            # Rounded once, after the merge in fp32.
            pieces.append(rows.detach().to("cpu", dtype_of(key)))
        return names.stored(
            form, source_of[key], pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        )[key]

    def dtype_of(key: str) -> torch.dtype:
        return torch.float32 if key in scaled else shapes[key][1]

    scaled: Collection[str] = ()
    if not config.scaled:
        return shapes, tensor_of
    # Only the blocks' matrices: embedding and head keep 16 bits, as under base.quantize.
    matrices = {name for name in _matrices_of_blocks(model) if not spec.precision.keep_fp32(name)}
    scaled = {key for key, parts in natives.items() if all(part.name in matrices for part in parts)}
    return in_scaled_8_bits(shapes, tensor_of, scaled)


def _write_shards(
    folder: Path,
    shapes: _Tensors,
    tensor_of: Callable[[str], Tensor],
    metadata: Mapping[str, str],
    shard_bytes: int,
) -> None:
    """Write files of at most `shard_bytes` (more for a larger tensor), and an index if there are
    several."""
    from huggingface_hub import split_state_dict_into_shards_factory

    stem = "diffusion_pytorch_model"
    # Names contain the number of files, so files of an earlier export with another number would
    # stay among the new ones.
    for old in folder.glob(f"{stem}*.safetensors*"):
        old.unlink()
    split = split_state_dict_into_shards_factory(
        dict(shapes),
        get_storage_size=lambda about: torch.Size(about[0]).numel() * about[1].itemsize,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=shard_bytes,
    )
    for name, keys in split.filename_to_tensors.items():
        write_safetensors(folder / name, {key: shapes[key] for key in keys}, tensor_of, metadata)
    if split.is_sharded:
        index = {
            "metadata": split.metadata,
            "weight_map": dict(sorted(split.tensor_to_filename.items())),
        }
        # The index comes last: a folder with several files and no index was never finished.
        write_text(folder / f"{stem}.safetensors.index.json", json.dumps(index, indent=2) + "\n")


def _matrices_of_blocks(model: StagedModel) -> set[str]:
    """The weights of the blocks' Linear layers, by canonical name."""
    inside = {id(module) for block in model.blocks() for module in block.modules()}
    weights = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside
    }
    return {canonical_name(name) for name in weights if not is_adapter_name(name)}


def base_tensors(model: StagedModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers of the model without its adapter, by canonical name.
    Quantized weights have only their shape."""
    state = {
        canonical_name(name): tensor
        for name, tensor in model.state_dict().items()
        if not is_adapter_name(name)
    }
    return without_scales(state, model)


def merged_weight(layer: Any, base: Tensor, index: int = 0, of: int = 1) -> Tensor:
    """The fp32 weight of an adapted layer with the adapter merged in: part `index` of `of` equal
    parts of its rows.

    `base` is the weight without the adapter.
    """
    weight = rows_of(base.detach(), index, of).float()
    if (method := method_of(layer)) != "lora":
        parts = {
            part: tensor.detach().to(weight.device).float()
            for part, tensor in parts_of(layer, method).items()
        }
        return weight + rows_of(weight_change(parts, layer.scaling["default"]), index, of)
    down = layer.lora_A["default"].weight.detach()
    up = rows_of(layer.lora_B["default"].weight.detach(), index, of)
    down, up = down.to(weight.device), up.to(weight.device)  # a streamed weight is read on the host
    merged = torch.addmm(weight, up.float(), down.float(), alpha=layer.scaling["default"])
    if layer.lora_magnitude_vector:
        # DoRA's norm is per row, so a part of the rows can be merged without the others.
        norm = torch.linalg.vector_norm(merged, dim=1)
        magnitude = rows_of(layer.lora_magnitude_vector["default"].weight.detach(), index, of)
        merged *= (magnitude.to(norm.device) / norm)[:, None]
    return merged
