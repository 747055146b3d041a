"""Builds a model on `meta` and checks it against its files, with its adapters injected: nothing is
allocated yet."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ditkit_core.adapters.assistant import put_next_to_doras
from ditkit_core.adapters.config import AdapterConfig, BaseConfig
from ditkit_core.adapters.files.differences import described
from ditkit_core.adapters.files.entry import parse_merge
from ditkit_core.adapters.files.identify import layers_of
from ditkit_core.adapters.files.merge import merge_into
from ditkit_core.adapters.files.read import AdapterFile, open_adapter
from ditkit_core.adapters.files.start import config_from_file, initial_adapter
from ditkit_core.adapters.inject import inject, trainable_parameters
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError, argument
from ditkit_core.io.files import local_path
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.loading.architecture import choose_arch, config_json_of
from ditkit_core.loading.model import Model, ModelOrigin
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import StagedModel
from ditkit_core.models.spec import ModelSpec, build_on_meta
from ditkit_core.models.state_dict import TensorSlice
from ditkit_core.weights.fp8_scaled import num_packed, num_scaled, open_weights
from ditkit_core.weights.load import Advice, StoredParameters, match
from ditkit_core.weights.quantize import (
    check_quantize,
    check_scaled,
    compute_in_8_bits,
    convert,
    describe_quantized,
    hold_as_stored,
    linears_of_blocks,
    num_bytes,
    quantized_bytes,
    stored_formats,
)


def model_on_meta(
    spec: ModelSpec,
    components: ModelPaths,
    adapter: AdapterConfig | None,
    base: BaseConfig,
    *,
    precision: Precision,
    component: str = "transformer",
    keeps_codes: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Model:
    """Build the model on `meta`, with its adapters injected, and check it against its files:
    seconds, before the hours that encoding may take.

    No weights are read yet: `loading/weights.py: load_weights` does that in place.

    Args:
        components: Path of the transformer, and its preset.
        adapter: What to train; None for a frozen model without an adapter.
        base: What to merge into the base.
        component: The one to load, where a model has several transformers.
        keeps_codes: Whether matrices that a file has in 8 or 4 bits stay in them.
        say: Called with one line for each setting that a file decided.
    """
    source = open_weights(components.locate(component))
    if adapter is not None:
        check_quantize(base.quantize, adapter.method)
        if num_scaled(source) or num_packed(source):
            check_scaled(str(source.path), adapter.method)
    preset, arch = choose_arch(spec, components, source)
    model, files = build_on_meta(spec, arch, precision), base.files(component)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    # All files are opened before anything slow, so that a wrong one fails at once: importing peft
    # alone takes seconds.
    mapping = match(
        source,
        spec.architecture.names,
        shapes,
        advice=None if components.preset else _advice(source),
    )
    open_file = partial(
        open_adapter,
        names=spec.architecture.names,
        modules=layers_of(spec.architecture.build, arch),
    )
    # An assistant is taken out again for samples, which differences of whole parameters cannot be.
    others = {base.assistant_key(component): open_file}
    open_merge = partial(open_file, parameters=shapes)
    parsed = [(key, *parse_merge(entry, key)) for key, entry in files]
    merged = [(others.get(key, open_merge)(file), strength) for key, file, strength in parsed]
    adapter, start = _started_from_file(adapter, open_file, base.merge_key(component), say)
    if keeps_codes:
        _quantize_blocks(spec, model, base.quantize, source, mapping, precision, merged, say=say)
    if base.compute != "dtype":
        say(compute_in_8_bits(model, base.compute))
    # after quantization, so that the adapters are added to the layers that the model ends up with
    if adapter is None:
        model.requires_grad_(False)
    adapted = () if adapter is None else inject(model, adapter, spec.adapters.targets)
    for (key, _), (file, strength) in zip(files, merged, strict=True):
        say(f"{key}: {_described_merge(file)} at strength {strength:g}")
    assistant = put_next_to_doras(
        model, merged, base.assistant_key(component) if adapter and adapter.use_dora else ""
    )
    origin = ModelOrigin(
        paths=components,
        arch=arch,
        preset=preset,
        trained=adapter,
        precision=precision,
        stored=StoredParameters(
            source=source, mapping=mapping, shapes=shapes, edits=merge_into(merged)
        ),
        merged=merged,
        assistant=assistant,
        start=initial_adapter(start, adapted) if start else None,
        base=base,
        merge_key=base.merge_key(component),
    )
    return Model(model, BlockEngine(), spec, trainable_parameters(model), loaded_from=origin)


def _described_merge(file: AdapterFile) -> str:
    also = f" and differences of {described(list(file.differences))}" if file.differences else ""
    return f"{len(file.modules)} modules{also} of {file.source.path}"


def _started_from_file(
    adapter: AdapterConfig | None,
    open_file: Callable[[Path], AdapterFile],
    merge_key: str,
    say: Callable[[str], None],
) -> tuple[AdapterConfig | None, AdapterFile | None]:
    """The section with the values of the file that `adapter.init` names, and the file; without one
    the section as it is."""
    if adapter is None or not adapter.init:
        return adapter, None
    if adapter.method == "full":
        raise UserError(
            f"{argument('adapter.init')} = {adapter.init} needs {argument('adapter.method')} = "
            f"'lora'; for a full fine-tune add it to {merge_key}"
        )
    file = open_file(local_path(adapter.init))
    config, line = config_from_file(adapter, file, merge_key)
    say(line)
    return config, file


def _quantize_blocks(
    spec: ModelSpec,
    model: StagedModel,
    kind: str,
    source: SafetensorsSource,
    mapping: Mapping[str, tuple[TensorSlice, ...]],
    precision: Precision,
    merged: list[tuple[AdapterFile, float]],
    *,
    say: Callable[[str], None],
) -> None:
    """Prepare the blocks' matrices for the 8 or 4 bits that the file or `base.quantize` asks
    for."""
    formats = formats_in_blocks(spec, model, source, mapping)
    dtype_of = loaded_dtype(spec, precision)
    held = {name: stored for name, stored in formats.items() if kind in ("none", stored)}
    if held:
        before = num_bytes(model, dtype_of)
        hold_as_stored(model, held)
        line = (
            f"{source.path}: {len(held)} matrices stay as they are stored, in "
            f"{_and(held.values())}; the base takes {quantized_bytes(num_bytes(model, dtype_of))} "
            f"instead of {quantized_bytes(before)}"
        )
        say(
            line
            + "; those that a merged adapter changes are rounded once more"
            * bool(merge_into(merged))
        )
    if others := {stored for name, stored in formats.items() if name not in held}:
        say(
            f"{source.path} is in {_and(others)}, and rounded once more; a bf16 file or "
            f"base.quantize = none loses less"
        )
    in_blocks = {part.name for name in formats for part in mapping[f"{name}.weight"]}
    packed = [
        name for name, stored in source.tensors.items() if stored.packing and name not in in_blocks
    ]
    if packed:
        say(
            f"{source.path}: {len(packed)} matrices in 8 or 4 bits are unpacked, {packed[0]} the "
            f"first"
        )
    # With a format that the file has, there may be no linear layer to convert.
    if kind != "none" and any(
        not spec.precision.keep_fp32(f"{name}.weight") for name in linears_of_blocks(model)
    ):
        before = num_bytes(model, dtype_of)
        converted = convert(model, kind, spec.precision.keep_fp32)
        say(
            describe_quantized(
                kind, converted, len(model.blocks()), before, num_bytes(model, dtype_of)
            )
        )


def _and(formats: Collection[str]) -> str:
    return " and ".join(sorted(set(formats)))


def formats_in_blocks(
    spec: ModelSpec,
    model: StagedModel,
    source: SafetensorsSource,
    mapping: Mapping[str, tuple[TensorSlice, ...]],
) -> dict[str, str]:
    """Formats in which the blocks' matrices can stay as a file has them, by layer.

    Args:
        model: The model, on `meta`.
        mapping: Parts of the file's tensors by our name, from `match`.
    """
    layers = [
        name for name in linears_of_blocks(model) if not spec.precision.keep_fp32(f"{name}.weight")
    ]
    return stored_formats(model, source, mapping, layers=layers)


def formats_of_file(
    spec: ModelSpec, arch: Any, source: SafetensorsSource, precision: Precision
) -> dict[str, str]:
    """The same for a model that is not built."""
    if not (num_scaled(source) or num_packed(source)):
        return {}
    model = build_on_meta(spec, arch, precision)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return formats_in_blocks(spec, model, source, match(source, spec.architecture.names, shapes))


def _advice(source: SafetensorsSource) -> Advice:
    """Remedies for the error of weights that do not fit their config.json."""
    path = config_json_of(source.path)
    described_by = str(path.name if path else "the preset")
    return Advice(
        described_by=described_by, remedy="take both from one download, or set model.preset"
    )


def loaded_dtype(spec: ModelSpec, precision: Precision) -> Callable[[str], torch.dtype]:
    """The dtype of the base's parameters that are not quantized, by name."""
    return lambda name: torch.float32 if spec.precision.keep_fp32(name) else precision.matmul
