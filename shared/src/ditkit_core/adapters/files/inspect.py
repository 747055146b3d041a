"""Describes a file of weights, adapter or complete transformer, in text and JSON."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ditkit_core.adapters.config import METHOD_NAMES
from ditkit_core.adapters.files.convert import module_kind
from ditkit_core.adapters.files.identify import (
    Shapes,
    adapter_in,
    is_transformer,
    parts_in,
    presets_of,
)
from ditkit_core.adapters.files.keys import has_adapter_keys
from ditkit_core.adapters.files.read import AdapterFile
from ditkit_core.adapters.products import product_norm
from ditkit_core.documents.tables import Table
from ditkit_core.errors import printable
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.adapter_formats import DIFFERENCES, FORMATS, AdapterLayout
from ditkit_core.models.adapter_programs import NOT_TRIED
from ditkit_core.models.spec import ModelSpec
from ditkit_core.weights.fp8_scaled import attach_scales, num_scaled
from ditkit_core.weights.load import known_prefix

_SHOWN = 120
"""Maximum number of characters that are printed of a header's value."""


def inspect_file(
    path: Path, spec: ModelSpec, *, part: str | None = None, base: Shapes | None = None
) -> dict[str, Any]:
    """Describe an adapter, or a complete transformer (file, folder or index), in plain values for
    JSON or for `inspection_text`.

    `part` is the expert to choose in a file with an adapter for each; None describes each. `base`
    has the Linear layers to compare with.
    """
    source = SafetensorsSource.open(path)
    # Each file counts once, although a folder's files have many tensors each.
    about: dict[str, Any] = {
        "file": str(path),
        "bytes": sum(
            file.stat().st_size for file in {stored.file for stored in source.tensors.values()}
        ),
        "metadata": dict(source.metadata),
    }
    if not has_adapter_keys(source) and is_transformer(source, spec):
        return about | _whole(source, spec)
    parts = parts_in(source)
    if part is None and len(parts) > 1:
        return about | {
            "kind": "adapters",
            "parts": {name: _adapter(source, spec, name, base) for name in parts},
        }
    return about | _adapter(source, spec, part, base)


def _adapter(
    source: SafetensorsSource, spec: ModelSpec, part: str | None, base: Shapes | None
) -> dict[str, Any]:
    adapter = adapter_in(source, spec, part=part, layers=base)
    modules = adapter.file.modules
    kinds: dict[str, list[str]] = {}
    norms: dict[str, float] = {}
    for name in modules:
        kinds.setdefault(module_kind(name), []).append(name)
        # Modules without a norm are reported as damaged below.
        if math.isfinite(norm := _norm(adapter.file, name)):
            norms[name] = norm
    # A scale without alpha keys can only come from the header.
    has_scale = any(module.scale != 1 for module in modules.values())
    about = {
        "kind": "adapter",
        "form": adapter.layout.form,
        "matrices": _matrices(adapter.layout),
        "alpha": "keys"
        if adapter.layout.alpha
        else "header"
        if has_scale
        else "none, so it is the rank",
        "dora": adapter.layout.use_dora,
        "ranks": _counted(f"{module.rank:g}" for module in modules.values()),
        "scales": _counted(f"{module.scale:g}" for module in modules.values()),
        "dtypes": _dtypes(adapter.file.source),
        "modules": {
            kind: {
                "number": len(names),
                "blocks": _spans(
                    int(number) for name in names for number in re.findall(r"\.(\d+)\.", name)[:1]
                ),
                "shape": list(adapter.shapes[names[0]]),
                "norm": _norms([norms[name] for name in names if name in norms]),
            }
            for kind, names in kinds.items()
        },
        "norm": sum(norm**2 for norm in norms.values()) ** 0.5,
        "changes_nothing": [name for name, norm in norms.items() if norm == 0],
        "not_finite": [name for name in modules if name not in norms],
        "presets": list(adapter.presets),
        "differences": len(adapter.differences),
        "readers": spec.adapters.rules.readers(adapter.layout, adapter.modules),
    }
    if base is not None:
        about["fits_base"] = adapter.shapes.items() <= dict(base).items()
    return about


def _norm(file: AdapterFile, module: str) -> float:
    """The norm of a module's change; not finite if a value is not."""
    if file.modules[module].method != "lora":
        return float(torch.linalg.vector_norm(file.change_of(module)))
    read = file.read(module)
    is_finite = all(bool(tensor.isfinite().all()) for tensor in read.parts.values())
    return (
        abs(file.modules[module].scale) * product_norm(read.down, read.up)
        if is_finite
        else math.nan
    )


def _matrices(layout: AdapterLayout) -> str:
    if layout.method == DIFFERENCES:
        return "diff"
    if layout.method != "lora":
        return " and ".join(METHOD_NAMES[method] for method in layout.method.split(" and "))
    return "lora_down, lora_up" if layout.up_down else "lora_A, lora_B"


def _whole(raw: SafetensorsSource, spec: ModelSpec) -> dict[str, Any]:
    source = attach_scales(raw)  # scales of 8-bit files are not tensors of the model
    prefix, _ = known_prefix(source, spec.architecture.names)
    norms: dict[str, float] = {}
    kinds: dict[str, list[float]] = {}
    for name in source.tensors:
        # One tensor in memory at a time, however large the file.
        values = source.read(name).float()
        source.apply_scale(values, name)
        norms[name] = float(torch.linalg.vector_norm(values))
        key = name.removeprefix(prefix)
        # Layers of all blocks in one row; other tensors have a row each.
        kinds.setdefault(module_kind(key) if "blocks." in key else key, []).append(norms[name])
    forms = [
        form for form in spec.architecture.names.from_native if _is_form(source, prefix, spec, form)
    ]
    return {
        "kind": "transformer",
        "form": forms[0] if forms else "mixed",
        "prefix": prefix,
        "tensors": len(source.tensors),
        "parameters": sum(torch.Size(stored.shape).numel() for stored in source.tensors.values()),
        "dtypes": _dtypes(source),
        "scaled_8_bits": num_scaled(source),
        "presets": list(presets_of(source, spec)),
        "norms": {
            kind: _norms([norm for norm in of_kind if math.isfinite(norm)])
            for kind, of_kind in kinds.items()
        },
        "not_finite": [name for name, norm in norms.items() if not math.isfinite(norm)],
    }


def _is_form(source: SafetensorsSource, prefix: str, spec: ModelSpec, form: str) -> bool:
    """Whether every name in a file belongs to a form."""
    # There and back: a name that several forms know maps to our parameter, but only its own form
    # maps back to it.
    for name in source.tensors:
        theirs = name.removeprefix(prefix)
        parts = spec.architecture.names.to_native(theirs)
        if parts != () and not any(
            part.name == theirs
            for ours in parts or ()
            for part in spec.architecture.names.from_native[form](ours.name)
        ):
            return False
    return True


def _counted(values: Iterable[str]) -> dict[str, int]:
    """The number of times that each value occurs, the most frequent first."""
    return dict(Counter(values).most_common())


def _dtypes(source: SafetensorsSource) -> dict[str, int]:
    return _counted(str(stored.dtype).removeprefix("torch.") for stored in source.tensors.values())


def _norms(norms: Sequence[float]) -> dict[str, float]:
    return {"least": min(norms), "median": median(norms), "largest": max(norms)} if norms else {}


def _spans(numbers: Iterable[int]) -> str:
    """Numbers of blocks as `0-29` or `0, 2-4`; empty for modules outside of blocks."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)


def inspection_text(about: Mapping[str, Any]) -> str:
    """The description of `inspect_file` as text."""
    num_bytes = about["bytes"]
    size = f"{num_bytes / 2**20:.1f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.2f} GiB"
    lines = [f"{about['file']}: {size}"]
    if about["kind"] == "transformer":
        lines += _whole_lines(about)
    for part, inner in about.get(
        "parts", {"": about} if about["kind"] == "adapter" else {}
    ).items():
        lines += [f"adapter of {part}"] * bool(part) + _adapter_lines(inner)
    for key, value in about["metadata"].items():
        text = " ".join(str(value).split())
        lines.append(f"header {key}: {text[:_SHOWN]}{'…' if len(text) > _SHOWN else ''}")
    # Names and values are the file's own: they may contain what clears a terminal or forges a line.
    return "\n".join(map(printable, lines))


def _adapter_lines(about: Mapping[str, Any]) -> list[str]:
    if not about["modules"]:
        return [
            (
                f"  differences of whole parameters, by {about['differences']} keys: base.merge and "
                f"--merge apply them"
            ),
            f"  fits {', '.join(about['presets']) or 'no preset'}",
            *_reader_lines(about["readers"]),
        ]
    kinds, damaged = about["modules"], about["not_finite"]
    number = sum(kind["number"] for kind in kinds.values())
    lines = [
        (
            f"  adapter in the form of {FORMATS[about['form']].title}, "
            f"{about['matrices']}{', with DoRA magnitudes' * about['dora']}"
        ),
        (
            f"  rank {_listed(about['ranks'])}, alpha: {about['alpha']}, scale "
            f"{_listed(about['scales'])}; {_listed(about['dtypes'])}"
        ),
        f"  fits {', '.join(about['presets']) or 'no preset'}",
    ]
    if "fits_base" in about:
        lines.append(f"  {'fits' if about['fits_base'] else 'does not fit'} the base")
    lines.append(
        f"  {number} modules; the norm of all it adds is {about['norm']:.4g}, by kind (least, "
        f"median, largest):"
    )
    rows = [
        [kind, str(summary["shape"]), *_shown(summary["norm"])] for kind, summary in kinds.items()
    ]
    blocks = [
        f"blocks {summary['blocks']}" if summary["blocks"] else "" for summary in kinds.values()
    ]
    lines += _indented([[*row, text] for row, text in zip(rows, blocks, strict=True)])
    if about["differences"]:
        lines.append(
            f"  also adds differences to whole weights, biases or norms, by {about['differences']} "
            "keys: of ditkit, base.merge and --merge apply them, and the lines below are of all "
            "other keys"
        )
    if about["changes_nothing"]:
        lines.append(
            f"  {len(about['changes_nothing'])} modules change nothing: "
            f"{about['changes_nothing'][0]} …"
        )
    if damaged:
        lines.append(
            f"  DAMAGED: {len(damaged)} modules have values that are not finite: {damaged[0]} …"
        )
    return lines + _reader_lines(about["readers"])


def _reader_lines(readers: Mapping[str, str]) -> list[str]:
    tried = {program: problem for program, problem in readers.items() if problem != NOT_TRIED}
    lines = [f"  {program}: {problem or 'loads all of it'}" for program, problem in tried.items()]
    others = ", ".join(program for program in readers if program not in tried)
    return [*lines, *[f"  not tried: {others}"] * bool(others)]


def _whole_lines(about: Mapping[str, Any]) -> list[str]:
    scaled = (
        f", {about['scaled_8_bits']} matrices in 8 bits with a scale"
        if about["scaled_8_bits"]
        else ""
    )
    below = f" below {about['prefix']}" if about["prefix"] else ""
    counted = f"{about['tensors']} tensors, {about['parameters']:,} parameters; {_listed(about['dtypes'])}{scaled}"
    lines = [
        f"  whole transformer, {about['form']} names{below}: {counted}",
        f"  fits {', '.join(about['presets']) or 'no preset'}",
        "  norms by kind (least, median, largest):",
    ]
    lines += _indented([[kind, *_shown(norm)] for kind, norm in about["norms"].items()])
    if damaged := about["not_finite"]:
        lines.append(f"  DAMAGED: values of {len(damaged)} tensors are not finite: {damaged[0]} …")
    return lines


def _shown(norm: Mapping[str, float]) -> list[str]:
    return [f"{value:.3g}" for value in norm.values()] or ["NaN", "", ""]


def _indented(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"    {line}" for line in Table(rows=rows, num_left=len(rows[0])).lines()]


def _listed(counted: Mapping[str, int]) -> str:
    """`32`, or `32 (300 times), 16 (10 times)` for several values; the first four are shown."""
    if len(counted) == 1:
        return next(iter(counted))
    shown = [f"{value} ({number} times)" for value, number in list(counted.items())[:4]]
    return ", ".join(shown) + (f" and {len(counted) - 4} more" if len(counted) > 4 else "")
