"""Adapter files in every name form that we read.

A file's modules are found by writing down what each Linear layer of the model is called in each form, and looking the
file's names up in that. Nothing is guessed from a name: kohya's `blocks_0_self_attn_q` says not which of its
underscores were dots, the model's own names do.

| form | key |
|---|---|
| official (ComfyUI) | `diffusion_model.` + official name + `.lora_A.weight` or `.lora_down.weight`, perhaps `.alpha` |
| diffusers | `transformer.` + diffusers name + `.lora_A.weight`, alpha in the header |
| kohya, musubi | `lora_unet_` + official name with underscores + `.lora_down.weight`, `.alpha` |
| DiffSynth | official name + `.lora_A.default.weight` |

The scale alpha / rank is a number of the module's here, never of the file's: `scale`.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ditkit_core.adapters import AdapterConfig
from ditkit_core.errors import UserError
from ditkit_core.model import StateDictNames
from ditkit_core.safetensors_file import SafetensorsSource
from ditkit_core.settings import setting
from ditkit_core.weights import first_ten

# The header key and the naming are diffusers' (`LORA_ADAPTER_METADATA_KEY` in its loaders/lora_base.py).
DIFFUSERS_METADATA = "lora_adapter_metadata"
# Beside the model's own prefixes. peft's `base_model.model.` is left out: its alpha is in another file than the weights.
_PREFIXES = ("transformer.", "diffusion_model.", "lora_unet__", "lora_unet_", "")

_PARTS = {
    "down": re.compile(r"\.(lora_A|lora_down)(\.[\w-]+)?\.weight$"),
    "up": re.compile(r"\.(lora_B|lora_up)(\.[\w-]+)?\.weight$"),
    "alpha": re.compile(r"\.alpha$"),
    "magnitude": re.compile(r"\.(dora_scale|lora_magnitude_vector(\.[\w-]+)?(\.weight)?)$"),
}


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """The `[base]` section: what the frozen base is made of besides its weights."""

    merge: tuple[str, ...] = setting((), resume="refused")
    """LoRA files that are added to the base before anything else, each as `FILE` or `FILE@strength`."""


@dataclass(frozen=True)
class FileModule:
    """One module's adapter in a file."""

    keys: Mapping[str, str]
    """The file's key by part: `down`, `up`, perhaps `alpha`, `magnitude`."""
    rank: int
    scale: float
    """What up·down is multiplied with."""


@dataclass(frozen=True)
class AdapterFile:
    """An adapter file, understood but not yet read."""

    source: SafetensorsSource
    modules: Mapping[str, FileModule]
    """By our name of the module."""

    def read(self, module: str, part: str) -> Tensor:
        """`down` [rank, in], `up` [out, rank] or `magnitude` [out] of a module, in fp32."""
        tensor = self.source.read(self.modules[module].keys[part]).float()
        return tensor.flatten() if part == "magnitude" else tensor.flatten(1)

    def change(self, module: str, weight: Tensor, strength: float) -> None:
        """Merge the adapter at a strength into the fp32 weight [out, in] of a module, in place."""
        found = self.modules[module]
        up, down = self.read(module, "up"), self.read(module, "down")
        if "magnitude" not in found.keys:
            weight.addmm_(up, down, alpha=strength * found.scale)
            return
        merged = torch.addmm(weight, up, down, alpha=found.scale)
        merged *= (self.read(module, "magnitude") / torch.linalg.vector_norm(merged, dim=1))[:, None]
        weight.lerp_(merged, strength)


def open_adapter(path: Path, names: StateDictNames, modules: Mapping[str, tuple[int, ...]]) -> AdapterFile:
    """Understand an adapter file: find each of its keys in the model, with rank and scale.

    Args:
        path: The file.
        names: The model's names.
        modules: Weight shape [out, in] of the model's Linear layers, by our name.

    Raises:
        UserError: If the file is none, holds no adapter, or has a key that does not fit the model; the first ten.
    """
    source = SafetensorsSource.open(path)
    if not source.tensors:
        raise UserError(f"{path} is empty; name a LoRA file")
    known = _names_in_every_form(names, modules)
    keys: dict[str, dict[str, str]] = {}
    unmatched = []
    for key in source.tensors:
        module, part = _parse(key, names, known)
        if module is None or part is None or part in keys.get(module, {}):
            unmatched.append(key)
        else:
            keys.setdefault(module, {})[part] = key
    if unmatched:
        raise UserError(
            f"{path}: {len(unmatched)} of {len(source.tensors)} keys fit no adapter of this model: "
            f"{first_ten(unmatched)}; name a LoRA of this model"
        )
    header = _Header.of(source)
    found = {
        module: _understand(source, module, keys[module], modules[module], header, names)
        for module in modules
        if module in keys
    }
    return AdapterFile(source, found)


def _names_in_every_form(names: StateDictNames, modules: Collection[str]) -> dict[str, str]:
    """Our module name by its name in every form, dotted and with underscores."""
    known: dict[str, str] = {}
    for module in modules:
        forms = [module] + [form(f"{module}.weight").removesuffix(".weight") for form in names.from_native.values()]
        for name in {*forms, *(form.replace(".", "_") for form in forms)}:
            assert known.setdefault(name, module) == module, f"{name} is {known[name]} and {module}"
    return known


def _parse(key: str, names: StateDictNames, known: Mapping[str, str]) -> tuple[str | None, str | None]:
    for part, pattern in _PARTS.items():
        if match := pattern.search(key):
            name = key[: match.start()]
            for prefix in (*names.prefixes, *_PREFIXES):
                if name.startswith(prefix) and (module := known.get(name.removeprefix(prefix))):
                    return module, part
    return None, None


@dataclass(frozen=True)
class _Header:
    """What a header says of alpha: peft's configuration as diffusers writes it."""

    alpha: float | None = None
    patterns: tuple[tuple[re.Pattern[str], float], ...] = ()
    """Alpha of the modules whose names (in the file's form) a pattern fits."""
    use_rslora: bool = False

    @classmethod
    def of(cls, source: SafetensorsSource) -> "_Header":
        raw = source.metadata.get(DIFFUSERS_METADATA)
        if raw is None:
            return cls()
        try:
            config = {key.removeprefix("transformer."): value for key, value in json.loads(raw).items()}
            patterns = (config.get("alpha_pattern") or {}).items()
            return cls(
                float(config["lora_alpha"]) if "lora_alpha" in config else None,
                tuple((re.compile(rf"(.*\.)?({pattern})"), float(alpha)) for pattern, alpha in patterns),
                bool(config.get("use_rslora")),
            )
        except (ValueError, TypeError, AttributeError, re.error) as error:
            raise UserError(
                f"{source.path}: the header's {DIFFUSERS_METADATA} cannot be read ({error}); write the file anew"
            ) from error

    def scale(self, rank: int, module_names: Collection[str]) -> float:
        fitting = [alpha for pattern, alpha in self.patterns if any(map(pattern.fullmatch, module_names))]
        alpha = fitting[-1] if fitting else rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _understand(
    source: SafetensorsSource,
    module: str,
    keys: Mapping[str, str],
    shape: tuple[int, ...],
    header: _Header,
    names: StateDictNames,
) -> FileModule:
    for part in ("down", "up"):
        if part not in keys:
            there = ", ".join(keys.values())
            raise UserError(f"{source.path} has {there} but no {part} matrix for {module}; fetch the file again")
    shapes = {part: source.tensors[key].shape for part, key in keys.items()}
    down, up = shapes["down"], shapes["up"]
    rank = down[0] if down else 0
    fits = rank > 0 and (*up[:1], math.prod(up[1:]), math.prod(down[1:])) == (shape[0], rank, shape[1])
    if not fits or shapes.get("alpha", ()) not in ((), (1,)):
        raise UserError(
            f"{source.path}: {keys['down']} {list(down)} and {keys['up']} {list(up)} do not fit the layer's "
            f"{list(shape)}; name a LoRA of this model"
        )
    if "magnitude" in keys and shapes["magnitude"] not in ((shape[0],), (shape[0], 1)):
        raise UserError(
            f"{source.path}: {keys['magnitude']} is not one norm per output of the layer; "
            "merge that file with the program that made it"
        )
    if "alpha" in keys:
        scale = float(source.read(keys["alpha"])) / rank
    else:
        forms = names.from_native.values()
        scale = header.scale(rank, [form(f"{module}.weight").removesuffix(".weight") for form in forms])
    return FileModule(keys, rank, scale)


MAX_STRENGTH = 100
"""No adapter means anything beyond; more is a slip of the hand."""


def parse_merge(entry: str) -> tuple[Path, float]:
    """`FILE@strength` or `FILE`, whose strength is 1.

    Raises:
        UserError: If what follows the last @ is no number, and the whole is no file.
    """
    file, at, strength = entry.rpartition("@")
    if not at or Path(entry).is_file():
        return Path(entry).expanduser(), 1.0
    try:
        value = float(strength)
    except ValueError as error:
        raise UserError(f"base.merge: {entry!r} is not FILE@strength; write a number after the @") from error
    if not abs(value) <= MAX_STRENGTH:
        raise UserError(f"base.merge: the strength of {entry!r} is not between -{MAX_STRENGTH} and {MAX_STRENGTH}")
    return Path(file).expanduser(), value


def merge_into(files: Sequence[tuple[AdapterFile, float]]) -> dict[str, Callable[[Tensor], None]]:
    """The `edits` for `load_into` that add adapter files, each at a strength, to the base's weights."""
    modules = {module for file, _ in files for module in file.modules}

    def edit(module: str) -> Callable[[Tensor], None]:
        def change(weight: Tensor) -> None:
            for file, strength in files:
                if module in file.modules:
                    file.change(module, weight, strength)

        return change

    return {f"{module}.weight": edit(module) for module in modules}


def config_from_file(config: AdapterConfig, file: AdapterFile) -> tuple[AdapterConfig, str]:
    """The configuration with rank, alpha, DoRA and (if none are named) targets of the file that it starts from.

    Returns:
        The configuration, and one line that says what the file decided.

    Raises:
        UserError: If the file's modules differ in rank, in scale, or in whether they have a DoRA magnitude.
    """
    shapes = {(found.rank, found.scale, "magnitude" in found.keys) for found in file.modules.values()}
    if len(shapes) > 1:
        ranks = ", ".join(
            f"rank {rank} scale {scale:g}{' with DoRA' * dora}" for rank, scale, dora in sorted(shapes)[:10]
        )
        raise UserError(
            f"adapter.init = {file.source.path} mixes {ranks}; start from a file of one rank and alpha, "
            "or merge it with base.merge"
        )
    rank, scale, dora = shapes.pop()
    if scale <= 0:  # alpha = 0 means something else in our configuration
        raise UserError(f"adapter.init = {file.source.path} has scale {scale:g}, so that nothing could be trained")
    alpha = scale * (math.sqrt(rank) if config.use_rslora else rank)
    started = replace(
        config, rank=rank, alpha=alpha, use_dora=config.use_dora or dora, targets=config.targets or tuple(file.modules)
    )
    said = f"adapter.init: rank {rank}, alpha {alpha:g} and {len(file.modules)} modules from {file.source.path}"
    return started, said


def start_from(file: AdapterFile, adapted: Collection[str]) -> Callable[[str], dict[str, Tensor]]:
    """A `start` for `adapters.initialise` that reads a file; modules that it lacks start as new ones.

    Raises:
        UserError: If the file has a module that has no adapter.
    """
    if dropped := [module for module in file.modules if module not in adapted]:
        raise UserError(
            f"adapter.init = {file.source.path} has modules that adapter.targets leaves out: {first_ten(dropped)}; "
            "leave adapter.targets empty to take the file's"
        )
    parts = {"down": "lora_A.weight", "up": "lora_B.weight", "magnitude": "lora_magnitude_vector.weight"}

    def start(module: str) -> dict[str, Tensor]:
        if module not in file.modules:
            return {}
        return {name: file.read(module, part) for part, name in parts.items() if part in file.modules[module].keys}

    return start
