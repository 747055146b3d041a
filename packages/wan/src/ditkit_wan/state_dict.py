"""Wan's parameter names: ours, the official files' (which ComfyUI keeps), and diffusers'.

Source: `WanModel` in Wan-Video/Wan2.1, wan/modules/model.py and vace_model.py; the diffusers names
come from its `WanTransformer3DModel`, `WanVACETransformer3DModel` and
`WanAnimateTransformer3DModel`. All programs name the additional modules of the Fun models and
WanToDance as in modelscope/DiffSynth-Studio, diffsynth/models/wan_video_dit.py, and those of S2V as
in Wan-Video/Wan2.2.

Ours are the official names with two changes: modules that run before the blocks are below `embed`,
and the blocks are in `layers`. The forms differ only in names of modules, so one table serves both
directions; of Animate they differ in more, which is at the end.
"""

import re
from collections.abc import Mapping

from torch import Tensor

from ditkit_core.models.other_models import TWO_STREAMS, OtherModel, others_than
from ditkit_core.models.state_dict import StateDictNames, TensorSlice
from ditkit_wan.model.variants.animate import blur_kernel
from ditkit_wan.presets import FACE_LAYERS_APART, MUSIC_LAYERS, SPEECH_LAYERS, AnimateArch

# official -> diffusers, modules and single parameters of one block
_IN_BLOCK = {
    "modulation": "scale_shift_table",
    **{
        f"{ours}.{inner}": f"{theirs}.{their_inner}"
        for ours, theirs in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for inner, their_inner in {
            "q": "to_q",
            "k": "to_k",
            "v": "to_v",
            "o": "to_out.0",
            "norm_q": "norm_q",
            "norm_k": "norm_k",
        }.items()
    },
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "cross_attn.norm_k_img": "attn2.norm_added_k",
    # The one affine norm is before the cross-attention: official code counts it third, diffusers
    # second.
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}

# official -> diffusers, before the blocks
_EMBED = {
    "patch_embedding": "patch_embedding",
    "vace_patch_embedding": "vace_patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
}

# official -> diffusers, after the blocks
_HEAD = {"head.modulation": "scale_shift_table", "head.head": "proj_out"}

# ours -> official, of models that diffusers lacks: the official names are used for its form too
_CONTROLS = {
    **{
        f"embed.{module}": module
        for module in ("ref_conv", "patch_embedding_global", "control_adapter.conv")
    },
    **{
        f"embed.{module}": module
        for module in (f"control_adapter.residual_blocks.0.conv{number}" for number in (1, 2))
    },
    **{
        f"embed.img_emb_refimage.proj.{number}": f"img_emb_refimage.proj.{number}"
        for number in (0, 1, 3, 4)
    },
    "embed.music.projection": "music_projection",
    **{
        f"embed.music.encoder.{number}.{inner}": f"music_encoder.{number}.{inner}"
        for number in (0, 1)
        for inner in (
            "self_attn.in_proj_weight",
            "self_attn.in_proj_bias",
            "self_attn.out_proj",
            "linear1",
            "linear2",
            "norm1",
            "norm2",
        )
    },
    **{
        f"layers.{layer}.music.{inner}": f"music_injector.injector.{number}.{inner}"
        for number, layer in enumerate(MUSIC_LAYERS)
        for inner in ("q", "k", "v", "o", "norm_q", "norm_k")
    },
    **{f"head.head_global.{inner}": f"head_global.{inner}" for inner in ("modulation", "head")},
    **{
        f"embed.speech.{inner}": inner
        for inner in (
            "cond_encoder",
            "trainable_cond_mask",
            *(f"frame_packer.{name}" for name in ("proj", "proj_2x", "proj_4x")),
            "casual_audio_encoder.weights",
            "casual_audio_encoder.encoder.padding_tokens",
            "casual_audio_encoder.encoder.final_linear",
            *(
                f"casual_audio_encoder.encoder.{name}.conv"
                for name in ("conv1_local", "conv1_global", "conv2", "conv3")
            ),
        )
    },
    **{
        f"layers.{layer}.audio.injector.{inner}": f"audio_injector.injector.{number}.{inner}"
        for number, layer in enumerate(SPEECH_LAYERS)
        for inner in ("q", "k", "v", "o", "norm_q", "norm_k")
    },
    **{
        f"layers.{layer}.audio.adain.linear": f"audio_injector.injector_adain_layers.{number}.linear"
        for number, layer in enumerate(SPEECH_LAYERS)
    },
}

# ours -> (official, diffusers), of Animate's encoder of a face's motion
_PYRAMID = "enc.net_app.convs"
_RESIDUALS = len(AnimateArch().face_channels) - 1
_MOTION = {
    "directions": ("dec.direction.weight", "motion_synthesis_weight"),
    "conv_in.weight": (f"{_PYRAMID}.0.0.weight", "conv_in.weight"),
    "conv_in.bias": (f"{_PYRAMID}.0.1.bias", "conv_in.act_fn.bias"),
    "conv_out.weight": (f"{_PYRAMID}.{_RESIDUALS + 1}.weight", "conv_out.weight"),
    **{
        f"motion_network.{number}": (f"enc.fc.{number}", f"motion_network.{number}")
        for number in range(5)
    },
    **{
        f"res_blocks.{number}.{ours}": (
            f"{_PYRAMID}.{number + 1}.{official}",
            f"res_blocks.{number}.{theirs}",
        )
        for number in range(_RESIDUALS)
        for ours, official, theirs in (
            ("conv1.weight", "conv1.0.weight", "conv1.weight"),
            ("conv1.bias", "conv1.1.bias", "conv1.act_fn.bias"),
            ("conv2.weight", "conv2.1.weight", "conv2.weight"),
            ("conv2.bias", "conv2.2.bias", "conv2.act_fn.bias"),
            ("conv_skip.weight", "skip.1.weight", "conv_skip.weight"),
        )
    },
}

# official -> diffusers, of Animate's face adapters; keys and values are two tensors in diffusers
_FACE = {"linear1_q": "to_q", "linear2": "to_out", "q_norm": "norm_q", "k_norm": "norm_k"}
_ADAPTERS = range(len(AnimateArch().layers))
_ANIMATE = [
    *(
        (
            f"embed.animate.motion_encoder.{ours}",
            f"motion_encoder.{official}",
            f"motion_encoder.{theirs}",
        )
        for ours, (official, theirs) in _MOTION.items()
    ),
    *(
        (
            f"embed.animate.face_encoder.{conv}.conv",
            f"face_encoder.{conv}.conv",
            f"face_encoder.{conv}",
        )
        for conv in ("conv1_local", "conv2", "conv3")
    ),
    *(
        (f"embed.animate.{name}", name, name)
        for name in ("pose_patch_embedding", "face_encoder.out_proj", "face_encoder.padding_tokens")
    ),
    *(
        (
            f"layers.{FACE_LAYERS_APART * number}.face.{official}",
            f"face_adapter.fuser_blocks.{number}.{official}",
            f"face_adapter.{number}.{theirs}",
        )
        for number in _ADAPTERS
        for official, theirs in _FACE.items()
    ),
    *(
        (
            f"layers.{FACE_LAYERS_APART * number}.face.linear1_kv",
            *[f"face_adapter.fuser_blocks.{number}.linear1_kv"] * 2,
        )
        for number in _ADAPTERS
    ),
]

# Ours, official, diffusers; `*` stands for the block's number.
_FORMS = (
    [
        (f"layers.*.{official}", f"blocks.*.{official}", f"blocks.*.{theirs}")
        for official, theirs in _IN_BLOCK.items()
    ]
    + [
        (f"vace_blocks.*.{name}", f"vace_blocks.*.{name}", f"vace_blocks.*.{theirs}")
        for name, theirs in (_IN_BLOCK | {"after_proj": "proj_out"}).items()
    ]
    # Official files have this in the first VACE block; it makes the stream, and that is part of
    # `embed` here.
    + [("embed.vace_before_proj", "vace_blocks.0.before_proj", "vace_blocks.0.proj_in")]
    + [(f"embed.{official}", official, theirs) for official, theirs in _EMBED.items()]
    + [(official, official, theirs) for official, theirs in _HEAD.items()]
    + [(ours, official, official) for ours, official in _CONTROLS.items()]
    + _ANIMATE
)
_TO_OFFICIAL = {ours: official for ours, official, _ in _FORMS}
_TO_DIFFUSERS = {ours: theirs for ours, _, theirs in _FORMS}
_TO_NATIVE = {theirs: ours for ours, _, theirs in _FORMS} | {
    official: ours for ours, official, _ in _FORMS
}

_BLOCK = re.compile(r"(layers|blocks|vace_blocks)\.(\d+)\.")


def _translate(name: str, table: Mapping[str, str]) -> str | None:
    """Look a name up in a table of modules and single parameters: weights and biases follow their
    module."""
    block = _BLOCK.match(name)
    for pattern in (name, _BLOCK.sub(r"\1.*.", name, count=1)):
        module, _, leaf = pattern.rpartition(".")
        if pattern in table:
            translated = table[pattern]
        elif leaf in ("weight", "bias") and module in table:
            translated = f"{table[module]}.{leaf}"
        else:
            continue
        return translated.replace("*", block[2], 1) if block else translated
    return None


def to_native(name: str) -> str | None:
    """Our name of an official or diffusers parameter, without prefix; None if neither form has
    it."""
    return _translate(name, _TO_NATIVE)


def to_official(name: str) -> str:
    """The official name, which ComfyUI uses too, of a parameter of ours."""
    official = _translate(name, _TO_OFFICIAL)
    assert official is not None, name
    return official


def to_diffusers(name: str) -> str:
    """The diffusers name of a parameter of ours."""
    theirs = _translate(name, _TO_DIFFUSERS)
    assert theirs is not None, name
    return theirs


_FACE_KV = re.compile(r"layers\.(\d+)\.face\.linear1_kv\.(weight|bias)")
_FACE_K_OR_V = re.compile(r"face_adapter\.(\d+)\.to_([kv])\.(weight|bias)")
_BLURRED = re.compile(rf"(motion_encoder\.{re.escape(_PYRAMID)}\.\d+\.(conv2|skip))\.1\.weight")
_PYRAMID_BIAS = re.compile(rf"motion_encoder\.{re.escape(_PYRAMID)}\..*\.bias")


def _to_slices(name: str) -> tuple[TensorSlice, ...] | None:
    """`StateDictNames.to_native`: diffusers has keys and values of a face in two tensors, and
    official files have the blur's kernels."""
    if match := _FACE_K_OR_V.fullmatch(name):
        number, part, leaf = match.groups()
        return (
            TensorSlice(
                f"layers.{FACE_LAYERS_APART * int(number)}.face.linear1_kv.{leaf}",
                "kv".index(part),
                2,
            ),
        )
    if name.endswith(".0.kernel") and _BLURRED.fullmatch(
        f"{name.removesuffix('.0.kernel')}.1.weight"
    ):
        return ()
    native = to_native(name)
    return None if native is None else (TensorSlice(native),)


def _in_diffusers(name: str) -> tuple[TensorSlice, ...]:
    if match := _FACE_KV.fullmatch(name):
        number, leaf = match.groups()
        return tuple(
            TensorSlice(f"face_adapter.{int(number) // FACE_LAYERS_APART}.to_{part}.{leaf}")
            for part in "kv"
        )
    return (TensorSlice(to_diffusers(name)),)


def _stored(form: str, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    """`StateDictNames.stored`: official files have biases of images as [1, channels, 1, 1], and
    kernels of blurs."""
    if form != "official":
        return {name: tensor}
    if match := _BLURRED.fullmatch(name):
        return {name: tensor, f"{match[1]}.0.kernel": blur_kernel(tensor.device, tensor.dtype)}
    return {name: tensor[None, :, None, None] if _PYRAMID_BIAS.fullmatch(name) else tensor}


NAMES = StateDictNames(
    to_native=_to_slices,
    from_native={
        "official": lambda name: (TensorSlice(to_official(name)),),
        "diffusers": _in_diffusers,
    },
    stored=_stored,
    prefixes=("model.diffusion_model.", "diffusion_model.", "model."),
    others=(
        *others_than("wan"),
        TWO_STREAMS,
        OtherModel(name="another transformer of diffusers", keys=r"transformer_blocks"),
    ),
)
