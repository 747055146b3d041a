"""Other models that files may be for, recognised by the names in them, so that a message can say
which, and what to do."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

UNTRAINED = "ditkit does not train that model; name a file of this one"


@dataclass(frozen=True, kw_only=True)
class OtherModel:
    """A model whose files people give by mistake."""

    name: str
    """`FLUX.1`, `a VAE`."""
    keys: str = ""
    """Pattern of names of tensors in its files; empty if they do not tell."""
    classes: str = ""
    """Pattern of its class in a config.json, of diffusers or transformers; empty if that does not
    tell."""
    header: str = ""
    """Pattern of what the header of its LoRA files calls it, in lower case; empty if that is
    unknown."""
    remedy: str = ""
    """What to do with it: `use the flux2 commands`; empty to name another file."""


_UNET = r"(^|lora_unet_|unet[._]|diffusion_model\.)(down|up|mid|input|output|middle)_block"
OTHER_MODELS = (
    OtherModel(
        name="a VAE",
        keys=r"^((encoder|decoder)\.(conv_in|conv1|conv_out|head|middle|mid_block|(down|up)(samples|_blocks))|"
        r"(post_)?quant_conv)\.",
        classes=r"^(AutoencoderKL|Autoencoder|.*VAE)",
    ),
    OtherModel(
        name="a text encoder",
        keys=r"\.SelfAttention\.|^token_embedding\.|^model\.(language_model\.)?(layers|embed_tokens)\.|"
        r"lora_te\d?_|text_model|text_encoder",
        classes=r"(EncoderModel|TextModel|ForCausalLM|ForConditionalGeneration)$",
    ),
    OtherModel(
        name="an image encoder",
        keys=r"^(vision_model\.)?embeddings\.(class|patch|position)_embedding|^visual\.",
        classes=r"Vision",
    ),
    OtherModel(
        name="Stable Diffusion 3",
        keys=r"joint_(transformer_)?blocks",
        classes=r"^SD3",
        header=r"^(sd_?3|stable-diffusion-3)",
        remedy=UNTRAINED,
    ),
    OtherModel(
        name="Stable Diffusion XL",
        # Of the blocks that SD 1 and 2 have as well, only XL has more than one transformer block in
        # each.
        keys=rf"^lora_te2_|{_UNET}.*transformer_blocks[._][1-9]",
        header=r"^(sdxl|stable-diffusion-xl)",
        remedy=UNTRAINED,
    ),
    OtherModel(
        name="a U-Net, as Stable Diffusion 1 and 2 have one",
        keys=_UNET,
        classes=r"^UNet",
        header=r"^(sd_v[12]|sd_1|sd_2|stable-diffusion-v[12])",
        remedy=UNTRAINED,
    ),
    OtherModel(
        name="Chroma",
        keys=r"distilled_guidance_layer",
        classes=r"^Chroma",
        header=r"^chroma",
        remedy=UNTRAINED,
    ),
    # Before HunyuanVideo, whose layers it has.
    OtherModel(
        name="FramePack", classes=r"^HunyuanVideoFramepack", header=r"^framepack", remedy=UNTRAINED
    ),
    OtherModel(
        name="HunyuanVideo",
        keys=r"individual_token_refiner|_attn_qkv.*_mod_linear|single_blocks[._]\d+[._]modulation[._]linear",
        classes=r"^HunyuanVideo",
        header=r"^(hunyuan[-_]?video|hv)",
        remedy=UNTRAINED,
    ),
    OtherModel(
        name="FLUX.1",
        # Modulation in each block, or more double blocks than FLUX.2 has; diffusers' names of one
        # projection a layer.
        keys=r"(img|txt)_mod[._]lin\b|(img|txt)_mod_lin|"
        r"single_(transformer_)?blocks[._]\d+[._](modulation|norm[._]linear|proj_mlp|proj_out)|"
        r"double_blocks[._](8|9|1\d)[._]",
        classes=r"^FluxTransformer",
        header=r"^flux([-_.]?1|_kontext)",
        remedy=UNTRAINED,
    ),
    OtherModel(
        name="LTX-2",
        keys=r"transformer_blocks[._]\d+[._](audio_|video_to_audio)",
        classes=r"^LTX2",
        header=r"^ltx[-_]?2(?!b)",
        remedy=UNTRAINED,
    ),
    OtherModel(name="CogVideoX", classes=r"^CogVideoX", header=r"^cogvideo", remedy=UNTRAINED),
    # Headers as kohya's programs, musubi-tuner and ai-toolkit write them, where these train the
    # model.
    OtherModel(
        name="HunyuanImage",
        classes=r"^HunyuanImage",
        header=r"^hunyuan[-_]?image",
        remedy=UNTRAINED,
    ),
    OtherModel(name="Lumina", classes=r"^Lumina", header=r"^lumina", remedy=UNTRAINED),
    OtherModel(name="HiDream", classes=r"^HiDream", header=r"^hidream", remedy=UNTRAINED),
    OtherModel(name="Kandinsky", classes=r"^Kandinsky[56]", header=r"^kandinsky", remedy=UNTRAINED),
    OtherModel(name="PixArt", classes=r"^PixArt", header=r"^pixart", remedy=UNTRAINED),
    OtherModel(name="Anima", header=r"^anima\b", remedy=UNTRAINED),
    OtherModel(name="Mochi", classes=r"^Mochi", remedy=UNTRAINED),
    OtherModel(name="Sana", classes=r"^Sana", remedy=UNTRAINED),
)
"""Models that are no family's, and the other parts of models, which are in folders next to the
transformer's."""

FAMILIES = {
    "flux2": OtherModel(
        name="FLUX.2",
        keys=r"double_stream_modulation",
        classes=r"^Flux2",
        header=r"^flux[-_.]?2",
        remedy="use the flux2 commands",
    ),
    "flux3": OtherModel(
        name="FLUX.3",
        keys=r"(early|single)_stream_modulations|mode_blocks[._]|"
        r"single_blocks[._]\d+[._](q_proj|attn_out|mlp_)|"
        r"single_transformer_blocks[._]\d+[._]ff[._]",
        classes=r"^Flux3",
        header=r"^flux[-_.]?3",
        remedy="use the flux3 commands",
    ),
    "krea2": OtherModel(
        name="Krea 2",
        keys=r"(^|[._])blocks[._]\d+[._]attn[._](w[qkvo]|gate)\b|txtfusion|text_fusion|"
        r"transformer_blocks[._]\d+[._]attn[._]to_gate\b",
        classes=r"^Krea2",
        header=r"^krea[-_]?2",
        remedy="use the krea2 commands",
    ),
    "ltx": OtherModel(
        name="LTX-Video",
        keys=r"caption_projection",
        classes=r"^LTXVideo",
        header=r"^ltx",
        remedy="use the ltx commands",
    ),
    "qwen": OtherModel(
        name="Qwen-Image 2.1",
        keys=r"img_mlp[._](gate_|proj|out)|txt_in[._]text_norm",
        classes=r"^QwenImage21",
        header=r"^qwen[-_]?image[-_]?2[._-]?1",
        remedy="use the qwen commands",
    ),
    "qwenimage": OtherModel(
        name="Qwen-Image",
        keys=r"transformer_blocks[._]\d+[._](img_mlp[._]net|txt_mlp|(img|txt)_mod)",
        classes=r"^QwenImage(?!21)",
        header=r"^qwen[-_]?image(?![-_]?2[._-]?1)",
        remedy="use the qwenimage commands",
    ),
    "wan": OtherModel(
        name="Wan",
        keys=r"(^|[._])(?<!transformer_)(vace_)?blocks[._]\d+[._]"
        r"(self_attn|cross_attn|attn1|attn2|ffn)",
        classes=r"^Wan",
        header=r"^wan",
        remedy="use the wan commands",
    ),
    "zimage": OtherModel(
        name="Z-Image",
        keys=r"(noise|context)_refiner|(^|[._])layers[._]\d+[._](attention|feed_forward)",
        classes=r"^ZImage",
        header=r"^z[-_]?image",
        remedy="use the zimage commands",
    ),
}
"""The families, whose files people give to each other's commands; by the prefix of the commands."""

_LAYERS = r"norm1_context[._]linear|ff_context[._]net"
_STREAMS = r"(double|single)_(stream_modulation|blocks)|single_transformer_blocks"
SEVERAL_TWO_STREAMS = OtherModel(
    # diffusers' names in several of them; FLUX.2 has at most eight such blocks.
    name="Stable Diffusion 3, FLUX.1, Qwen-Image or another of diffusers' models of two streams",
    keys=rf"{_LAYERS}|(?<!single_)transformer_blocks[._]([89]|[1-9]\d)[._]attn[._]add_",
    remedy="use the qwenimage commands for Qwen-Image; ditkit does not train the others",
)
"""Names of many blocks of two streams, for a family without such names."""
_ONE_PROJECTION_EACH = OtherModel(
    # FLUX.2 has one projection for all three, and FLUX.3 its other blocks under other names.
    name="FLUX.1 or Chroma, which ditkit does not train, or of FLUX.3",
    keys=r"single_transformer_blocks[._]\d+[._]attn[._]to_[qkv]([._]|$)",
    remedy="name another file, or use the flux3 commands for FLUX.3",
)
_FLUX = OtherModel(
    # Stable Diffusion 3 and Qwen-Image have no blocks of one stream.
    name="FLUX.2, or of FLUX.1 or Chroma, which ditkit does not train",
    keys=_STREAMS,
    classes=r"^Flux",
    remedy="name another file, or use the flux2 commands for FLUX.2",
)
TWO_STREAMS = OtherModel(
    name="FLUX.2 or Qwen-Image, or of FLUX.1, Stable Diffusion 3 or Chroma, which ditkit does not "
    "train",
    keys=r"transformer_blocks[._]\d+[._]attn[._](add_|to_)",
    remedy="name another file, or use the flux2 commands for FLUX.2 and the qwenimage commands for "
    "Qwen-Image",
)
"""Names that all models of two streams share, for a family without such names."""

_ARCHITECTURE_KEYS = ("modelspec.architecture", "ss_base_model_version")
"""Where the header of a LoRA names its model: the convention of Stability's model files, and
kohya's."""


def others_than(family: str, *, has_two_streams: bool = False) -> tuple[OtherModel, ...]:
    """The models that files may be for which a family is given by mistake: those that are no
    family's, all other families, and several that share names.

    Args:
        family: The prefix of its commands.
        has_two_streams: Whether its blocks have two streams in diffusers' names, so that these tell
            nothing.
    """
    families = (model for name, model in FAMILIES.items() if name != family)
    several = SEVERAL_TWO_STREAMS
    if has_two_streams:
        several = replace(SEVERAL_TWO_STREAMS, keys=_LAYERS)
    flux = {"flux2": (_ONE_PROJECTION_EACH,), "flux3": ()}.get(
        family, (_ONE_PROJECTION_EACH, _FLUX)
    )
    return (*OTHER_MODELS, *families, *flux, several)


def other_by_header(header: Mapping[str, str], others: Iterable[OtherModel]) -> OtherModel | None:
    """The other model that a file's header names; None if it names none."""
    words = [header[key].lower() for key in _ARCHITECTURE_KEYS if key in header]
    named = (model for model in others if model.header)
    return next(
        (model for model in named if any(re.search(model.header, word) for word in words)), None
    )


def other_by_keys(names: Collection[str], others: Iterable[OtherModel]) -> OtherModel | None:
    """The other model that names of tensors look like; None if they look like none."""
    return next(
        (
            model
            for model in others
            if model.keys and any(map(re.compile(model.keys).search, names))
        ),
        None,
    )


def looks_like(
    names: Collection[str], others: Sequence[OtherModel], header: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """The other model that a file is for, as a remark for a message, and the remedy; both empty if
    nothing tells.

    Args:
        names: Names of tensors.
        others: The models to choose from; the first that fits is taken.
        header: The file's header, which counts more than names.
    """
    if (other := other_by_header(header or {}, others)) is not None:
        return f" (its header names {other.name})", other.remedy
    other = other_by_keys(names, others)
    return (
        ("", "")
        if other is None
        else (f" (its names look like those of {other.name})", other.remedy)
    )


def other_by_id(hub_id: str, family: str, others: Iterable[OtherModel]) -> str:
    """The other model that a hub id names, as a remark for a message, with the remedy; empty if it
    names none."""
    name = hub_id.partition("/")[2].lower()  # repositories are called as headers call their models
    for model in others:
        if model.header and re.search(model.header, name):
            remedy = model.remedy or f"name a model of {family}"
            return f"; by its name it is {model.name}, and no model of {family}: {remedy}"
    return ""


def wrong_config(
    config: Mapping[str, Any], error: Exception, family: str, others: Iterable[OtherModel]
) -> str:
    """What a config.json describes that is not a family's model, as the end of a sentence; with the
    remedy if that is another family's.

    `error` is what reading it as the family's raised.
    """
    listed = config.get("architectures")
    kind = config.get("_class_name") or (listed[0] if isinstance(listed, list) and listed else "")
    kind = kind[:80] if isinstance(kind, str) else ""
    other = next(
        (model for model in others if model.classes and kind and re.search(model.classes, kind)),
        None,
    )
    if other is not None:
        remedy = other.remedy or f"name a model of {family}"
        return f"describes {other.name} ({kind}), and no model of {family}; {remedy}"
    reason = (
        f"it has no {error.args[0]}"
        if isinstance(error, KeyError)
        else " ".join(str(error).split())[:200]
    )
    return f"does not describe this model of {family} ({kind}{kind and ': '}{reason or type(error).__name__})"
