"""Puts adapters on a model's Linear layers through peft: which layers, their first values, and
their names.

peft renames the layers that it wraps (`q.weight` becomes `q.base_layer.weight`) and puts an adapter
name into its own parameters (`q.lora_A.default.weight`). Neither leaves this module: everywhere
else names are canonical, without both.
"""

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.dora import norm_ratio
from ditkit_core.config.layer_patterns import fits
from ditkit_core.config.nearest import nearest_word
from ditkit_core.errors import UserError, argument
from ditkit_core.io.rng import generator
from ditkit_core.models.meta import on_meta
from ditkit_core.models.protocol import StagedModel, unused_layers
from ditkit_core.nn.factored import parts_of
from ditkit_core.nn.lora import AdapterDropout
from ditkit_core.nn.quantized_linear import dense_weight
from ditkit_core.weights.rows import RowReader, dense_rows

_PARTS = r"\.(?:lora_(?:A|B|magnitude_vector)|lokr_\w+|hada_\w+)"
_PEFT_NAMES = re.compile(rf"\.base_layer(?=\.)|(?P<part>{_PARTS})\.default(?=\.|$)")
_FIRST_PARTS = {"lora_A": "lora", "lokr_w1": "lokr", "hada_w1_a": "loha"}
"""By a child of a layer with an adapter: the method."""
_ZERO_AT_FIRST = ("lora_B", "lokr_w1", "lokr_w1_a", "hada_w2_b")


def inject(
    model: nn.Module,
    config: AdapterConfig,
    named_sets: Mapping[str, tuple[str, ...]],
    *,
    only: Collection[str] | None = None,
) -> tuple[str, ...]:
    """Make the model trainable as configured: add adapters on `meta`, or mark every parameter that a
    forward uses.

    Args:
        named_sets: Named sets of targets, as name endings; the first is the default.
        only: Of the modules that the configuration selects, those that get an adapter; None: all.

    Returns:
        Names of the modules that have an adapter now, in the model's order; none for `full`.
    """
    if config.method == "full":
        model.requires_grad_(True)
        for name in unused_layers(model):
            model.get_submodule(name).requires_grad_(False)
        return ()
    targets = target_modules(model, config.targets, named_sets)
    config.check_patterns(targets)
    if only is not None:
        targets = tuple(target for target in targets if target in only)
    peft_config = _peft_config(config, targets)
    # On meta, because `initialise` makes the values from the seed and the module's name, the same
    # on every device.
    peft, layers = _import_peft()
    with on_meta():
        peft.inject_adapter_in_model(peft_config, model)
    for name, layer in adapter_layers(model).items():
        # peft constructs its own classes here and offers no choice, as it does for LoRA layers.
        if config.dropout:
            layer.lora_dropout["default"] = AdapterDropout(config.dropout, name)
        if config.method != "lora":
            layer.__class__ = layers.FACTORED[config.method]
        if config.method == "loha":
            # peft goes by the shape of the weight, which in a quantized layer is the shape of the
            # packed codes.
            with on_meta():
                layer.create_adapter_parameters(
                    "default", layer.r["default"], (layer.out_features, layer.in_features)
                )
    return targets


def _peft_config(config: AdapterConfig, targets: Collection[str]) -> Any:
    """peft's configuration of adapters for these modules."""
    (peft, layers), alpha = _import_peft(), config.alpha or config.rank
    ranks = {target: config.rank_of(target) for target in targets}
    alphas = {target: config.alpha_of(target) for target in targets}
    common: dict[str, Any] = {
        "r": config.rank,
        # Anchored, so that no longer name fits that ends like one of them.
        "rank_pattern": {
            f"^{re.escape(target)}": rank for target, rank in ranks.items() if rank != config.rank
        },
        "alpha_pattern": {
            f"^{re.escape(target)}": module_alpha
            for target, module_alpha in alphas.items()
            if module_alpha != alpha
        },
        # A pattern that fits only these modules: a list of endings may also fit a ModuleList, which
        # peft cannot wrap.
        "target_modules": "|".join(map(re.escape, targets)),
    }
    # First values: none of peft's. `initialise` gives them, from a generator of their own.
    if config.method == "loha":
        return peft.LoHaConfig(alpha=alpha, init_weights=False, **common)
    if config.method == "lokr":
        factor, both = config.decompose_factor, config.decompose_both
        return peft.LoKrConfig(
            alpha=alpha, decompose_factor=factor, decompose_both=both, init_weights=False, **common
        )
    lora = peft.LoraConfig(
        lora_alpha=alpha,
        lora_dropout=config.dropout,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        init_lora_weights=False,
        **common,
    )
    lora._register_custom_module({nn.Linear: layers.LoraLinear})
    return lora


def target_modules(
    model: nn.Module, targets: Sequence[str], named_sets: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """Names of the Linear layers that the targets select, in the model's order."""
    return chosen_of(
        [name for name, module in model.named_modules() if isinstance(module, nn.Linear)],
        targets,
        named_sets,
    )


def chosen_of(
    linears: Iterable[str], targets: Sequence[str], named_sets: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """As `target_modules`, from the names of the model's Linear layers."""
    chosen: set[str] = set()
    for target in targets or tuple(named_sets)[:1]:
        endings = named_sets.get(target, (target,))
        fitting = {name for name in linears if any(fits(name, ending) for ending in endings)}
        if not fitting:
            near = nearest_word(target, named_sets)
            meant = f"did you mean {near!r}? " if near else ""
            kinds = sorted({re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in linears})
            raise UserError(
                f"{argument('adapter.targets')}: {target!r} fits no layer of this model; "
                f"{meant}its Linear layers are {', '.join(kinds)}; "
                f"named sets are {', '.join(map(repr, named_sets))}"
            )
        chosen |= fitting
    return tuple(name for name in linears if name in chosen)


def initialise(
    model: nn.Module | StagedModel,
    seed: int,
    *,
    device_of: Callable[[str], torch.device],
    start: Callable[[str], Mapping[str, Tensor]] | None = None,
    division: RowReader | None = None,
) -> None:
    """Give every adapter its first values, in fp32, once the base has its weights.

    A is uniform within ±1/sqrt(in_features), as in peft, and depends only on the seed and the
    module's name. B is zero, so the model starts as its base. A DoRA magnitude is the norm of each
    row of the weight. In a LoKr the first factor is zero, in a LoHa the last.

    Args:
        device_of: The device of a module's adapter, by the module's name.
        start: Other first values of a module, if it has any: `lora_A.weight`, `lora_B.weight`,
            perhaps `lora_magnitude_vector.weight`, or `dora_scale`, which is over the norm of the
            base's rows.
        division: Of the rows of base and adapters over ranks; None if this one has all.
    """

    def put(owner: nn.Module, leaf: str, value: Tensor) -> None:
        before = owner._parameters[leaf]
        assert before is not None and before.shape == value.shape, leaf
        # fp32 whatever the base's dtype: updates of an adapter are too small for bf16.
        value = value.float().contiguous()
        if division is None:
            owner.register_parameter(leaf, nn.Parameter(value))
        else:
            division.put_whole(owner, leaf, value)

    for module, layer in adapter_layers(model).items():
        start_values, device = start(module) if start else {}, device_of(module)
        if (method := method_of(layer)) != "lora":
            for part, value in _factored_values(layer, method, module, seed, start_values).items():
                put(getattr(layer, part), "default", value.to(device))
            continue
        rank, width = layer.lora_A["default"].weight.shape
        bound = 1 / math.sqrt(width)
        # Sampled on the CPU, whose generator gives the same numbers wherever the adapter goes.
        down = start_values.get("lora_A.weight")
        if down is None:
            down = torch.empty(rank, width).uniform_(
                -bound, bound, generator=generator(seed, "adapter", module)
            )
        up = start_values.get("lora_B.weight", torch.zeros(layer.lora_B["default"].weight.shape))
        put(layer.lora_A["default"], "weight", down.to(device))
        put(layer.lora_B["default"], "weight", up.to(device))
        if layer.lora_magnitude_vector:
            magnitude = layer.lora_magnitude_vector["default"]
            if (norms := start_values.get("lora_magnitude_vector.weight")) is not None:
                put(magnitude, "weight", norms.to(device))
            elif division is None:
                base = dense_weight(layer.get_base_layer()).to(device)
                put(magnitude, "weight", _row_norms(layer, base, start_values, down, up))
            else:
                base = dense_rows(layer.get_base_layer(), division)
                rows = division.rows(magnitude.weight)
                assert rows is not None and len(rows) == len(base), module
                some = slice(rows.start, rows.stop)
                division.put(
                    magnitude, "weight", _row_norms(layer, base, start_values, down, up[some], some)
                )


def _row_norms(
    layer: Any,
    base: Tensor,
    start_values: Mapping[str, Tensor],
    down: Tensor,
    up: Tensor,
    rows: slice = slice(None),
) -> Tensor:
    """The norm of some rows of the merged weight: an adapter that starts from a file has a B that
    is not zero."""
    scaling = layer.scaling["default"]
    if "dora_scale" in start_values:
        return start_values["dora_scale"][rows].to(base.device) * norm_ratio(
            base, down, up, scaling
        )
    merged = torch.addmm(
        base, up.to(base.device).float(), down.to(base.device).float(), alpha=scaling
    )
    return torch.linalg.vector_norm(merged, dim=1)


def _factored_values(
    layer: Any, method: str, module: str, seed: int, start_values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The first values of a LoKr or LoHa by part."""
    parts = parts_of(layer, method)
    if start_values:
        assert start_values.keys() == parts.keys(), module
        return {part: start_values[part] for part in parts}
    values = {}
    for part, before in parts.items():
        bound = 0.0 if part in _ZERO_AT_FIRST else 1 / math.sqrt(before.shape[1])
        random = generator(seed, "adapter", module, part)
        values[part] = torch.empty(before.shape).uniform_(-bound, bound, generator=random)
    return values


def adapter_layers(model: nn.Module | StagedModel) -> dict[str, Any]:
    """The layers with an adapter (peft's LoraLayer, or its kind for LoKr and LoHa), by the module's
    canonical name, in the model's order."""
    return {
        canonical_name(name): module
        for name, module in model.named_modules()
        if _is_adapter(module)
    }


def _is_adapter(module: nn.Module) -> bool:
    # By its children, not by its class: importing peft takes seconds, and a model without adapters
    # does not need it.
    children = module._modules
    return "base_layer" in children and any(part in children for part in _FIRST_PARTS)


def method_of(layer: nn.Module) -> str:
    """The method of a layer's adapter, as in `adapter.method`."""
    return next(method for part, method in _FIRST_PARTS.items() if part in layer._modules)


def trains_magnitude(layer: Any) -> bool:
    """Whether a layer has an adapter that trains a DoRA's magnitude."""
    return bool(layer._modules.get("lora_magnitude_vector"))


def remove_adapters(model: nn.Module | StagedModel) -> None:
    """Put the layers of the base back in place of those with an adapter, so that others can be
    injected."""
    for name, layer in adapter_layers(model).items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, layer.get_submodule("base_layer"))
    del model.peft_config  # type: ignore[union-attr]  # by which peft would take the next one for a second


def has_whole_factors(layer: nn.Module) -> bool:
    """Whether a layer's adapter is a LoKr without a low-rank product: its rank is large for the
    layer."""
    low_rank = {"lokr_w1_a", "lokr_w2_a"}
    return method_of(layer) == "lokr" and not low_rank & parts_of(layer, "lokr").keys()


def trainable_parameters(model: nn.Module | StagedModel) -> dict[str, nn.Parameter]:
    """The trained parameters, by canonical name (`layers.0.self_attn.q.lora_A.weight`)."""
    return {canonical_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def module_of(parameter: str) -> str:
    """The module that a parameter belongs to, by canonical names: of an adapter, the layer that it
    adapts."""
    return re.sub(rf"{_PARTS}(\..*)?$|\.[^.]*$", "", parameter, count=1)


def is_adapter_name(name: str) -> bool:
    """Whether a parameter, by peft's name or the canonical one, belongs to an adapter."""
    return re.search(rf"{_PARTS}(\.|$)", name) is not None


def canonical_name(name: str) -> str:
    """A parameter's name without the parts that peft inserts."""
    return _PEFT_NAMES.sub(lambda match: match["part"] or "", name)


def _import_peft() -> tuple[Any, Any]:
    """The modules `peft` and `nn/peft_layers.py`."""
    with warnings.catch_warnings():
        # torchao, which peft imports, has an invalid escape sequence, about which Python warns when
        # it compiles the file.
        warnings.filterwarnings("ignore", "invalid escape sequence", DeprecationWarning)
        warnings.filterwarnings("ignore", "invalid escape sequence", SyntaxWarning)
        warnings.filterwarnings("ignore", '"\\\\.*" is an invalid escape sequence', SyntaxWarning)
        import peft

        from ditkit_core.nn import peft_layers
    return peft, peft_layers
