"""Which architecture a model's files have."""

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ditkit_core.adapters.files.identify import parameters_of, presets_of
from ditkit_core.adapters.files.keys import has_adapter_keys, split_differences
from ditkit_core.config.nearest import nearest_word
from ditkit_core.errors import UserError, argument
from ditkit_core.io.files import read_json_object, readable
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.other_models import looks_like, other_by_id, wrong_config
from ditkit_core.models.paths import ModelPaths, check_preset, is_hub_id, model_path, repository_of
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import ModelSpec, build_on_meta
from ditkit_core.weights.fp8_scaled import open_weights
from ditkit_core.weights.frozen import at_most_parameters
from ditkit_core.weights.load import fits_shapes

# of a foreign config.json; the largest transformers that are known have about 2,000 tensors
_MAX_PARAMETERS = 20_000


def choose_arch(
    spec: ModelSpec, components: ModelPaths, source: SafetensorsSource
) -> tuple[str, Any]:
    """The architecture by its name, by the config.json next to the weights, or by the preset with
    the same shapes.

    Shapes decide if the config.json is not in diffusers' format, since some authors have formats of
    their own. Where no single preset has them, the config.json of the base's transformer counts, if
    it has these shapes.

    Returns:
        The preset's name, empty if the architecture matches no preset, and the architecture.
    """
    _refuse_adapter(source)
    preset = components.preset
    if preset:
        check_preset(preset, spec.architecture.presets)
        return preset, spec.architecture.presets[preset]
    path = config_json_of(source.path)
    base_transformer = replace(components, transformer="").here("transformer")
    if path is not None and (arch := _described(spec, path, base_transformer)) is not None:
        return next(
            (
                name
                for name, preset_arch in spec.architecture.presets.items()
                if preset_arch == arch
            ),
            "",
        ), arch
    fitting = list(presets_of(source, spec)) if source.tensors else []
    if len(fitting) != 1:
        path = None if base_transformer is None else config_json_of(base_transformer)
        arch = None if path is None else _described(spec, path, base_transformer)
        if arch is not None and fits_shapes(
            source, spec.architecture.names, parameters_of(spec.architecture.build, arch)
        ):
            return "", arch
        likeness, remedy = looks_like(
            () if fitting else source.tensors, spec.architecture.names.others, source.metadata
        )
        reason = f"{' and '.join(fitting)} fit" if fitting else "no preset fits"
        remedy = (
            remedy
            or f"set {argument('model.preset')} to one of {', '.join(fitting or spec.architecture.presets)}"
        )
        raise UserError(f"{reason} the weights in {source.path}{likeness}; {remedy}")
    return fitting[0], spec.architecture.presets[fitting[0]]


def _refuse_adapter(source: SafetensorsSource) -> None:
    """Refuse an adapter where a transformer or the folder of a model is named."""
    trained = f"{argument('adapter.init')} trains it further, " if has_adapter_keys(source) else ""
    if trained or split_differences(source)[1]:
        kind = "a LoRA" if trained else "a file of differences to whole parameters"
        raise UserError(
            f"{source.path} is {kind} and no transformer: {trained}{argument('base.merge')} merges "
            f"it into the base; "
            f"set {argument('model.transformer')} or {argument('model.base')} to the base"
        )


def _refuse_adapter_as_base(base: str) -> None:
    """Refuse an adapter's file, or a folder of one, where the folder of a model is named."""
    path = model_path(base)
    with readable(path):
        # A model's folder may have an adapter next to its parts.
        is_model = any((path / part).is_dir() for part in ("transformer", "vae", "text_encoder"))
    if base and not is_model:
        source = None
        with suppress(UserError):  # what it is instead is said where a part of it is looked for
            source = SafetensorsSource.open(path)
        if source is not None:
            _refuse_adapter(source)


def _described(spec: ModelSpec, path: Path, base_transformer: Path | None) -> Any:
    """The architecture that a config.json of unknown origin describes; None if it is not in
    diffusers' format. Where its folder is no part of a pipeline, as an exported one, the pipeline of
    the base's transformer (`base_transformer`) counts."""
    if spec.architecture.infer_arch is None:
        return None
    remedy = f"set {argument('model.preset')} to one of {', '.join(spec.architecture.presets)}"
    config = read_json_object(path, remedy, "does not describe this model because it")
    try:
        index = _pipeline_index(path.parent) or (
            _pipeline_index(base_transformer) if base_transformer else {}
        )
        arch = spec.architecture.infer_arch(config, index)
        if arch is not None:  # values of a wrong type only fail when a model is built with them
            with at_most_parameters(_MAX_PARAMETERS):
                build_on_meta(spec, arch, Precision())
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        AssertionError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        wrong = wrong_config(config, error, spec.name, spec.architecture.names.others)
        raise UserError(f"{path} {wrong}{'' if ';' in wrong else f'; {remedy}'}") from error
    return arch


def arch_here(spec: ModelSpec, components: ModelPaths, *, fetch: bool = False) -> tuple[str, Any]:
    """The preset's name and the architecture, by its name or from local files.

    Args:
        components: Path of the transformer.
        fetch: Whether a missing config.json is downloaded from the hub; weights never are.
    """
    _refuse_adapter_as_base(components.base)
    if components.preset:
        # A preset decides by itself, so an empty source is enough.
        return choose_arch(spec, components, SafetensorsSource(Path(), {}, {}))
    path = components.here("transformer")
    named = components.transformer or components.base
    published = spec.architecture.hub_presets
    if path is None and is_hub_id(named) and (preset := published.get(repository_of(named))):
        return preset, spec.architecture.presets[preset]
    near = nearest_word(named, published, 0.8) if is_hub_id(named) else ""
    meant = f"; did you mean {near}?" if near and near != named else ""
    if is_hub_id(named):  # first: FLUX.1's ids are like FLUX.2's
        meant = other_by_id(named, spec.name, spec.architecture.names.others) or meant
    try:
        path = path or (components.fetched_description("transformer") if fetch else None)
    except UserError as error:
        raise UserError(f"{error}{meant}") from error
    path = path or components.here("transformer_2")  # enough to train the second expert alone
    if path is None:
        raise UserError(
            f"{components.not_described()} {argument('model.preset')} to one of "
            f"{', '.join(spec.architecture.presets)}{meant}"
        )
    described = config_json_of(path) is not None and spec.architecture.infer_arch is not None
    # A config.json decides by itself, so the headers of the weights need not be read.
    source = SafetensorsSource(path, {}, {}) if described else open_weights(path)
    return choose_arch(spec, components, source)


def distilled_by_name(spec: ModelSpec, arch: Any, named: str) -> str:
    """The preset of a distilled model that the name of a base's files has, where another
    architecture was chosen; empty if there is none. Both may have the same shapes, and no file of
    some models says which it is. Of a preset with the chosen one's name and more words, such as
    `13b_distilled` next to `13b`, the words that are more are enough."""

    def parts(name: str) -> set[str]:
        return set(re.split(r"[^a-z0-9]+", name.lower()))

    presets, advice = spec.architecture.presets, spec.training.advice
    named_presets = {name: arch for name, arch in presets.items() if parts(name) <= parts(named)}
    if advice(arch):
        return ""
    for chosen in (parts(name) for name, preset_arch in presets.items() if preset_arch == arch):
        for name, other in presets.items():
            if advice(other) and chosen < parts(name) and parts(name) - chosen <= parts(named):
                return name
    if arch in named_presets.values():
        return ""
    return next((name for name, other in named_presets.items() if advice(other)), "")


def _pipeline_index(transformer: Path) -> dict[str, Any]:
    """The `model_index.json` of the pipeline that a transformer's folder is part of, or the index of
    a modular pipeline; empty if there is none that can be read."""
    for name in ("model_index.json", "modular_model_index.json"):
        with suppress(UserError):
            return read_json_object(transformer.parent / name)
    return {}


def config_json_of(path: Path) -> Path | None:
    """The config.json of weights, in their folder or next to their file; None if there is none."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    with readable(file):
        return file if file.is_file() else None
