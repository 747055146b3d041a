"""The language models that read captions: which of them some files contain, and its layers up to
the last that is needed."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from ditkit_core.errors import UserError, given_to_library
from ditkit_core.families.language_models import TextEncoding, TextFamily, VisionTower
from ditkit_core.families.vision_tower import build_tower
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.meta import on_meta
from ditkit_core.models.state_dict import StateDictNames, TensorSlice
from ditkit_core.nn.quantized_linear import without_scales
from ditkit_core.weights.frozen import read_config
from ditkit_core.weights.load import Advice, match

ATTENTION = "sdpa"
"""transformers' name of the attention kernel: features of padded rows depend on it, and a
transformer may attend to them."""

_PREFIXES = (
    "model.language_model.model.",
    "language_model.model.",
    "model.language_model.",
    "language_model.",
    "model.",
)
_KNOWN = re.compile(r"embed_tokens\.|layers\.(\d+)\.|norm\.")
_MOST_FREQUENCIES = 2**16
_REMEDY = "set model.text_encoder to a whole folder or file of it"
_ADVICE = Advice(described_by="the part's configuration", remedy=_REMEDY)


def describe(
    encoding: TextEncoding, source: SafetensorsSource
) -> tuple[TextFamily, dict[str, Any]]:
    """The language model that some files contain, its layers counted from the start, and its
    configuration up to the last layer that is needed."""
    if source.path.is_dir():
        family, config = _of_folder(encoding, source, read_config(source.path))
    else:
        family, config = _of_file(encoding, source)
    depth = config.get("num_hidden_layers")
    if not isinstance(depth, int) or not isinstance(config.get("hidden_size"), int):
        raise UserError(
            f"{source.path}: config.json has no num_hidden_layers or no hidden_size; fetch it again"
        )
    family, needed = _counted(family, depth)
    if family.vision is not None:
        config = {
            **config,
            "vision_config": _vision_of(family.vision, source, config["hidden_size"]),
        }
    if depth < needed:
        raise UserError(
            f"{source.path} has {depth} layers, and {encoding.reader} reads the hidden states "
            f"after layer {needed}; {encoding.remedy}"
        )
    # a list as long as the depth
    settings = {name: value for name, value in config.items() if name != "layer_types"}
    return family, settings | {"num_hidden_layers": needed}


def _vision_of(vision: VisionTower, source: SafetensorsSource, width: int) -> Mapping[str, Any]:
    """The configuration of the tower next to a text's; of a single file, the published one."""
    stored = read_config(source.path) if source.path.is_dir() else {}
    config = stored.get("vision_config", vision.published.get(width))
    if not isinstance(config, Mapping):
        raise UserError(
            f"{source.path} has no vision_config and no published tower has rows of width {width}; "
            f"{_REMEDY}"
        )
    return config


def _counted(family: TextFamily, depth: int) -> tuple[TextFamily, int]:
    """The family with its layers counted from the start, for a model of this depth, and the last of
    them."""
    # hidden_states has depth + 1 entries, the first of them the embedding's.
    layers = tuple(depth + 1 + layer if layer < 0 else layer for layer in family.layers)
    counted = replace(family, layers=layers, last_norm=-1 in family.layers)
    return family if layers == family.layers else counted, max(layers[-1], 1)


def published(encoding: TextEncoding, text_dim: int) -> tuple[TextFamily, dict[str, Any]]:
    """The language model whose features are this wide, and its configuration up to the last layer
    that is needed."""
    for family in encoding.models:
        for config in family.published.values():
            if len(family.layers) * config["hidden_size"] == text_dim:
                counted, needed = _counted(family, config["num_hidden_layers"])
                vision = family.vision and family.vision.published[config["hidden_size"]]
                sees = {"vision_config": vision} if vision else {}
                return counted, {**config, **sees, "num_hidden_layers": needed}
    raise UserError(
        f"no published text encoder has features of width {text_dim}; set model.text_encoder to "
        f"the model's own"
    )


def _of_folder(
    encoding: TextEncoding, source: SafetensorsSource, config: Mapping[str, Any]
) -> tuple[TextFamily, Mapping[str, Any]]:
    families = {family.model_type: family for family in encoding.models}
    nested = config.get("text_config")
    # of a model that sees and reads
    if isinstance(nested, dict) and nested.get("model_type") in list(families):
        config = nested
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in families:
        raise UserError(
            f"{source.path} contains a model of type {kind}, not a {_choice(encoding)}; "
            f"{encoding.remedy}"
        )
    return families[kind], config


def _choice(encoding: TextEncoding) -> str:
    return " or ".join(family.name for family in encoding.models)


def _of_file(
    encoding: TextEncoding, source: SafetensorsSource
) -> tuple[TextFamily, Mapping[str, Any]]:
    """Family and configuration of a single file, read from its shapes; other fields are the same
    for all models of a family."""
    shapes = {_without_prefix(name): stored.shape for name, stored in source.tensors.items()}
    layer = "layers.0.self_attn"
    try:
        vocabulary, width = shapes["embed_tokens.weight"]
        (queries, _), (keys, _) = shapes[f"{layer}.q_proj.weight"], shapes[f"{layer}.k_proj.weight"]
        hidden, _ = shapes["layers.0.mlp.gate_proj.weight"]
    except (KeyError, ValueError) as error:
        raise UserError(
            f"{source.path} is not a {_choice(encoding)} text encoder; {encoding.remedy}"
        ) from error
    norms_heads = f"{layer}.q_norm.weight" in shapes
    family = next((family for family in encoding.models if family.norms_heads == norms_heads), None)
    if family is None:
        raise UserError(
            f"{source.path} is not a {_choice(encoding)} text encoder; {encoding.remedy}"
        )
    head_dim = shapes[f"{layer}.q_norm.weight"][0] if norms_heads else family.unstated["head_dim"]
    config = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": hidden,
        "head_dim": head_dim,
        "num_attention_heads": queries // head_dim,
        "num_key_value_heads": keys // head_dim,
        "num_hidden_layers": len(
            {key_match[1] for name in shapes if (key_match := _KNOWN.match(name)) and key_match[1]}
        ),
    }
    return family, {**family.unstated, **config}


def _without_prefix(name: str) -> str:
    return next(
        (name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name
    )


def build_layers(family: TextFamily, config: Mapping[str, Any]) -> nn.Module:
    """The language model on `meta`, without its last norm where hidden states are taken before
    it, and with its tower, `visual`, where it sees."""
    vision = config.get("vision_config")
    config = {name: value for name, value in config.items() if name != "vision_config"}
    make_config, make_model = (
        resolve_name(f"transformers:{family.kind}{part}") for part in ("Config", "Model")
    )
    with given_to_library(
        f"the text encoder's config.json does not describe a {family.name}", _REMEDY
    ):
        full = make_config.from_dict(dict(config), attn_implementation=ATTENTION)
        with on_meta():
            model = make_model(full)
            if family.vision is not None and vision is not None:
                model.visual = build_tower(family.vision, vision, ATTENTION)
    if not family.last_norm:
        model.norm = nn.Identity()
    return model.requires_grad_(False).eval()


def rotary_of(model: Any, device: torch.device) -> nn.Module:
    """The module that computes a model's rotary tables, on a device: files do not store its
    frequencies."""
    with given_to_library("the text encoder's config.json has no valid rotary embedding", _REMEDY):
        with torch.device("meta"):
            num_frequencies = type(model.rotary_emb)(config=model.config).inv_freq.numel()
        if num_frequencies > _MOST_FREQUENCIES:
            raise ValueError(f"{num_frequencies} frequencies")
        return type(model.rotary_emb)(config=model.config).to(device)


def locate_weights(
    model: nn.Module, source: SafetensorsSource
) -> dict[str, tuple[TensorSlice, ...]]:
    """Where the files store each weight of the model and of its tower; other weights (a tower that
    it has not, later layers, head) are ignored."""
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in without_scales(model.state_dict(), model).items()
    }
    tower = {
        name.removeprefix("visual."): shape
        for name, shape in shapes.items()
        if name.startswith("visual.")
    }
    wanted = {name: shape for name, shape in shapes.items() if not name.startswith("visual.")}
    num_layers = len([*model.get_submodule("layers").children()])

    def used(name: str) -> bool:
        key_match = _KNOWN.match(name)
        if name.startswith("norm."):
            return name in wanted
        return key_match is not None and (key_match[1] is None or int(key_match[1]) < num_layers)

    def ignore(name: str) -> bool:
        return not used(_without_prefix(name)) or name.endswith(".rotary_emb.inv_freq")

    names = StateDictNames.renaming(
        prefixes=_PREFIXES, to_native=lambda name: name if used(name) else None
    )
    located = match(source, names, wanted, ignore=ignore, advice=_ADVICE)
    if tower:
        # Apart: files have other prefixes in front of it, `model.visual.` or `visual.`.
        names = StateDictNames.renaming(
            prefixes=("model.visual.", "visual."),
            to_native=lambda name: name if name in tower else None,
        )
        visual = match(
            source, names, tower, ignore=lambda name: "visual." not in name, advice=_ADVICE
        )
        located |= {f"visual.{name}": parts for name, parts in visual.items()}
    return located
