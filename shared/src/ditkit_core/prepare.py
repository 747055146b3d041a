"""From files to a model that is ready to train, in one written order.

Build on `meta`; match every name and shape; inject adapters on `meta`; stream the base, with what is merged into it, to
its devices and dtypes; initialise the adapters. Nothing is allocated twice, and nothing later may move or cast the model.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core.adapter_files import (
    AdapterFile,
    BaseConfig,
    config_from_file,
    merge_into,
    open_adapter,
    parse_merge,
    start_from,
)
from ditkit_core.adapters import AdapterConfig, initialise, inject, trainable_parameters
from ditkit_core.components import Components
from ditkit_core.errors import UserError
from ditkit_core.model import ModelSpec, Part
from ditkit_core.precision import Precision
from ditkit_core.safetensors_file import SafetensorsSource
from ditkit_core.weights import Advice, fits_shapes, load_into, match


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model with its weights, ready for the loop."""

    model: Any
    """The StagedModel."""
    arch: Any
    preset: str
    """Its name; empty if the architecture was read from a config.json and is none of the presets."""
    adapter: AdapterConfig
    """As configured, with what an `adapter.init` file decided."""
    trainable: dict[str, nn.Parameter]
    """What is trained, by canonical name."""
    source: SafetensorsSource
    """The base's files."""
    config_json: Path | None
    """The transformer's config.json, if it has one."""


@dataclass(frozen=True, kw_only=True)
class Unloaded:
    """A model on `meta` whose files are known to fit, with its adapters in place: nothing large was read yet."""

    spec: ModelSpec
    model: Any
    arch: Any
    preset: str
    adapter: AdapterConfig
    precision: Precision
    source: SafetensorsSource
    mapping: Mapping[str, tuple[Part, ...]]
    """Parameter name to the parts of the files' tensors that it is."""
    merged: list[tuple[AdapterFile, float]]
    start: Callable[[str], Mapping[str, Tensor]] | None
    """First values of a module's adapter, if a file gives them."""


def build(
    spec: ModelSpec,
    components: Components,
    adapter: AdapterConfig,
    base: BaseConfig,
    *,
    precision: Precision,
    say: Callable[[str], None] = lambda line: None,
) -> Unloaded:
    """Build the model on `meta` and check it against its files: seconds, before the hours that encoding may take.

    Args:
        spec: The model's family.
        components: Where the transformer lies, and its preset.
        adapter: What to train.
        base: What to merge into the base.
        precision: The dtypes.
        say: Told, in one line, whatever was decided by a file.

    Raises:
        UserError: If a file is missing, damaged, or does not fit the model or the configuration.
    """
    source = SafetensorsSource.open(components.locate("transformer"))
    preset, arch = choose_arch(spec, components.preset, source)
    model = build_on_meta(spec, arch, precision)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    advice = None if components.preset else _advice(source)
    mapping = match(
        source, spec.names, shapes, advice=advice
    )  # before anything slow: peft alone takes seconds to import
    linears = {name: tuple(m.weight.shape) for name, m in model.named_modules() if isinstance(m, nn.Linear)}

    def open_file(file: Path) -> AdapterFile:
        return open_adapter(file, spec.names, linears)

    merged = [(open_file(file), strength) for file, strength in map(parse_merge, base.merge)]
    start = None
    if adapter.init:
        if adapter.method == "full":
            raise UserError(
                f"adapter.init = {adapter.init} needs adapter.method = 'lora'; for a full fine-tune add it to base.merge"
            )
        start = open_file(Path(adapter.init).expanduser())
        adapter, line = config_from_file(adapter, start)
        say(line)
    adapted = inject(model, adapter, spec.adapter_targets)
    for file, strength in merged:
        say(f"base.merge: {len(file.modules)} modules of {file.source.path} at strength {strength:g}")
    return Unloaded(
        spec=spec, model=model, arch=arch, preset=preset, adapter=adapter, precision=precision, source=source,
        mapping=mapping, merged=merged, start=start_from(start, adapted) if start else None,
    )  # fmt: skip


def check_item(spec: ModelSpec, model: Any, item: Mapping[str, Tensor]) -> None:
    """Run the embedding on the outline of an encoded sample: encoders of another model show here, before weights are read.

    Args:
        spec: The model's family.
        model: The model on `meta`.
        item: A training item on `meta`.

    Raises:
        UserError: If the model cannot take it.
    """
    try:
        with torch.no_grad():
            sigma = torch.zeros(1, device="meta")
            model.embed(spec.make_inputs([item["latents"]], sigma, [item], 1.0))
    except RuntimeError as error:
        found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in item.items())
        raise UserError(
            f"the encoded samples do not fit the transformer ({found}: {str(error).splitlines()[0]}); "
            "set model.vae and model.text_encoder to those that belong to it"
        ) from error


def load(
    unloaded: Unloaded,
    *,
    device_of: Callable[[str], torch.device],
    seed: int,
    on_tensor: Callable[[str, nn.Module], None] | None = None,
) -> Prepared:
    """Give the model its weights.

    Args:
        unloaded: The model on `meta`.
        device_of: Where a parameter or the adapter of a module goes, by its name; those of `spec.keep_fp32` in fp32, the
            others in the matmuls' dtype.
        seed: The run's seed, for the adapters' first values.
        on_tensor: Called with the name and module of each parameter of the base once it is there.

    Raises:
        UserError: If a file is damaged.
    """
    spec, model, source = unloaded.spec, unloaded.model, unloaded.source
    load_into(
        model,
        source,
        unloaded.mapping,
        device_of=device_of,
        dtype_of=lambda name: torch.float32 if spec.keep_fp32(name) else unloaded.precision.matmul,
        edits=merge_into(unloaded.merged),
        on_tensor=on_tensor,
    )
    initialise(model, seed, device_of=device_of, start=unloaded.start)
    on_meta = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    assert not on_meta, f"never given a value: {on_meta}"
    return Prepared(
        model=model, arch=unloaded.arch, preset=unloaded.preset, adapter=unloaded.adapter,
        trainable=trainable_parameters(model), source=source, config_json=_config_json(source.path),
    )  # fmt: skip


def build_on_meta(spec: ModelSpec, arch: Any, precision: Precision) -> Any:
    """The model without memory."""
    with torch.device("meta"):
        return spec.build(arch, precision)


def choose_arch(spec: ModelSpec, preset: str, source: SafetensorsSource) -> tuple[str, Any]:
    """The architecture by its name, by the config.json beside the weights, or by the preset whose shapes they have.

    Returns:
        The preset's name, empty if the architecture is none, and the architecture.

    Raises:
        UserError: If the name is unknown, or nothing says which architecture this is.
    """
    if preset:
        if preset not in spec.presets:
            raise UserError(f"model.preset = {preset!r} is unknown; choose one of {', '.join(spec.presets)}")
        return preset, spec.presets[preset]
    path = _config_json(source.path)
    if path is not None and spec.infer_arch is not None:
        try:
            arch = spec.infer_arch(json.loads(path.read_text(encoding="utf-8")), _pipeline_index(source.path))
            build_on_meta(spec, arch, Precision())  # where a value of another kind shows
        except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise UserError(
                f"{path} does not describe this model ({error!r}); set model.preset to one of {', '.join(spec.presets)}"
            ) from error
        return next((name for name, known in spec.presets.items() if known == arch), ""), arch
    fitting = [name for name, arch in spec.presets.items() if fits_shapes(source, spec.names, _shapes(spec, arch))]
    if len(fitting) != 1:
        what = f"{' and '.join(fitting)} fit" if fitting else "no preset fits"
        raise UserError(
            f"{what} the weights in {source.path}; set model.preset to one of {', '.join(fitting or spec.presets)}"
        )
    return fitting[0], spec.presets[fitting[0]]


def _advice(source: SafetensorsSource) -> Advice:
    """What to say of weights that do not fit what no preset describes."""
    path = _config_json(source.path)
    remedy = "take both from one download, or set model.preset"
    return Advice(
        described_by=str(path.name if path else "the preset"), if_unknown=remedy, if_depth_differs=remedy,
        if_shapes_differ=remedy,
    )  # fmt: skip


def _shapes(spec: ModelSpec, arch: Any) -> Mapping[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in build_on_meta(spec, arch, Precision()).state_dict().items()}


def _pipeline_index(transformer: Path) -> dict[str, Any]:
    """The `model_index.json` of the pipeline that a transformer's folder is part of."""
    try:
        index = json.loads((transformer.parent / "model_index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return index if isinstance(index, dict) else {}


def _config_json(path: Path) -> Path | None:
    file = (path if path.is_dir() else path.parent) / "config.json"
    return file if file.is_file() else None
