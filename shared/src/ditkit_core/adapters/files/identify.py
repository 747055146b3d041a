"""Identifies an adapter file before any model is known: its form, its modules, and the
architectures that it fits."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from ditkit_core.adapters.dora import is_over_base
from ditkit_core.adapters.files.alpha import DIFFUSERS_METADATA
from ditkit_core.adapters.files.differences import naming_of_differences
from ditkit_core.adapters.files.keys import (
    KnownNames,
    another_model,
    other_methods,
    shapes_in,
    split_differences,
)
from ditkit_core.adapters.files.read import AdapterFile, understand_adapter, with_differences
from ditkit_core.errors import UserError
from ditkit_core.io.files import parse_json_object
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.adapter_formats import DIFFERENCES, PREFIXES, AdapterLayout, form_of
from ditkit_core.models.meta import on_meta
from ditkit_core.models.other_models import looks_like
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import ModelSpec
from ditkit_core.weights.factored import METHOD_OF_PART
from ditkit_core.weights.load import first_ten, fits_shapes, known_prefix

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes by our name: for layers the weight's [out, in], for parameters their own."""

SECOND = "transformer_2"
"""The component of the second of two adapters in one file; diffusers puts its name in front of the
keys."""


@dataclass(frozen=True, kw_only=True)
class FoundAdapter:
    """An adapter file, understood by its names."""

    path: Path
    file: AdapterFile
    layout: AdapterLayout
    shapes: Shapes
    """Shapes of the layers that it adapts, according to its matrices."""
    presets: tuple[str, ...]
    """Presets with all these layers in these shapes."""
    differences: tuple[str, ...] = ()
    """Keys of differences that are added to whole parameters."""

    @property
    def modules(self) -> list[str]:
        """The adapted modules by our names; in a file of differences alone, the modules and
        parameters that these are of."""
        names = (re.sub(r"\.(weight|bias)$", "", name) for name in self.file.differences)
        return list(self.file.modules or dict.fromkeys(names))


def layers_of(build: Callable[[Any, Precision], Any], arch: Any) -> Shapes:
    """The Linear layers of an architecture: their weights' shapes."""
    return _shapes_of(build, arch)[0]


def parameters_of(build: Callable[[Any, Precision], Any], arch: Any) -> Shapes:
    """The parameters and persistent buffers of an architecture: their shapes."""
    return _shapes_of(build, arch)[1]


@lru_cache(maxsize=256)
def _shapes_of(build: Callable[[Any, Precision], Any], arch: Any) -> tuple[Shapes, Shapes]:
    """Shapes of an architecture's Linear layers, and of its parameters and persistent buffers."""
    # Cached, because every file is compared with all presets of the family.
    with on_meta():
        model = build(arch, Precision())
    layers = {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    return layers, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def presets_of(source: SafetensorsSource, spec: ModelSpec) -> tuple[str, ...]:
    """The presets that a complete transformer fits, by names and shapes. Several may fit, if they
    differ in something without weights."""
    return tuple(
        name
        for name, arch in spec.architecture.presets.items()
        if fits_shapes(
            source, spec.architecture.names, parameters_of(spec.architecture.build, arch)
        )
    )


def find_adapter(
    path: Path, spec: ModelSpec, *, part: str | None = None, layers: Shapes | None = None
) -> FoundAdapter:
    """Open an adapter file and understand it (`adapter_in`)."""
    return adapter_in(SafetensorsSource.open(path), spec, part=part, layers=layers)


def adapter_in(
    container: SafetensorsSource,
    spec: ModelSpec,
    *,
    part: str | None = None,
    layers: Shapes | None = None,
) -> FoundAdapter:
    """Understand an adapter file by its names alone.

    `part` is the expert to choose in a file with an adapter for each. `layers` belong to an
    architecture that is no preset; their names count too.
    """
    complete, path = part_of(container, part), container.path
    _refuse_foreign(container, spec)
    source, differences = split_differences(complete)
    if differences and not source.tensors:
        return _of_differences(complete, differences, spec)
    # Names of all presets are known here. Shapes decide which preset the file fits, once its keys
    # are understood.
    presets = {
        name: layers_of(spec.architecture.build, arch)
        for name, arch in spec.architecture.presets.items()
    }
    known_names = KnownNames.of(
        spec.architecture.names,
        dict.fromkeys(
            name for preset_layers in (layers or {}, *presets.values()) for name in preset_layers
        ),
    )
    keys = known_names.keys_of(source)
    if not keys.kinds & {"down", *METHOD_OF_PART}:
        raise _not_an_adapter(source, spec)
    # Before the message on unknown keys: a known method tells the user more than a list of names.
    if others := other_methods(keys.unmatched):
        unread = [name for named in others.values() for name in named]
        raise UserError(
            f"{path} contains {' and '.join(others)} besides low-rank matrices "
            f"({first_ten(unread)}), which is not supported; merge it with the program that made it"
        )
    shapes = shapes_in(source, keys)
    file = replace(understand_adapter(source, known_names, keys, shapes), source=complete)
    layout = known_names.layout(keys)
    layout = replace(layout, dora_over_base=layout.use_dora and is_over_base(source.metadata))
    # A subset, because an adapter need not adapt every layer.
    fitting = tuple(
        name for name, theirs in presets.items() if shapes.items() <= dict(theirs).items()
    )
    shared = spec.architecture.names.shared
    is_known = bool(fitting) or layers is not None
    if (
        shared
        and not is_known
        and all(
            re.search(shared.keys, key.module)
            for module in keys.modules.values()
            for key in module.values()
        )
    ):
        raise UserError(
            f"{path} fits no preset of {spec.name} by its sizes, and {shared.name} has the same "
            "names; name a LoRA of this model, or if its base is no preset, the base too (--base)"
        )
    return FoundAdapter(
        path=path, file=file, layout=layout, shapes=shapes, presets=fitting, differences=differences
    )


def _of_differences(
    source: SafetensorsSource, keys: Sequence[str], spec: ModelSpec
) -> FoundAdapter:
    """A file of differences alone, as LyCORIS' `full` writes it.

    Raises:
        UserError: If they fit no preset.
    """
    architecture, refused = spec.architecture, list[UserError]()
    names, fitting = architecture.names, dict[str, AdapterFile]()
    empty = AdapterFile(replace(source, tensors={}), {})
    for name, arch in architecture.presets.items():
        parameters = parameters_of(architecture.build, arch)
        try:
            fitting[name] = with_differences(empty, source, keys, names, parameters)
        except UserError as error:
            refused.append(error)
    if not fitting:
        raise refused[0]
    file = next(iter(fitting.values()))
    prefix = next(prefix for prefix in PREFIXES if keys[0].startswith(prefix))
    naming = naming_of_differences(keys, file.differences, names)
    layout = AdapterLayout(form=form_of(prefix, ""), naming=naming, method=DIFFERENCES)
    return FoundAdapter(
        path=source.path,
        file=file,
        layout=layout,
        shapes={},
        presets=tuple(fitting),
        differences=tuple(keys),
    )


def _refuse_foreign(source: SafetensorsSource, spec: ModelSpec) -> None:
    """Refuse a file that its header or a name says is for another model, before presets are built,
    which takes seconds.

    Parts of a model next to its adapter, such as a text encoder's, are no reason.

    Raises:
        UserError: If it is for another model.
    """
    models = [model for model in spec.architecture.names.others if model.remedy]
    likeness, remedy = looks_like(source.tensors, models, source.metadata)
    if likeness and not is_transformer(source, spec):
        raise another_model(source, likeness, remedy)


def parts_in(source: SafetensorsSource) -> tuple[str, ...]:
    """The components that a file has adapters for."""
    second = sum(name.startswith(f"{SECOND}.") for name in source.tensors)
    return tuple(
        name
        for name, number in (("transformer", len(source.tensors) - second), (SECOND, second))
        if number
    )


def part_of(source: SafetensorsSource, part: str | None) -> SafetensorsSource:
    """The adapter of one expert in a file, with names as if it were the only one."""
    parts = parts_in(source)
    if part is None and len(parts) > 1:
        raise UserError(
            f"{source.path} has an adapter for each of {' and '.join(parts)}; choose one with "
            f"--part, then the other"
        )
    chosen = part or next(iter(parts), "transformer")
    if source.tensors and chosen not in parts and part != parts[0]:
        raise UserError(
            f"{source.path} has no adapter for {chosen}, only for {parts[0]}; leave out --part"
        )
    second = chosen == SECOND
    # Renamed like the first, so that all later code needs to know only one prefix.
    tensors = {
        f"transformer.{name.removeprefix(f'{SECOND}.')}" if second else name: stored
        for name, stored in source.tensors.items()
        if name.startswith(f"{SECOND}.") == second
    }
    metadata = dict(source.metadata)
    if DIFFUSERS_METADATA in metadata and len(parts) + second > 1:
        config = parse_json_object(
            metadata[DIFFUSERS_METADATA], f"{source.path}: the header's {DIFFUSERS_METADATA}"
        )
        chosen_keys = {
            key: value for key, value in config.items() if key.startswith(f"{SECOND}.") == second
        }
        metadata[DIFFUSERS_METADATA] = json.dumps(
            {
                key.replace(f"{SECOND}.", "transformer.", 1): value
                for key, value in chosen_keys.items()
            }
        )
    # The rest of the module sees an ordinary file with one adapter.
    return replace(source, tensors=tensors, metadata=metadata)


def is_transformer(source: SafetensorsSource, spec: ModelSpec) -> bool:
    """Whether a file has the names of a transformer of this family."""
    # Half, because a complete checkpoint may have a VAE or a text encoder next to its transformer.
    return known_prefix(source, spec.architecture.names)[1] > len(source.tensors) / 2


def _not_an_adapter(source: SafetensorsSource, spec: ModelSpec) -> UserError:
    """The error for a file without an adapter of this model: the likeliest mistake, and what to
    give instead."""
    path = source.path
    if not source.tensors:
        return UserError(f"{path} is empty; name a LoRA file")
    if is_transformer(source, spec):
        return UserError(
            f"{path} is a whole transformer, not an adapter; extract its difference to another "
            f"with --extract {path} --base BASE --rank N"
        )
    likeness, remedy = looks_like(source.tensors, spec.architecture.names.others, source.metadata)
    methods = other_methods(source.tensors)
    # A file of another model is that first, whatever its method.
    if not likeness and methods:
        return UserError(
            f"{path} contains {' and '.join(methods)}, which is not supported; merge it with the "
            f"program that made it"
        )
    return another_model(source, likeness, remedy)
