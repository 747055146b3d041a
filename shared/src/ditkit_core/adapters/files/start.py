"""Training on from an adapter file: the configuration of adapters like the file's, and their first
values."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.files.read import AdapterFile
from ditkit_core.errors import UserError, argument
from ditkit_core.weights.factored import METHOD_OF_PART, shape_of_parts
from ditkit_core.weights.load import first_ten


class MixedAdapter(UserError):
    """A file that can be merged but not trained further: of several methods, or in a shape that no
    configuration has."""


def config_from_file(
    config: AdapterConfig, file: AdapterFile, merge_key: str = "base.merge"
) -> tuple[AdapterConfig, str]:
    """Take ranks, alphas, DoRA and (if none are configured) targets from the file that training
    starts from; also one line about that.

    `merge_key` is as `BaseConfig.merge_key`, for errors. Raises MixedAdapter if only some of the
    file's modules are DoRA.
    """
    path, modules = file.source.path, file.modules
    if config.rank_pattern or config.alpha_pattern:
        raise UserError(
            f"{argument('adapter.init')} = {path} decides ranks and alphas by layer; leave "
            f"{argument('adapter.rank_pattern')} and {argument('adapter.alpha_pattern')} out"
        )
    methods = {module.method for module in modules.values()}
    if config.method not in ("lora", *methods):  # `lora` is the default, which a file replaces
        has = " and ".join(sorted(methods))
        raise UserError(
            f"{argument('adapter.init')} = {path} has a {has}, which {argument('adapter.method')} "
            f"= {config.method} cannot start from; leave {argument('adapter.method')} out, or "
            f"merge the file with {merge_key}"
        )
    if methods != {"lora"}:
        return _factored_config(config, file, merge_key)
    doras = [name for name, module in modules.items() if module.use_dora]
    if 0 < len(doras) < len(modules):
        other = next(name for name in modules if name not in doras)
        raise _mixed_adapter(path, merge_key, f"it mixes DoRA ({doras[0]}) and LoRA ({other})")
    shapes = {name: (module.rank, module.scale) for name, module in modules.items()}
    (rank, scale), _ = Counter(shapes.values()).most_common(1)[0]
    # alpha = 0 means alpha = rank in our configuration
    if (least := min(scale for _, scale in shapes.values())) <= 0:
        raise UserError(
            f"{argument('adapter.init')} = {path} has scale {least:g}, so nothing could be trained"
        )

    def alpha_of(rank: int, scale: float) -> float:
        return scale * (math.sqrt(rank) if config.use_rslora else rank)

    alpha = alpha_of(rank, scale)
    others = {
        name: rank_and_scale
        for name, rank_and_scale in shapes.items()
        if rank_and_scale != (rank, scale)
    }
    started = replace(
        config,
        rank=rank,
        alpha=alpha,
        rank_pattern=tuple(f"^{name}={other}" for name, (other, _) in others.items()),
        alpha_pattern=tuple(
            f"^{name}={alpha_of(*rank_and_scale)!r}" for name, rank_and_scale in others.items()
        ),
        use_dora=config.use_dora or bool(doras),
        targets=config.targets or tuple(modules),
    )
    line = f"adapter.init: rank {rank}, alpha {alpha:g} and {len(modules)} modules from {path}"
    return started, line + f", of which {len(others)} have another rank or alpha" * bool(others)


def _factored_config(
    config: AdapterConfig, file: AdapterFile, merge_key: str
) -> tuple[AdapterConfig, str]:
    source, modules = file.source, file.modules
    path, methods = source.path, {module.method for module in modules.values()}
    if len(methods) > 1:
        raise _mixed_adapter(path, merge_key, f"it mixes {' and '.join(sorted(methods))}")
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, module in modules.items():
        (piece,) = module.pieces if len(module.pieces) == 1 else (None,)
        if piece is None or len(piece.adapter.parts) > 1:
            raise _mixed_adapter(path, merge_key, f"{name} shares its factors with other layers")
        keys = piece.adapter.keys.items()
        shapes[name] = {
            part: tuple(source.tensors[key].shape) for part, key in keys if part in METHOD_OF_PART
        }
    method: Any
    (method,) = methods
    if config.dropout or config.use_rslora or config.use_dora:
        raise UserError(
            f"{argument('adapter.init')} = {path} is a {method}, which has no "
            f"{argument('adapter.dropout')}, use_rslora or use_dora; leave them out"
        )
    ranks = {name: module.rank for name, module in modules.items()}
    rank = max(ranks.values())
    started = AdapterConfig(
        method=method,
        rank=rank,
        rank_pattern=tuple(
            f"^{name}={module_rank}" for name, module_rank in ranks.items() if module_rank != rank
        ),
        alpha_pattern=tuple(
            f"^{name}={module.scale * module.rank!r}" for name, module in modules.items()
        ),
        targets=config.targets or tuple(modules),
        init=config.init,
    )
    if min(module.scale for module in modules.values()) <= 0:
        raise _mixed_adapter(path, merge_key, "its scale is not above 0")
    if method == "lokr":
        started = _with_factors_of(started, config, shapes, merge_key)
    factor = f", decompose_factor {started.decompose_factor}" * (method == "lokr")
    return (
        started,
        f"adapter.init: {started.name}, rank {rank}{factor} and {len(modules)} modules from {path}",
    )


def _with_factors_of(
    config: AdapterConfig,
    user_config: AdapterConfig,
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]],
    merge_key: str,
) -> AdapterConfig:
    """The configuration of a LoKr with the sizes of factors that make these shapes; UserError if
    others are given."""
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
        if all(
            lokr_shapes(tried, name, layers[name]) == dict(parts) for name, parts in shapes.items()
        ):
            break
    else:
        raise _mixed_adapter(
            user_config.init,
            merge_key,
            f"no {argument('adapter.decompose_factor')} makes its factors",
        )
    if factor != user_config.decompose_factor != -1 or (user_config.decompose_both and not both):
        raise UserError(
            f"{argument('adapter.init')} = {config.init} has the factors of "
            f"{argument('adapter.decompose_factor')} = {factor} and decompose_both = "
            f"{str(both).lower()}; leave both keys out"
        )
    return tried


def lokr_shapes(
    config: AdapterConfig, module: str, layer: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """The shapes of a LoKr's parts that peft makes for a layer's weight [out, in]."""
    from peft.tuners.lokr.layer import factorization  # peft takes seconds to import

    rank = config.rank_of(module)
    (a, b), (c, d) = (factorization(size, config.decompose_factor) for size in layer)
    first = {"lokr_w1": (a, c)}
    if config.decompose_both and rank < max(a, c) / 2:
        first = {"lokr_w1_a": (a, rank), "lokr_w1_b": (rank, c)}
    second = (
        {"lokr_w2_a": (b, rank), "lokr_w2_b": (rank, d)}
        if rank < max(b, d) / 2
        else {"lokr_w2": (b, d)}
    )
    return {**first, **second}


def _mixed_adapter(path: Path | str, merge_key: str, why: str) -> MixedAdapter:
    """The refusal to train such a file further, with the key of `[base]` that merges it into its
    transformer instead."""
    return MixedAdapter(
        f"{argument('adapter.init')} = {path} cannot be trained further: {why}; merge it with "
        f"{merge_key}"
    )


def initial_adapter(
    file: AdapterFile, adapted: Collection[str]
) -> Callable[[str], dict[str, Tensor]]:
    """A `start` for `inject.initialise` that reads a file. Modules that it lacks start like new
    ones; one that is not `adapted` is refused."""
    if dropped := [module for module in file.modules if module not in adapted]:
        raise UserError(
            f"{argument('adapter.init')} = {file.source.path} has modules that "
            f"{argument('adapter.targets')} leaves out: {first_ten(dropped)}; "
            f"leave {argument('adapter.targets')} empty to take the file's"
        )

    def start(module: str) -> dict[str, Tensor]:
        if module not in file.modules:
            return {}
        if file.modules[module].method != "lora":
            return dict(file.read_factored(module).parts)
        read = file.read(module)
        tensors = {"lora_A.weight": read.down, "lora_B.weight": read.up}
        if read.magnitude is None:
            return tensors
        return {
            **tensors,
            "dora_scale" if read.over_base else "lora_magnitude_vector.weight": read.magnitude,
        }

    return start
