"""LoKr and LoHa in files: what their keys mean, and training on from them.

| key behind a module's name | meaning |
|---|---|
| `.lokr_w1`, or `.lokr_w1_a` and `.lokr_w1_b` | the first factor of the Kronecker product, whole or as a low-rank product |
| `.lokr_w2`, or `.lokr_w2_a` and `.lokr_w2_b` | the second factor |
| `.hada_w1_a`, `.hada_w1_b`, `.hada_w2_a`, `.hada_w2_b` | the two low-rank products whose elementwise product is the change |
| `.alpha` | as ComfyUI and LyCORIS have it: over the rank of the last low-rank factor, and without effect where none is |
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.files.alpha import AlphaHeader
from ditkit_core.adapters.files.file_adapter import FileAdapter
from ditkit_core.errors import UserError, argument
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.state_dict import TensorSlice
from ditkit_core.weights.factored import METHOD_OF_PART, is_complete, low_rank_of, rank_of_parts, shape_of_parts

_MOST_WEIGHTS = 2**29
"""Weights of a layer, above the largest of known models (340 million): a small file may stand for a change of any size."""


class MixedAdapter(UserError):
    """A file that can be merged but not trained further: of several methods, or in a shape that no configuration has."""


def mixed_adapter(path: Path | str, merge_key: str, why: str) -> MixedAdapter:
    """The refusal to train such a file further, with the key of `[base]` that merges it into its transformer instead."""
    return MixedAdapter(
        f"{argument('adapter.init')} = {path} cannot be trained further: {why}; merge it with {merge_key}"
    )


def understand_factored(
    source: SafetensorsSource,
    keys: Mapping[str, str],
    parts: tuple[TensorSlice, ...],
    modules: Mapping[str, tuple[int, ...]],
    header: AlphaHeader,
    names: Sequence[str],
) -> FileAdapter:
    """Understand the keys of one module of a file; its tensors are not read.

    Raises:
        UserError: If they are not a LoKr or LoHa of the module.
    """
    shapes = {part: tuple(source.tensors[key].shape) for part, key in keys.items() if part in METHOD_OF_PART}
    first = keys[next(iter(shapes))]
    layer = (sum(modules[part.name][0] // part.of for part in parts), modules[parts[0].name][1])
    if others := keys.keys() - METHOD_OF_PART.keys() - {"alpha"}:
        raise UserError(
            f"{source.path}: {keys[min(others)]} next to {first} is of another method; merge that file with the program that made it"
        )
    fits = is_complete(shapes) and shape_of_parts(shapes) == layer and math.prod(layer) <= _MOST_WEIGHTS
    if not fits or ("alpha" in keys and source.tensors[keys["alpha"]].shape not in ((), (1,))):
        shown = ", ".join(f"{part} {list(shape)}" for part, shape in shapes.items())
        raise UserError(
            f"{source.path}: {first}: {shown} are not a LoKr or LoHa of the layer's {list(layer)}; name an adapter of this model"
        )
    if any(key.startswith("base_model.model.") for key in keys.values()):
        raise UserError(
            f"{source.path}: {first} has peft's own names, whose scale depends on a rank that is not in the file; merge it with peft"
        )
    rank = low_rank_of(shapes)
    scale = float(source.read(keys["alpha"])) / rank if "alpha" in keys and rank is not None else 1.0
    return FileAdapter(names[0], keys, parts, rank_of_parts(shapes), scale, METHOD_OF_PART[next(iter(shapes))])


def factored_config(
    config: AdapterConfig,
    source: SafetensorsSource,
    modules: Mapping[str, Any],
    merge_key: str,
) -> tuple[AdapterConfig, str]:
    """The configuration of adapters that have the shapes of a file's, and one line about it.

    Args:
        config: The configuration, whose targets are kept if it has any.
        source: The file.
        modules: Its modules, by our name.
        merge_key: As `BaseConfig.merge_key`, for errors.

    Raises:
        MixedAdapter: If no configuration has these shapes.
        UserError: If the configuration contradicts the file.
    """
    path, methods = source.path, {module.method for module in modules.values()}
    if len(methods) > 1:
        raise mixed_adapter(path, merge_key, f"it mixes {' and '.join(sorted(methods))}")
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, module in modules.items():
        (piece,) = module.pieces if len(module.pieces) == 1 else (None,)
        if piece is None or len(piece.adapter.parts) > 1:
            raise mixed_adapter(path, merge_key, f"{name} shares its factors with other layers")
        keys = piece.adapter.keys.items()
        shapes[name] = {part: tuple(source.tensors[key].shape) for part, key in keys if part in METHOD_OF_PART}
    (method,) = methods
    if config.dropout or config.use_rslora or config.use_dora:
        raise UserError(
            f"{argument('adapter.init')} = {path} is a {method}, which has no {argument('adapter.dropout')}, use_rslora or use_dora; leave them out"
        )
    ranks = {name: module.rank for name, module in modules.items()}
    rank = max(ranks.values())
    started = AdapterConfig(
        method=method,
        rank=rank,
        rank_pattern=tuple(f"^{name}={module_rank}" for name, module_rank in ranks.items() if module_rank != rank),
        alpha_pattern=tuple(f"^{name}={module.scale * module.rank!r}" for name, module in modules.items()),
        targets=config.targets or tuple(modules),
        init=config.init,
    )
    if min(module.scale for module in modules.values()) <= 0:
        raise mixed_adapter(path, merge_key, "its scale is not above 0")
    if method == "lokr":
        started = _with_factors_of(started, config, shapes, merge_key)
    factor = f", decompose_factor {started.decompose_factor}" * (method == "lokr")
    return started, f"adapter.init: {started.name}, rank {rank}{factor} and {len(modules)} modules from {path}"


def _with_factors_of(
    config: AdapterConfig,
    user_config: AdapterConfig,
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]],
    merge_key: str,
) -> AdapterConfig:
    """The configuration of a LoKr with the sizes of factors that make these shapes; UserError if others are given."""
    sizes = {side for parts in shapes.values() for side in parts.get("lokr_w1", (0, 0))}
    sizes |= {
        size
        for parts in shapes.values()
        if "lokr_w1_a" in parts
        for size in (parts["lokr_w1_a"][0], parts["lokr_w1_b"][1])
    }
    layers = {name: shape_of_parts(parts) for name, parts in shapes.items()}
    both = any("lokr_w1_a" in parts for parts in shapes.values())
    for factor in (user_config.decompose_factor, -1, *sorted(sizes - {0}, reverse=True)):
        tried = replace(config, decompose_factor=factor, decompose_both=both)
        if all(lokr_shapes(tried, name, layers[name]) == dict(parts) for name, parts in shapes.items()):
            break
    else:
        raise mixed_adapter(user_config.init, merge_key, f"no {argument('adapter.decompose_factor')} makes its factors")
    if factor != user_config.decompose_factor != -1 or (user_config.decompose_both and not both):
        raise UserError(
            f"{argument('adapter.init')} = {config.init} has the factors of {argument('adapter.decompose_factor')} = {factor} and decompose_both = {str(both).lower()}; "
            "leave both keys out"
        )
    return tried


def lokr_shapes(config: AdapterConfig, module: str, layer: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of a LoKr's parts that peft makes for a layer's weight [out, in]."""
    from peft.tuners.lokr.layer import factorization  # peft takes seconds to import

    rank = config.rank_of(module)
    (a, b), (c, d) = (factorization(size, config.decompose_factor) for size in layer)
    first = {"lokr_w1": (a, c)}
    if config.decompose_both and rank < max(a, c) / 2:
        first = {"lokr_w1_a": (a, rank), "lokr_w1_b": (rank, c)}
    second = {"lokr_w2_a": (b, rank), "lokr_w2_b": (rank, d)} if rank < max(b, d) / 2 else {"lokr_w2": (b, d)}
    return {**first, **second}
