"""Other models that files may be for, recognised by the names in them, so that a message can say which, and what to do."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OtherModel:
    """A model whose files people give by mistake."""

    name: str
    """`FLUX.1`, `a VAE`."""
    keys: str = ""
    """Pattern of names of tensors in its files; empty if they do not tell."""
    classes: str = ""
    """Pattern of its class in a config.json, of diffusers or transformers; empty if that does not tell."""
    remedy: str = ""
    """What to do with it: `use the flux2 commands`; empty to name another file."""


OTHER_MODELS = (
    OtherModel(
        name="a VAE",
        keys=r"^((encoder|decoder)\.(conv_in|conv1|conv_out|head|middle|mid_block|(down|up)(samples|_blocks))|(post_)?quant_conv)\.",
        classes=r"^(AutoencoderKL|Autoencoder|.*VAE)",
    ),
    OtherModel(
        name="a text encoder",
        keys=r"\.SelfAttention\.|^token_embedding\.|^model\.(language_model\.)?(layers|embed_tokens)\.|lora_te\d?_|text_model|text_encoder",
        classes=r"(EncoderModel|TextModel|ForCausalLM|ForConditionalGeneration)$",
    ),
    OtherModel(
        name="an image encoder",
        keys=r"^(vision_model\.)?embeddings\.(class|patch|position)_embedding|^visual\.",
        classes=r"Vision",
    ),
    OtherModel(name="Stable Diffusion 3", keys=r"joint_(transformer_)?blocks", classes=r"^SD3"),
    OtherModel(
        name="a U-Net, as Stable Diffusion has one",
        keys=r"(down|up|mid|input|output|middle)_block",
        classes=r"^UNet",
    ),
    OtherModel(name="HunyuanVideo", classes=r"^HunyuanVideo"),
    OtherModel(name="LTX-Video", classes=r"^LTX"),
    OtherModel(name="Qwen-Image", classes=r"^QwenImage"),
    OtherModel(name="CogVideoX", classes=r"^CogVideoX"),
)
"""Models that are no family's, and the other parts of models, which are in folders next to the transformer's; a family's own come first."""


def other_by_keys(names: Collection[str], others: Iterable[OtherModel]) -> OtherModel | None:
    """The other model that names of tensors look like; None if they look like none."""
    return next((model for model in others if model.keys and any(re.search(model.keys, name) for name in names)), None)


def looks_like(names: Collection[str], others: Iterable[OtherModel]) -> tuple[str, str]:
    """The other model that names look like, as a remark for a message, and the remedy; both empty if they look like none."""
    other = other_by_keys(names, others)
    return ("", "") if other is None else (f" (its names look like those of {other.name})", other.remedy)


def wrong_config(config: Mapping[str, Any], error: Exception, family: str, others: Iterable[OtherModel]) -> str:
    """What a config.json describes that is not a family's model, as the end of a sentence; with the remedy if that is another family's.

    `error` is what reading it as the family's raised.
    """
    listed = config.get("architectures")
    kind = config.get("_class_name") or (listed[0] if isinstance(listed, list) and listed else "")
    kind = kind[:80] if isinstance(kind, str) else ""
    other = next((model for model in others if model.classes and kind and re.search(model.classes, kind)), None)
    if other is not None:
        remedy = other.remedy or f"name a model of {family}"
        return f"describes {other.name} ({kind}), and no model of {family}; {remedy}"
    reason = f"it has no {error.args[0]}" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]
    return f"does not describe this model of {family} ({kind}{kind and ': '}{reason or type(error).__name__})"
