"""From files to a model that is ready to train, in a fixed order.

Build on `meta`; match every name and shape; inject adapters on `meta`; stream the base, with merged adapters, to
its devices and dtypes; initialise the adapters. Nothing is allocated twice, and nothing later may move or cast the model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ditkit_core.adapters.assistant import load_assistant, put_next_to_doras
from ditkit_core.adapters.config import AdapterConfig, BaseConfig
from ditkit_core.adapters.files.differences import described
from ditkit_core.adapters.files.identify import layers_of, parameters_of, presets_of
from ditkit_core.adapters.files.merge import merge_into, parse_merge
from ditkit_core.adapters.files.read import AdapterFile, config_from_file, initial_adapter, open_adapter
from ditkit_core.adapters.inject import canonical_name, initialise, inject, is_adapter_name, trainable_parameters
from ditkit_core.config.nearest import nearest_word
from ditkit_core.engine.block_swap import BlockSwap, base_device_map
from ditkit_core.engine.devices import make_current
from ditkit_core.engine.placement import Placement
from ditkit_core.errors import UserError
from ditkit_core.io.files import local_path, read_json_object, readable
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.other_models import looks_like, wrong_config
from ditkit_core.models.paths import ModelPaths, check_preset, is_hub_id
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import StagedModel
from ditkit_core.models.spec import ModelSpec, build_on_meta
from ditkit_core.models.state_dict import TensorSlice
from ditkit_core.nn.quantized_linear import quantized_weights
from ditkit_core.run.quantized_cache import find_cache
from ditkit_core.weights.fp8_scaled import num_packed, num_scaled, open_weights
from ditkit_core.weights.frozen import at_most_parameters
from ditkit_core.weights.load import Advice, StoredParameters, fits_shapes, load_into, match
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
)

if TYPE_CHECKING:
    from ditkit_core.engine.sharding.division import Division
    from ditkit_core.engine.sharding.shards import Shards

_MAX_PARAMETERS = 20_000  # of a foreign config.json; the largest transformers that are known have about 2,000 tensors


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with its weights, ready for the loop."""

    model: StagedModel
    built: "MetaModel"
    """What it was loaded from. `built.stored` reads a base parameter again, before it was rounded or quantized for the model."""
    trainable: dict[str, nn.Parameter] = field(repr=False)
    """The trained parameters, by canonical name."""
    config_json: Path | None
    """The transformer's config.json, if it has one."""
    streamer: BlockSwap | None = None
    """Streams weights through the devices, for the engine; None if nothing is streamed."""

    shards: "Shards | None" = None
    """Divides the weights over ranks; None if this one has all."""

    def weights(self) -> list[Tensor]:
        """All parameters and buffers: of those that ranks divide, the rows of this one; of streamed blocks nothing is on a device."""
        if self.streamer is not None:
            # A forward leaves blocks there. Whoever empties their memory and fills it again does so on the device's own stream, which would
            # later give it to other work while the streamer's stream still copies from it.
            self.streamer.host_changed()
        found = [*self.model.parameters(), *self.model.buffers()]
        return found if self.shards is None else self.shards.own(found)

    def readable(self) -> AbstractContextManager[None]:
        """Inside the block every weight can be read, on the host or its device; the model may be unable to run meanwhile.

        Where ranks divide the weights, only the trained ones can be.
        """
        if self.shards is not None:
            return self.shards.readable()
        return nullcontext() if self.streamer is None else self.streamer.on_host()

    def whole_in(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside this block, which is inside `readable`, all weights of one module can be read, also where ranks divide them."""
        return nullcontext() if self.shards is None else self.shards.whole_in(module)

    @contextmanager
    def readable_one_by_one(self) -> Iterator[Callable[[str], Tensor]]:
        """Inside the block adapters can be read, and base parameters with the function, by name; what is not on `meta` and not quantized can be
        read in the model as well. Of weights that ranks divide, no host has more than one whole."""
        original = self.built.stored.read
        if self.shards is None:
            with self.readable():
                yield original
            return
        coarse = quantized_weights(self.model)
        paths = {canonical_name(path): path for path, _ in self.model.named_parameters()}
        with self.shards.one_by_one(is_adapter_name) as gathered:
            yield lambda name: original(name) if name in coarse else gathered(paths[name])


@dataclass(frozen=True, kw_only=True)
class MetaModel:
    """A model on `meta` whose files are known to fit, with its adapters injected. No weights were read yet."""

    spec: ModelSpec
    model: StagedModel
    arch: Any
    preset: str
    """Name of the architecture; empty if a config.json describes it and it matches no preset."""
    adapter: AdapterConfig
    """As configured, with the settings that an `adapter.init` file decided."""
    precision: Precision
    stored: StoredParameters
    """The base's parameters in its files, with merged adapters."""
    merged: list[tuple[AdapterFile, float]]
    assistant: tuple[AdapterFile, float] | None
    """The assistant of the layers that it is not merged into, because their DoRA is trained."""
    start: Callable[[str], Mapping[str, Tensor]] | None
    """Initial values of a module's adapter, if a file contains them."""
    base: BaseConfig
    merge_key: str
    """As `BaseConfig.merge_key`, for errors."""


def build_meta_model(
    spec: ModelSpec,
    components: ModelPaths,
    adapter: AdapterConfig,
    base: BaseConfig,
    *,
    precision: Precision,
    component: str = "transformer",
    keeps_codes: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> MetaModel:
    """Build the model on `meta` and check it against its files: seconds, before the hours that encoding may take.

    Args:
        components: Path of the transformer, and its preset.
        adapter: What to train.
        base: What to merge into the base.
        component: The one to load, where a model has several transformers.
        keeps_codes: Whether matrices that a file has in scaled 8 bits stay in them.
        say: Called with one line for each setting that a file decided.

    Raises:
        UserError: If a file is missing, damaged, or does not fit the model or the configuration.
    """
    check_quantize(base.quantize, adapter.method)
    if num_scaled(source := open_weights(components.locate(component))) or num_packed(source):
        check_scaled(str(source.path), adapter.method)
    preset, arch = choose_arch(spec, components, source)
    model, files = build_on_meta(spec, arch, precision), base.files(component)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    # All files are opened before anything slow, so that a wrong one fails at once: importing peft alone takes seconds.
    mapping = match(source, spec.architecture.names, shapes, advice=None if components.preset else _advice(source))
    open_file = partial(open_adapter, names=spec.architecture.names, modules=layers_of(spec.architecture.build, arch))
    # An assistant is taken out again for samples, which differences of whole parameters cannot be.
    merged = _opened(files, partial(open_file, parameters=shapes), {base.assistant_key(component): open_file})
    adapter, start = _started_from_file(adapter, open_file, base.merge_key(component), say)
    if keeps_codes:
        _quantize_blocks(spec, model, base.quantize, source, mapping, precision, merged, say=say)
    if base.compute != "dtype":
        say(compute_in_8_bits(model, base.compute))
    # after quantization, so that the adapters are added to the layers that the model ends up with
    adapted = inject(model, adapter, spec.adapters.targets)
    for (key, _), (file, strength) in zip(files, merged, strict=True):
        say(f"{key}: {_described_merge(file)} at strength {strength:g}")
    assistant = put_next_to_doras(model, merged, base.assistant_key(component) if adapter.use_dora else "")
    return MetaModel(
        spec=spec,
        model=model,
        arch=arch,
        preset=preset,
        adapter=adapter,
        precision=precision,
        stored=StoredParameters(source=source, mapping=mapping, shapes=shapes, edits=merge_into(merged)),
        merged=merged,
        assistant=assistant,
        start=initial_adapter(start, adapted) if start else None,
        base=base,
        merge_key=base.merge_key(component),
    )


def _opened(
    files: Sequence[tuple[str, str]],
    opens: Callable[[Path], AdapterFile],
    others: Mapping[str, Callable[[Path], AdapterFile]],
) -> list[tuple[AdapterFile, float]]:
    """The files to merge with their strengths; some keys are opened in another way."""
    parsed = [(key, *parse_merge(entry, key)) for key, entry in files]
    return [(others.get(key, opens)(file), strength) for key, file, strength in parsed]


def _described_merge(file: AdapterFile) -> str:
    also = f" and differences of {described(list(file.differences))}" if file.differences else ""
    return f"{len(file.modules)} modules{also} of {file.source.path}"


def _started_from_file(
    adapter: AdapterConfig, open_file: Callable[[Path], AdapterFile], merge_key: str, say: Callable[[str], None]
) -> tuple[AdapterConfig, AdapterFile | None]:
    """The section with the values of the file that `adapter.init` names, and the file; without one the section as it is."""
    if not adapter.init:
        return adapter, None
    if adapter.method == "full":
        raise UserError(
            f"adapter.init = {adapter.init} needs adapter.method = 'lora'; for a full fine-tune add it to {merge_key}"
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
    """Prepare the blocks' matrices for the 8 or 4 bits that the file or `base.quantize` asks for."""
    if kind in ("none", "fp8") and num_scaled(source):
        say(_hold_as_stored(spec, model, source, mapping, precision, merges=bool(merge_into(merged))))
    if packed := num_packed(source):
        then = (
            "rounded once more"
            if kind != "none"
            else "kept in model.dtype; base.quantize keeps them small, and rounds them once more"
        )
        say(f"{source.path}: {packed} matrices are in int8, mxfp8 or nvfp4, and are unpacked and {then}")
    if kind == "none":
        return
    if kind != "fp8" and num_scaled(source):
        say(f"{source.path} is in scaled 8 bits, and rounded once more; a bf16 file or base.quantize = fp8 loses less")
    # With fp8, a file in scaled 8 bits may have left no linear layer to convert.
    if any(not spec.precision.keep_fp32(f"{name}.weight") for name in linears_of_blocks(model)):
        say(_quantize(spec, model, kind, precision))


def load_weights(
    unloaded: MetaModel,
    *,
    placement: Placement,
    seed: int,
    division: "Division | None" = None,
    say: Callable[[str], None] = lambda line: None,
) -> LoadedModel:
    """Load the weights, initialise the adapters, and set up streaming. From now on the first GPU is the process's current one.

    Args:
        placement: Which device runs what; parameters of `spec.keep_fp32` go there in fp32, the others in the matmuls' dtype.
        seed: The run's seed, for the adapters' first values.
        division: Of the rows of the model over ranks, each of which reads its own.
        say: Called with one line if a quantized base was read from the cache or written to it.

    Raises:
        UserError: If a file is damaged.
    """
    make_current((placement.embed, *placement.blocks))
    model, stored, base, device_of = unloaded.model, unloaded.stored, unloaded.base, placement.device_of(unloaded.model)
    dtype_of, home_of = loaded_dtype(unloaded.spec, unloaded.precision), base_device_map(model, placement)
    cache = find_cache(base.quantized_cache, base.quantize, model, stored.source, unloaded.merged, dtype_of=dtype_of)
    read = partial(load_into, model, stored.source, stored.mapping, edits=stored.edits, division=division)
    read = partial(read, device_of=home_of, dtype_of=dtype_of)
    if cache is None:
        read()
    else:
        cache.load(model, read, device_of=home_of, dtype_of=dtype_of, division=division, say=say)
    initialise(model, seed, device_of=device_of, start=unloaded.start, division=division)
    load_assistant(model, unloaded.assistant, device_of=home_of, put=division.put_whole if division else None)
    on_meta = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    assert not on_meta, f"never given a value: {on_meta}"
    # Last: from here on, weights that are streamed cannot be read from the model except inside of `readable`.
    streamer = BlockSwap(model, placement, trained=unloaded.adapter.method == "full") if placement.streamed else None
    return LoadedModel(
        model=model,
        built=unloaded,
        trainable=trainable_parameters(model),
        config_json=_config_json(stored.source.path),
        streamer=streamer,
    )


def loaded_dtype(spec: ModelSpec, precision: Precision) -> Callable[[str], torch.dtype]:
    """The dtype of the base's parameters that are not quantized, by name."""
    return lambda name: torch.float32 if spec.precision.keep_fp32(name) else precision.matmul


def _quantize(spec: ModelSpec, model: StagedModel, kind: str, precision: Precision) -> str:
    """Have the blocks' matrices quantized when they are loaded; returns one line about it."""
    dtype_of, num_blocks = loaded_dtype(spec, precision), len(model.blocks())
    before = num_bytes(model, dtype_of)
    converted = convert(model, kind, spec.precision.keep_fp32)
    return describe_quantized(kind, converted, num_blocks, before, num_bytes(model, dtype_of))


def _hold_as_stored(
    spec: ModelSpec,
    model: StagedModel,
    source: SafetensorsSource,
    mapping: Mapping[str, tuple[TensorSlice, ...]],
    precision: Precision,
    *,
    merges: bool,
) -> str:
    """Keep the blocks' matrices that a file has in scaled 8 bits as they are; returns one line about it."""
    dtype_of = loaded_dtype(spec, precision)
    before = num_bytes(model, dtype_of)
    layers = [name for name in linears_of_blocks(model) if not spec.precision.keep_fp32(f"{name}.weight")]
    held = hold_as_stored(model, source, mapping, layers=layers)
    line = (
        f"{source.path}: {len(held)} matrices stay in its own scaled 8 bits; "
        f"the base takes {quantized_bytes(num_bytes(model, dtype_of))} instead of {quantized_bytes(before)}"
    )
    return line + "; those that a merged adapter changes are rounded to 8 bits once more" * merges


def choose_arch(spec: ModelSpec, components: ModelPaths, source: SafetensorsSource) -> tuple[str, Any]:
    """The architecture by its name, by the config.json next to the weights, or by the preset with the same shapes.

    Shapes decide if the config.json is not in diffusers' format, since some authors have formats of their own. Where no single preset
    has them, the config.json of the base's transformer counts, if it has these shapes.

    Returns:
        The preset's name, empty if the architecture matches no preset, and the architecture.

    Raises:
        UserError: If the name is unknown, or nothing says which architecture this is.
    """
    preset = components.preset
    if preset:
        check_preset(preset, spec.architecture.presets)
        return preset, spec.architecture.presets[preset]
    path = _config_json(source.path)
    if path is not None and (arch := _described(spec, path)) is not None:
        return next((name for name, known in spec.architecture.presets.items() if known == arch), ""), arch
    fitting = list(presets_of(source, spec)) if source.tensors else []
    if len(fitting) != 1:
        folder = replace(components, transformer="").here("transformer")
        path = None if folder is None else _config_json(folder)
        arch = None if path is None else _described(spec, path)
        if arch is not None and fits_shapes(
            source, spec.architecture.names, parameters_of(spec.architecture.build, arch)
        ):
            return "", arch
        likeness, remedy = looks_like(() if fitting else source.tensors, spec.architecture.names.others)
        what = f"{' and '.join(fitting)} fit" if fitting else "no preset fits"
        remedy = remedy or f"set model.preset to one of {', '.join(fitting or spec.architecture.presets)}"
        raise UserError(f"{what} the weights in {source.path}{likeness}; {remedy}")
    return fitting[0], spec.architecture.presets[fitting[0]]


def _described(spec: ModelSpec, path: Path) -> Any:
    """The architecture that a config.json of unknown origin describes; None if it is not in diffusers' format."""
    if spec.architecture.infer_arch is None:
        return None
    remedy = f"set model.preset to one of {', '.join(spec.architecture.presets)}"
    config = read_json_object(path, remedy, "does not describe this model because it")
    try:
        arch = spec.architecture.infer_arch(config, _pipeline_index(path.parent))
        if arch is not None:  # values of a wrong type only fail when a model is built with them
            with at_most_parameters(_MAX_PARAMETERS):
                build_on_meta(spec, arch, Precision())
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError, RuntimeError) as error:
        wrong = wrong_config(config, error, spec.name, spec.architecture.names.others)
        raise UserError(f"{path} {wrong}{'' if ';' in wrong else f'; {remedy}'}") from error
    return arch


def arch_here(spec: ModelSpec, components: ModelPaths, *, fetch: bool = False) -> tuple[str, Any]:
    """The preset's name and the architecture, by its name or from local files.

    Args:
        components: Path of the transformer.
        fetch: Whether a missing config.json is downloaded from the hub; weights never are.

    Raises:
        UserError: If nothing says it.
    """
    if components.preset:
        # A preset decides by itself, so an empty source is enough.
        return choose_arch(spec, components, SafetensorsSource(Path(), {}, {}))
    path = components.here("transformer")
    named = components.transformer or components.base
    if path is None and is_hub_id(named) and (preset := spec.architecture.hub_presets.get(named)):
        return preset, spec.architecture.presets[preset]
    near = nearest_word(named, spec.architecture.hub_presets, 0.8) if is_hub_id(named) else ""
    meant = f"; did you mean {near}?" if near and near != named else ""
    try:
        path = path or (components.fetched_description("transformer") if fetch else None)
    except UserError as error:
        raise UserError(f"{error}{meant}") from error
    path = path or components.here("transformer_2")  # enough to train the second expert alone
    if path is None:
        raise UserError(
            f"{components.not_described()} model.preset to one of {', '.join(spec.architecture.presets)}{meant}"
        )
    described = _config_json(path) is not None and spec.architecture.infer_arch is not None
    # A config.json decides by itself, so the headers of the weights need not be read.
    source = SafetensorsSource(path, {}, {}) if described else open_weights(path)
    return choose_arch(spec, components, source)


def _advice(source: SafetensorsSource) -> Advice:
    """Remedies for the error of weights that do not fit their config.json."""
    path = _config_json(source.path)
    remedy = "take both from one download, or set model.preset"
    return Advice(
        described_by=str(path.name if path else "the preset"),
        if_unknown=remedy,
        if_depth_differs=remedy,
        if_shapes_differ=remedy,
    )


def _pipeline_index(transformer: Path) -> dict[str, Any]:
    """The `model_index.json` of the pipeline that a transformer's folder is part of; empty if there is none that can be read."""
    with suppress(UserError):
        return read_json_object(transformer.parent / "model_index.json")
    return {}


def _config_json(path: Path) -> Path | None:
    file = (path if path.is_dir() else path.parent) / "config.json"
    with readable(file):
        return file if file.is_file() else None
