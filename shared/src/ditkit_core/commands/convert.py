"""The export command on files: inspect, convert, reduce, merge, extract. None of these needs a
run."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ditkit_core.adapters.config import FP8_SCALED, ExportConfig
from ditkit_core.adapters.dora import in_norm_of
from ditkit_core.adapters.extract import extract
from ditkit_core.adapters.files.convert import (
    adapter_dtype,
    add_missing_modules,
    check_finite,
    derived_metadata,
    read_adapters,
    reduce_rank,
    write_converted,
)
from ditkit_core.adapters.files.differences import described, not_applied
from ditkit_core.adapters.files.entry import MAX_STRENGTH, parse_merge
from ditkit_core.adapters.files.export import export_merged, loaded_by, readers_of, whole_forms
from ditkit_core.adapters.files.identify import (
    FoundAdapter,
    Shapes,
    find_adapter,
    layers_of,
    parameters_of,
    presets_of,
)
from ditkit_core.adapters.files.inspect import inspect_file, inspection_text
from ditkit_core.adapters.files.merge import merge_into
from ditkit_core.adapters.files.read import with_differences
from ditkit_core.adapters.files.write import Scaled, check_form
from ditkit_core.adapters.inject import target_modules
from ditkit_core.commands.export import check_free, check_kind
from ditkit_core.commands.options import ExportOptions, parse_rank
from ditkit_core.config.nearest import path_remedy
from ditkit_core.errors import UserError
from ditkit_core.io.console import progress, say, warn
from ditkit_core.io.files import local_path
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.loading.architecture import choose_arch
from ditkit_core.models.adapter_formats import ADAPTER_FORMS
from ditkit_core.models.paths import ModelPaths, check_preset
from ditkit_core.models.precision import Precision, parse_dtype
from ditkit_core.models.spec import ModelSpec, build_on_meta
from ditkit_core.run.config import RunConfig
from ditkit_core.run.experts import named_after
from ditkit_core.run.publish import publish
from ditkit_core.weights.fp8_scaled import open_weights
from ditkit_core.weights.load import StoredParameters
from ditkit_core.weights.metadata import published_header


def convert_file(spec: ModelSpec, config: RunConfig, options: ExportOptions) -> None:
    """Do what the options ask for with a file."""
    if options.inspect:
        spec, base = _layers(spec, config, options)
        about = inspect_file(local_path(options.inspect), spec, part=options.part, base=base)
        say(json.dumps(about, indent=2) if options.json else inspection_text(about))
    elif options.extract:
        _extract(spec, config, options)
    elif options.publishes:
        publish(spec, [local_path(options.adapter)], options.hub)
    elif options.merge:
        _merge(spec, config, options)
    else:
        _convert(spec, config, options)


def _convert(spec: ModelSpec, config: RunConfig, options: ExportOptions) -> None:
    """An adapter file in another form, rank or dtype."""
    path, strength = parse_merge(options.adapter, "--adapter")
    if strength != 1:
        raise UserError(
            f"--adapter {options.adapter}: a strength is for --merge; a converted file has its "
            f"alpha"
        )
    spec, layers = _layers(spec, config, options)
    adapter = find_adapter(path, spec, part=options.part, layers=layers)
    if adapter.differences:
        raise not_applied(path, adapter.differences)
    if layers is not None:
        _check_fits(adapter, layers)
    # Some forms are only read (peft, OneTrainer …); their files are written in the form that most
    # programs read.
    form = options.to or (
        adapter.layout.form if adapter.layout.form in ADAPTER_FORMS else "official"
    )
    check_form(form, spec.architecture.names, use_dora=adapter.layout.use_dora)
    is_factored = adapter.layout.method in ("lokr", "loha")
    if is_factored and options.rank:
        raise UserError(
            f"--rank: {path} is a {adapter.layout.method}, whose rank is not that of its change; "
            f"merge it, then --extract"
        )
    rank, energy = parse_rank(options.rank) if options.rank else (None, 1.0)
    mark = (f"_rank{rank}" if rank else "_reduced") if options.rank else ""
    mark += f"_{options.to}" if options.to else ""
    out = _out(options.out, path, mark or f"_{options.dtype}")
    derivation = {"file": path.name, "form": form} | (
        {"rank": options.rank} if options.rank else {}
    )
    metadata = derived_metadata(
        published_header(RunConfig, adapter.file.source.metadata), **derivation
    )
    dtype = parse_dtype(options.dtype) if options.dtype else adapter_dtype(adapter)
    adapters = read_adapters(adapter.file)
    if layers is None and not adapter.presets:
        warn(f"{path} fits no preset of {spec.name}: names are converted, sizes are not checked")
    if is_factored:
        _write(adapters, spec, out, form=form, dtype=dtype, metadata=metadata)
        return
    if options.rank:
        adapters, kept = reduce_rank(adapters, rank, energy, path)
        say(_kept_lines(kept, "energy kept"))
    if adapter.layout.use_dora and adapter.layout.dora_over_base != (
        ADAPTER_FORMS[form].dora == "base"
    ):
        # Its magnitudes are over another norm in this form, which needs the base's weights.
        if not (options.base or config.model.base or config.model.transformer):
            raise UserError(
                f"{options.adapter} is a DoRA, whose magnitudes are over another norm in the "
                f"{form} form; the base is needed to convert them: give --base FILE"
            )
        source, arch, _ = _base(spec, config, options)
        base = _stored(spec, arch, source)
        for name, lora in adapters.items():
            weight = partial(base.read, f"{name}.weight")
            adapters[name] = replace(
                lora, matrices=in_norm_of(form, lora.matrices, lora.scale, weight)
            )
    if layers is None and adapter.presets:
        layers = layers_of(spec.architecture.build, spec.architecture.presets[adapter.presets[0]])
    complete = add_missing_modules(adapters, spec, form, layers or {}, path)
    if zeros := len(complete) - len(adapters):
        say(
            f"{zeros} modules are written as zeros: programs that read the {form} form need all "
            f"modules of a block"
        )
    _write(complete, spec, out, form=form, dtype=dtype, metadata=metadata)


def _extract(spec: ModelSpec, config: RunConfig, options: ExportOptions) -> None:
    """Compute a LoRA from the difference of two transformers."""
    (rank, energy), tuned_path = parse_rank(options.rank), local_path(options.extract)
    if config.adapter.method in ("lokr", "loha"):
        raise UserError(
            f"--extract makes a LoRA, and adapter.method = {config.adapter.method}; leave "
            f"adapter.method out"
        )
    form = options.to or ExportConfig().forms[0]
    check_form(form, spec.architecture.names, use_dora=False)
    out = _out(options.out, tuned_path, f"_rank{rank}" if rank else "_extracted")
    base, arch, layers = _base(spec, config, options)
    tuned = open_weights(tuned_path)
    only = None
    if config.adapter.targets:
        only = target_modules(
            build_on_meta(spec, arch, Precision()), config.adapter.targets, spec.adapters.targets
        )
    with progress("extract", len(parameters_of(spec.architecture.build, arch))) as bar:
        extracted = extract(
            spec, arch, tuned, base, rank=rank, energy=energy, only=only, advance=bar.advance
        )
    say(_kept_lines(extracted.energy_shares, "of the difference's energy kept"))
    say(
        f"residual: {extracted.residual:.2%} of the norm of the difference in the adapter's modules"
    )
    if extracted.uncovered:
        largest = sorted(extracted.uncovered, key=lambda name: -extracted.sizes[name])
        shares = {name: extracted.uncovered[name] for name in largest[:10]}
        of_size = {
            name: f"{share:.1%} of its size" if math.isfinite(share) else "was zero"
            for name, share in shares.items()
        }
        named = ", ".join(f"{name} ({share})" for name, share in of_size.items())
        more = f" and {len(largest) - 10} more" if len(largest) > 10 else ""
        warn(
            f"the adapter does not cover {len(largest)} parameters that differ, with "
            f"{extracted.share_left:.1%} of the energy of the whole difference: {named}{more}"
        )
    residual = round(extracted.residual, 6)
    metadata = derived_metadata(
        {}, tuned=tuned_path.name, base=base.path.name, rank=options.rank, residual=residual
    )
    dtype = parse_dtype(options.dtype or ("bf16" if config.export.scaled else config.export.dtype))
    adapters = add_missing_modules(extracted.adapters, spec, form, layers, out)
    _write(adapters, spec, out, form=form, dtype=dtype, metadata=metadata)


def _merge(spec: ModelSpec, config: RunConfig, options: ExportOptions) -> None:
    """Merge an adapter file into a whole transformer, written tensor by tensor so that one tensor
    is in memory at a time."""
    path, strength = parse_merge(options.adapter, "--adapter")
    if options.strength is not None:
        if strength != 1:
            raise UserError(
                f"--adapter {options.adapter} and --strength {options.strength:g} are two; give one"
            )
        strength = options.strength
    if not abs(strength) <= MAX_STRENGTH:
        raise UserError(
            f"--strength {strength:g} is not between -{MAX_STRENGTH} and {MAX_STRENGTH}; 1 leaves "
            f"the adapter unscaled"
        )
    dtype = options.dtype or config.export.dtype
    forms = (options.to,) if options.to else config.export.forms
    wanted = replace(config.export, merged=True, dtype=dtype, forms=forms)
    folder = local_path(options.out) if options.out else path.with_name(f"{path.stem}_merged")
    check_kind(folder, is_transformer=True)
    check_free(folder / f"transformer_{form}" for form in whole_forms(spec, wanted))
    source, arch, layers = _base(spec, config, options)
    _check_expert(spec, path, source)
    adapter = find_adapter(path, spec, part=options.part, layers=layers)
    _check_fits(adapter, layers)
    check_finite(adapter)  # before gigabytes are written
    names, parameters = spec.architecture.names, parameters_of(spec.architecture.build, arch)
    file = with_differences(
        adapter.file, adapter.file.source, adapter.differences, names, parameters
    )
    merged = replace(_stored(spec, arch, source), edits=merge_into([(file, strength)]))
    description = (source.path if source.path.is_dir() else source.path.parent) / "config.json"
    folders = export_merged(
        build_on_meta(spec, arch, Precision()),
        spec,
        folder,
        wanted,
        metadata=derived_metadata({}, file=path.name, base=source.path.name, strength=strength),
        original=merged.read,
        config_json=description if description.is_file() else None,
    )
    for output in folders:
        worst, lost = _rounding(_stored(spec, arch, open_weights(output)), merged)
        also = (
            f" and differences of {described(list(file.differences))}" if file.differences else ""
        )
        content = f"{len(adapter.shapes)} modules{also} merged at strength {strength:g}"
        of_change = f", which is {lost:.1%} of what the file changes" if worst else ""
        say(
            f"{output}: {content}; rounding to {dtype} changes the written weights by "
            f"{worst:.1e}{of_change}"
        )
        if lost > _MUCH_LOST:
            wider = "bf16 or fp32" if dtype == FP8_SCALED else "fp32"
            warn(
                f"{output}: rounding is {lost:.0%} of what the file changes; write it with --dtype "
                f"{wider}"
            )


def _stored(spec: ModelSpec, arch: Any, source: SafetensorsSource) -> StoredParameters:
    return StoredParameters.of(
        source, spec.architecture.names, parameters_of(spec.architecture.build, arch)
    )


_MUCH_LOST = 0.1
"""Share of a merged change that may be lost in rounding without a warning."""


def _rounding(written: StoredParameters, expected: StoredParameters) -> tuple[float, float]:
    """The rounding of the parameters of a file that a merge changed: the largest difference to the
    expected values, relative to a parameter; and the difference of all parameters, relative to what
    the merge changed."""
    worst, lost, changed, base = 0.0, 0.0, 0.0, replace(expected, edits={})
    for name in expected.edits:
        wanted = expected.read(name).clone()
        error = float(torch.linalg.vector_norm(written.read(name) - wanted))
        size = float(torch.linalg.vector_norm(wanted))
        worst = max(worst, error / (size or 1.0))
        lost += error**2
        changed += float(torch.linalg.vector_norm(wanted - base.read(name))) ** 2
    if not worst <= 0.1:  # rounding to 8 bits costs about 3 %; `not <=` also refuses NaN
        raise UserError(
            f"{written.source.path}: the merged weights differ by {worst:.1%} when read back; "
            f"check the disk, and write them again"
        )
    return worst, (lost / changed) ** 0.5 if changed else 0.0


def _check_expert(spec: ModelSpec, adapter: Path, base: SafetensorsSource) -> None:
    """Refuse to merge an adapter that is named after one expert into the other, which has the same
    shapes."""
    parts = {
        expert.part: expert.name
        for arch in spec.architecture.presets.values()
        for expert in spec.architecture.experts(arch)
    }
    if not parts:  # without experts a name like `low_noise` means nothing
        return
    folder = base.path if base.path.is_dir() else base.path.parent
    # A folder called `transformer` is the first expert only if the second one is next to it.
    are_both_there = all((folder.parent / part).is_dir() for part in parts)
    expert_name = named_after(str(adapter))
    base_expert = named_after(str(base.path)) or (
        parts.get(folder.name, "") if are_both_there else ""
    )
    if expert_name and base_expert and expert_name != base_expert:
        raise UserError(
            f"{adapter} is named after the {expert_name} expert, and {base.path} is the {base_expert} one; name "
            f"the other with --base, or rename the file"
        )


def _check_fits(adapter: FoundAdapter, layers: Shapes) -> None:
    if wrong := [name for name, shape in adapter.shapes.items() if layers.get(name) != shape]:
        first = wrong[0]
        there = f"is {list(layers[first])} there" if first in layers else "does not exist there"
        presets = f"; the adapter fits {', '.join(adapter.presets)}" if adapter.presets else ""
        raise UserError(
            f"{adapter.path} does not fit the base: {len(wrong)} of {len(adapter.shapes)} modules, "
            f"{first} {list(adapter.shapes[first])} "
            f"{there}{presets}; give the base that it was trained on"
        )


def _layers(
    spec: ModelSpec, config: RunConfig, options: ExportOptions
) -> tuple[ModelSpec, Shapes | None]:
    """The model family with the architecture of the given base or preset, and its Linear layers;
    None if neither is given."""
    name = config.model.preset
    check_preset(name, spec.architecture.presets)
    if options.base:
        _, arch, layers = _base(spec, config, options)
    elif name:
        arch = spec.architecture.presets[name]
        layers = layers_of(spec.architecture.build, arch)
    else:
        return spec, None
    return spec.for_arch(arch), layers


def _base(
    spec: ModelSpec, config: RunConfig, options: ExportOptions
) -> tuple[SafetensorsSource, Any, Shapes]:
    """The base's weights, its architecture and its Linear layers."""
    model, part = config.model, options.part or "transformer"
    if options.base:
        path = local_path(options.base)
        if not path.exists() and (
            path.is_absolute() or path.suffix == ".safetensors" or options.base.startswith(".")
        ):
            raise UserError(
                f"--base {options.base}: there is no such file or folder; "
                f"{path_remedy(options.base)}"
            )
        is_transformer = path.is_file() or (path.is_dir() and not (path / part).is_dir())
        model = ModelPaths(
            preset=model.preset,
            transformer=options.base if is_transformer else "",
            base="" if is_transformer else options.base,
        )
    if not (model.base or model.transformer):
        raise UserError(
            f"--{'extract' if options.extract else 'merge'} needs the base: give --base FILE, or "
            f"set model.base"
        )
    source = open_weights(model.locate("transformer" if model.transformer else part))
    # Presets with equal weights may differ in other settings; here only weights matter, so the
    # first that fits is used.
    fitting = () if model.preset else presets_of(source, spec)
    arch = spec.architecture.presets[fitting[0]] if fitting else choose_arch(spec, model, source)[1]
    return source, arch, layers_of(spec.architecture.build, arch)


def _out(out_flag: str, source: Path, mark: str) -> Path:
    """The path of the new adapter file, which must not exist: `--out`, or next to the source with a
    mark appended to its name."""
    stem = (
        source.name
        if source.is_dir()
        else source.name.removesuffix(".index.json").removesuffix(".safetensors")
    )
    path = local_path(out_flag) if out_flag else source.with_name(f"{stem}{mark}.safetensors")
    check_kind(path, is_transformer=False)
    check_free([path])
    return path


def _kept_lines(kept: Mapping[str, float], label: str) -> str:
    worst = min(kept, key=lambda name: kept[name])
    return f"{label}: median {median(kept.values()):.2%}, worst {kept[worst]:.2%} ({worst}), of {len(kept)} modules"


def _write(
    adapters: Mapping[str, Scaled[Any]],
    spec: ModelSpec,
    out: Path,
    *,
    form: str,
    dtype: torch.dtype,
    metadata: Mapping[str, str],
) -> None:
    """Write an adapter file, and print how exact it is and which programs load it."""
    written = write_converted(adapters, spec, out, form=form, dtype=dtype, metadata=metadata)
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    if written.method == "lora":
        lowest, highest = written.ranks[0], written.ranks[-1]
        ranks = f"rank {lowest}" if lowest == highest else f"ranks {lowest} to {highest}"
        about = f", {ranks}, {short}"
        compared = "products of the written matrices"
        rounded = f"rounded to {short}"
    else:
        about, compared, rounded = f" of a {written.method}", "its factors", "rounded"
    same = "bitwise identical" if written.exact else f"equal up to {written.worst:.1e} ({rounded})"
    say(f"{out}: {form}, {len(adapters)} modules{about}; {compared} are {same}")
    use_dora = any("magnitude" in adapter.matrices.parts for adapter in adapters.values())
    if read := readers_of(spec, form, list(adapters), use_dora=use_dora, method=written.method):
        say(loaded_by(read))
