"""The language models that read captions: which of them some files contain, and its layers up to the last that is needed."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ditkit_core.errors import UserError, given_to_library
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.state_dict import StateDictNames, TensorSlice
from ditkit_core.nn.quantized_linear import without_scales
from ditkit_core.weights.frozen import read_config
from ditkit_core.weights.load import Advice, match
from ditkit_flux2.encoders.prompt import MISTRAL, QWEN, TextFamily

ATTENTION = "sdpa"
"""transformers' name of the attention kernel: features of padded rows depend on it, and the transformer attends to them."""

_PREFIXES = (
    "model.language_model.model.",
    "language_model.model.",
    "model.language_model.",
    "language_model.",
    "model.",
)
_PUBLISHED = {
    "Mistral Small 3": {
        "vocab_size": 131072,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e9,
        "sliding_window": None,
    },
    "Qwen3 8B": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    },
    "Qwen3 4B": {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    },
}
_KNOWN = re.compile(r"embed_tokens\.|layers\.(\d+)\.")
_MOST_FREQUENCIES = 2**16
_HEAD_DIM = 128  # of the Mistral models in single files; Qwen3's is the width of a norm
_GET = "set model.text_encoder to the text_encoder folder of FLUX.2, or a bf16 file of its Mistral or Qwen3"
_REMEDY = "set model.text_encoder to a whole folder or file of it"
_ADVICE = Advice(
    described_by="the part's configuration", if_unknown=_REMEDY, if_depth_differs=_REMEDY, if_shapes_differ=_REMEDY
)


def describe(source: SafetensorsSource) -> tuple[TextFamily, dict[str, Any]]:
    """The family that some files belong to, and the configuration of its language model up to the last layer that is needed.

    Raises:
        UserError: If they belong to neither family, or have too few layers.
    """
    if source.path.is_dir():
        family, config = _of_folder(source, read_config(source.path))
    else:
        family, config = _of_file(source)
    depth, needed = config.get("num_hidden_layers"), family.layers[-1]
    if not isinstance(depth, int) or not isinstance(config.get("hidden_size"), int):
        raise UserError(f"{source.path}: config.json has no num_hidden_layers or no hidden_size; fetch it again")
    if depth < needed:
        raise UserError(
            f"{source.path} has {depth} layers, and FLUX.2 reads the hidden states after layer {needed}; {_GET}"
        )
    settings = {name: value for name, value in config.items() if name != "layer_types"}  # a list as long as the depth
    return family, settings | {"num_hidden_layers": needed}


def published(text_dim: int) -> tuple[TextFamily, dict[str, Any]]:
    """The language model whose features are this wide, and its configuration up to the last layer that is needed.

    Raises:
        UserError: If there is none: the model was made for another encoder.
    """
    for name, config in _PUBLISHED.items():
        family = MISTRAL if name.startswith("Mistral") else QWEN
        if len(family.layers) * config["hidden_size"] == text_dim:
            return family, config | {"num_hidden_layers": family.layers[-1]}
    raise UserError(
        f"no published text encoder has features of width {text_dim}; set model.text_encoder to the model's own"
    )


def _of_folder(source: SafetensorsSource, config: Mapping[str, Any]) -> tuple[TextFamily, Mapping[str, Any]]:
    if config.get("model_type") == "mistral3" and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    families = {"mistral": MISTRAL, "qwen3": QWEN}
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in families:
        raise UserError(f"{source.path} contains a model of type {kind}, not a Mistral 3 or Qwen3; {_GET}")
    return families[kind], config


def _of_file(source: SafetensorsSource) -> tuple[TextFamily, Mapping[str, Any]]:
    """Family and configuration of a single file, read from its shapes; other fields are the same for all models of a family."""
    shapes = {_without_prefix(name): stored.shape for name, stored in source.tensors.items()}
    layer = "layers.0.self_attn"
    try:
        vocabulary, width = shapes["embed_tokens.weight"]
        (queries, _), (keys, _) = shapes[f"{layer}.q_proj.weight"], shapes[f"{layer}.k_proj.weight"]
        hidden, _ = shapes["layers.0.mlp.gate_proj.weight"]
    except (KeyError, ValueError) as error:
        raise UserError(f"{source.path} is not a Mistral 3 or Qwen3 text encoder; {_GET}") from error
    head_dim = shapes.get(f"{layer}.q_norm.weight", (_HEAD_DIM,))[0]
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
    if f"{layer}.q_norm.weight" in shapes:
        return QWEN, config | {"rms_norm_eps": 1e-6, "rope_theta": 1e6}
    return MISTRAL, config | {"rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None}


def _without_prefix(name: str) -> str:
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)


def build(family: TextFamily, config: Mapping[str, Any], device: torch.device) -> tuple[nn.Module, nn.Module]:
    """The language model on `meta` without its last norm, and the module of its rotary tables on a device.

    Raises:
        UserError: If no model can be built from the configuration.
    """
    model = build_layers(family, config)
    return model, rotary_of(model, device)


def build_layers(family: TextFamily, config: Mapping[str, Any]) -> nn.Module:
    """The language model on `meta` without its last norm.

    Raises:
        UserError: If no model can be built from the configuration.
    """
    from transformers import MistralConfig, MistralModel, Qwen3Config, Qwen3Model

    kinds = {MISTRAL.name: (MistralConfig, MistralModel), QWEN.name: (Qwen3Config, Qwen3Model)}
    make_config, make_model = kinds[family.name]
    with given_to_library(f"the text encoder's config.json does not describe a {family.name}", _GET):
        full = make_config.from_dict(dict(config), attn_implementation=ATTENTION)
        with torch.device("meta"):
            model = make_model(full)
    model.norm = nn.Identity()  # hidden states are taken before it
    return model.requires_grad_(False).eval()


def rotary_of(model: Any, device: torch.device) -> nn.Module:
    """The module that computes a model's rotary tables, on a device: files do not store its frequencies."""
    with given_to_library("the text encoder's config.json has no valid rotary embedding", _GET):
        with torch.device("meta"):
            num_frequencies = type(model.rotary_emb)(config=model.config).inv_freq.numel()
        if num_frequencies > _MOST_FREQUENCIES:
            raise ValueError(f"{num_frequencies} frequencies")
        return type(model.rotary_emb)(config=model.config).to(device)  # type: ignore[no-any-return]


def locate_weights(model: nn.Module, source: SafetensorsSource) -> dict[str, tuple[TensorSlice, ...]]:
    """Where the files store each weight of the model; other weights (vision, later layers, head) are ignored.

    Raises:
        UserError: If a weight is missing or mis-shaped, or a layer that is used has a weight that the model lacks.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in without_scales(model.state_dict(), model).items()}
    num_layers = len(model.get_submodule("layers"))

    def used(name: str) -> bool:
        key_match = _KNOWN.match(name)
        return key_match is not None and (key_match[1] is None or int(key_match[1]) < num_layers)

    def ignore(name: str) -> bool:
        return not used(_without_prefix(name)) or name.endswith(".rotary_emb.inv_freq")

    names = StateDictNames.renaming(prefixes=_PREFIXES, to_native=lambda name: name if used(name) else None)
    return match(source, names, wanted, ignore=ignore, advice=_ADVICE)
