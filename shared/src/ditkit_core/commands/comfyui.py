"""`--comfyui FOLDER`: the files of a model that an installation of ComfyUI has already, found by
their headers."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ditkit_core.adapters.files.identify import Shapes, parameters_of, presets_of
from ditkit_core.config.cli_args import Flags
from ditkit_core.errors import UserError, argument
from ditkit_core.io.console import warn
from ditkit_core.io.files import local_path, readable
from ditkit_core.loading.architecture import arch_here, distilled_by_name
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.spec import ModelSpec
from ditkit_core.run.config import RunConfig
from ditkit_core.weights.fp8_scaled import open_weights
from ditkit_core.weights.load import fits_shapes

FOLDERS = {
    "transformer": ("diffusion_models", "unet"),
    "transformer_2": ("diffusion_models", "unet"),
    "vae": ("vae",),
    "text_encoder": ("text_encoders", "clip"),
    "image_encoder": ("clip_vision",),
}
"""By key of `[model]`: where ComfyUI has such files, in its folder `models`."""
_PLANNED_AS = {
    "vae": "VAE encoder",
    "text_encoder": "text encoder",
    "image_encoder": "image encoder",
}


def with_comfyui(spec: ModelSpec, flags: Flags, config: RunConfig) -> Flags:
    """The command line with the files of `--comfyui` in place of that option.

    Args:
        config: What the command line and its run file say: what they name, or have in a local base,
            is not looked for.

    Raises:
        UserError: If it is no folder of ComfyUI, nothing fits, or several files do.
    """
    root = local_path(flags.options.comfyui)
    files = find_files(spec, config.model, root)
    for key, path in files.items():
        is_called = key != "vae" or _is_called(spec, path)
        doubt = "" if is_called else f" (by its shapes: look whether it is the VAE of {spec.name})"
        warn(f"model.{key} = {path}{doubt}")
    values = {**flags.values, **{f"model.{key}": str(path) for key, path in files.items()}}
    return replace(flags, values=values, options=replace(flags.options, comfyui=""))


def find_files(spec: ModelSpec, model: ModelPaths, root: Path) -> dict[str, Path]:
    """The files of a model in ComfyUI's folder, by key of `[model]`.

    A file fits if its tensors have the names and shapes of the architecture, or of the published
    encoder that belongs to it. Of several, a name that says so and matrices of more than 8 bits
    decide.
    """
    files = _files(root)
    preset, arch = _architecture(spec, model, files["transformer"])
    experts = {expert.part: expert.name.split("_")[0] for expert in spec.architecture.experts(arch)}
    transformers = experts or {"transformer": ""}
    wanted = [*transformers, "vae", "text_encoder", *spec.auxiliary.components(arch)]
    chosen, missing = dict[str, Path](), list[str]()
    for key in wanted:
        if key not in FOLDERS or getattr(model, key) or model.here(key) is not None:
            continue
        if key in transformers:
            fitting = [path for path in files[key] if _is_transformer(spec, arch, path)]
            words = {transformers[key]} - {""}
            fitting = [path for path in fitting if words <= _words(path)]
            fitting = _by_name(spec, preset, arch, fitting)
        else:
            fitting = _encoders_among(files[key], spec, arch, key)
        # Published VAEs of several families have the same shapes, and one family another's VAE.
        fitting = _narrowed(fitting, lambda path: _is_called(spec, path))
        if key == "vae" and (kind := _vae_kind(spec, arch)):
            fitting = _narrowed(fitting, lambda path: kind in _letters(path))
        fitting = _narrowed(fitting, lambda path: not _has_8_bits(path))
        if len(fitting) > 1:
            raise UserError(
                f"--comfyui {root}: {len(fitting)} files fit {argument(f'model.{key}')}; give one "
                f"of them: {', '.join(map(str, fitting))}"
            )
        if fitting:
            chosen[key] = fitting[0]
        else:
            missing.append(key)
    if missing:
        looked = {name for key in missing for name in FOLDERS[key]}
        line = (
            f"--comfyui {root}: no file in its {', '.join(sorted(looked))} is the "
            f"{' or the '.join(missing).replace('_', ' ')} of {preset or spec.name}"
        )
        if not chosen:
            raise UserError(f"{line}; name files by {argument(f'model.{missing[0]}')} and so on")
        warn(line)
    return chosen


def models_of(root: Path) -> Path:
    """The folder `models` of an installation of ComfyUI, which may itself be named."""
    with readable(root):
        for folder in (root / "models", root):
            if any((folder / name).is_dir() for names in FOLDERS.values() for name in names):
                return folder
    raise UserError(
        f"--comfyui {root}: there is no models/diffusion_models, models/vae or "
        f"models/text_encoders; name the folder that has ComfyUI's main.py"
    )


def _files(root: Path) -> dict[str, list[Path]]:
    """The files of each key's folders."""
    models = models_of(root)
    with readable(models):
        return {
            key: sorted(path for name in names for path in (models / name).rglob("*.safetensors"))
            for key, names in FOLDERS.items()
        }


def _architecture(
    spec: ModelSpec, model: ModelPaths, transformers: Sequence[Path]
) -> tuple[str, Any]:
    """The model that is named; else the one that a transformer in the folder is."""
    if model.preset or model.base or model.transformer:
        return arch_here(spec, model)
    fitting = dict[str, Path]()
    for path in transformers:
        with suppress(UserError):
            fitting |= dict.fromkeys(presets_of(open_weights(path), spec), path)
    if len(fitting) == 1:
        (preset,) = fitting
        return preset, spec.architecture.presets[preset]
    rows = ", ".join(f"{preset} ({path.name})" for preset, path in fitting.items())
    reason = f"files fit {rows}" if rows else f"no file is a transformer of {spec.name}"
    raise UserError(
        f"--comfyui: {reason}; set {argument('model.preset')} to one of "
        f"{', '.join(fitting or spec.architecture.presets)}, or {argument('model.base')}"
    )


def _is_transformer(spec: ModelSpec, arch: Any, path: Path) -> bool:
    shapes = parameters_of(spec.architecture.build, arch)
    with suppress(UserError):
        return fits_shapes(open_weights(path), spec.architecture.names, shapes)
    return False


def _encoders_among(paths: Sequence[Path], spec: ModelSpec, arch: Any, key: str) -> list[Path]:
    """The files with which a plan has the layers that it has with the published encoder."""
    encoders = list[Path]()
    with suppress(UserError):
        published = _encoder(spec, arch, key, ModelPaths())
        for path in paths if published else ():
            of_file: dict[str, Any] = {key: str(path)}
            with suppress(UserError):
                if _encoder(spec, arch, key, ModelPaths(**of_file)) == published:
                    encoders.append(path)
    return encoders


def _encoder(spec: ModelSpec, arch: Any, key: str, paths: ModelPaths) -> Shapes:
    """Names and shapes of a planned encoder; empty if plans know none."""
    return {
        name: tuple(tensor.shape)
        for model in spec.auxiliary.models(arch, paths)
        if model.name == _PLANNED_AS[key]
        for name, tensor in model.build(torch.bfloat16).state_dict().items()
    }


def _by_name(spec: ModelSpec, preset: str, arch: Any, paths: list[Path]) -> list[Path]:
    """Without files that are called another preset or a distilled model, and of several those that
    are called like the preset: all may have the same shapes. A distilled model has to be called
    one."""
    paths = [path for path in paths if not distilled_by_name(spec, arch, path.name)]
    words = _words(Path(preset))
    # Files of experts are called by their part, and by the size of a model that has no experts.
    named = preset and not spec.architecture.experts(arch)
    others = [_words(Path(name)) for name in spec.architecture.presets if named]
    others = [other for other in others if not other <= words]
    paths = [path for path in paths if not any(other <= _words(path) for other in others)]
    if spec.training.advice(arch):
        return [path for path in paths if words <= _words(path)]
    return _narrowed(paths, lambda path: words <= _words(path)) if preset else paths


def _narrowed(paths: list[Path], is_better: Callable[[Path], bool]) -> list[Path]:
    return [path for path in paths if is_better(path)] or paths


def _is_called(spec: ModelSpec, path: Path) -> bool:
    """Whether a file is called after the family."""
    return spec.name in _letters(path)


def _vae_kind(spec: ModelSpec, arch: Any) -> str:
    """The model that the VAE's class is called after, in lower case; empty if after none."""
    models = spec.auxiliary.models(arch, ModelPaths())
    built = (m.build(torch.bfloat16) for m in models if m.name == _PLANNED_AS["vae"])
    return "".join(type(vae).__name__.removeprefix("AutoencoderKL").lower() for vae in built)


def _letters(path: Path) -> str:
    return re.sub(r"[^a-z0-9]", "", path.name.lower())


def _words(path: Path) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", path.name.lower()))


def _has_8_bits(path: Path) -> bool:
    return any(stored.dtype.itemsize == 1 for stored in open_weights(path).tensors.values())
