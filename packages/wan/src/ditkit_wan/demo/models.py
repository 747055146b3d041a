"""The tiny models that a demo's checkpoint is made of: the structure of a real one, few and narrow
layers, random weights."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.data.media.synthetic import isometry, random_model
from ditkit_core.families.demo import random_t5
from ditkit_core.families.demo_motions import CLIPS, FRAMES, SIDE, render_clip
from ditkit_wan.encoders.vae_kinds import WAN_2_2
from ditkit_wan.presets import MUSIC_LAYERS, SPEECH_LAYERS, MusicArch, SpeechArch, WanArch
from ditkit_wan.state_dict import to_official

HEADS, HEAD_DIM, LAYERS, FFN_DIM = 4, 24, 3, 192
TEXT_DIM = 32
IMAGE_DIM, IMAGE_TOKENS = 32, 257
SPEECH_DIM, SPEECH_STATES = 32, 3
VAE_DIMS: Mapping[str, Any] = {"base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
_LATENT_CHANNELS = 16


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Differences of a variant's checkpoint from the checkpoint of text to video."""

    pipeline: str = "WanPipeline"
    """Its pipeline class in diffusers."""
    transformer: str = "WanTransformer3DModel"
    """Class of its transformer in diffusers."""
    config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Fields of its transformer's configuration."""
    vae: Mapping[str, Any] = field(
        default_factory=lambda: MappingProxyType({"z_dim": _LATENT_CHANNELS})
    )
    """Fields of the VAE's configuration."""
    index: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Fields of `model_index.json`."""
    has_image_encoder: bool = False
    """Whether it has an image encoder."""
    has_audio_encoder: bool = False
    """Whether it has an audio encoder."""
    experts: int = 1
    """Number of its transformers."""
    ours: WanArch | None = None
    """Its architecture if diffusers has no such transformer: the checkpoint then is one file with
    official names, for which a run sets a preset."""


_WITH_IMAGE = {"in_channels": 36}
_WITH_CLIP = _WITH_IMAGE | {"image_dim": IMAGE_DIM, "added_kv_proj_dim": HEADS * HEAD_DIM}
_FROM_IMAGE = "WanImageToVideoPipeline"
_VAE_2_2 = {name: WAN_2_2[name] for name in WAN_2_2 if not name.startswith("latents")} | {
    "decoder_base_dim": 8
}
_OURS = WanArch(
    dim=HEADS * HEAD_DIM,
    ffn_dim=FFN_DIM,
    heads=HEADS,
    layers=LAYERS,
    text_dim=TEXT_DIM,
    image_dim=IMAGE_DIM,
)
VARIANTS: Mapping[str, Variant] = {
    "t2v": Variant(),
    "i2v": Variant(pipeline=_FROM_IMAGE, config=_WITH_CLIP, has_image_encoder=True),
    "flf2v": Variant(
        pipeline=_FROM_IMAGE,
        config=_WITH_CLIP | {"pos_embed_seq_len": 2 * IMAGE_TOKENS},
        has_image_encoder=True,
    ),
    "ti2v": Variant(
        config={"in_channels": 48, "out_channels": 48, "num_attention_heads": 8},
        vae=_VAE_2_2,
        index={"expand_timesteps": True},
    ),
    "t2v-a14b": Variant(index={"boundary_ratio": 0.875}, experts=2),
    "i2v-a14b": Variant(
        pipeline=_FROM_IMAGE, config=_WITH_IMAGE, index={"boundary_ratio": 0.9}, experts=2
    ),
    "vace": Variant(
        pipeline="WanVACEPipeline",
        transformer="WanVACETransformer3DModel",
        config={"vace_layers": [0, 2], "vace_in_channels": 96},
    ),
    "animate": Variant(
        pipeline="WanAnimatePipeline",
        transformer="WanAnimateTransformer3DModel",
        config=_WITH_CLIP
        | {
            "motion_encoder_channel_sizes": {"32": 6, "16": 8, "8": 8, "4": 8},
            "motion_encoder_size": 32,
            "motion_style_dim": 16,
            "motion_dim": 5,
            "motion_encoder_dim": 24,
            "face_encoder_hidden_dim": 32,
            "inject_face_latents_blocks": LAYERS,
        },
        has_image_encoder=True,
    ),
    "fun-control": Variant(
        ours=replace(_OURS, in_channels=48, ref_conv=True, fun=True), has_image_encoder=True
    ),
    "fun-control-camera": Variant(
        ours=replace(_OURS, in_channels=32, camera_channels=24, fun=True), has_image_encoder=True
    ),
    "wantodance": Variant(
        ours=replace(
            _OURS,
            in_channels=36,
            ref_conv=True,
            music=MusicArch(layers=MUSIC_LAYERS[:1], width=32, heads=2, ffn_dim=64, skipped=1),
        ),
        has_image_encoder=True,
    ),
    "s2v": Variant(
        ours=replace(
            _OURS,
            image_dim=0,
            speech=SpeechArch(
                layers=SPEECH_LAYERS[:1], features=SPEECH_DIM, states=SPEECH_STATES, tokens=2
            ),
        ),
        has_audio_encoder=True,
    ),
}
"""All variants, by name."""


def build_text_encoder(vocabulary_size: int) -> Any:
    """A two-layer UMT5 encoder."""
    return random_t5("UMT5", vocabulary_size, width=TEXT_DIM)


def build_image_encoder() -> Any:
    """A CLIP vision encoder of three layers that makes as many tokens per image as the real one."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=IMAGE_DIM,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=224,
        patch_size=14,
        hidden_act="gelu",
    )
    return random_model("image encoder", CLIPVisionModel, config)


def build_audio_encoder() -> Any:
    """A wav2vec2 of two narrow layers that makes as many rows per second as the real one."""
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    config = Wav2Vec2Config(
        hidden_size=SPEECH_DIM,
        num_hidden_layers=SPEECH_STATES - 1,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=[8] * 7,
        conv_bias=True,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        do_stable_layer_norm=True,
        feat_extract_norm="layer",
        mask_time_prob=0.0,
    )
    return random_model("audio encoder", Wav2Vec2Model, config)


def build_vae(variant: Variant) -> Any:
    """A Wan VAE of few channels whose latents of some of the demo's clips have mean 0 and variance
    1 in every channel; only to be read."""
    return _vae(json.dumps({**variant.vae, **VAE_DIMS}))


@cache  # encoding the clips takes most of the time in which a checkpoint is written
def _vae(config: str) -> Any:
    from diffusers import AutoencoderKLWan

    vae = random_model("vae", AutoencoderKLWan, **json.loads(config)).requires_grad_(False)
    latents = torch.cat(
        [vae.encode(clip[None]).latent_dist.mean[0].flatten(1) for clip in _clip_pixels()], dim=1
    )
    vae.register_to_config(
        latents_mean=_rounded(latents.mean(dim=1)), latents_std=_rounded(latents.std(dim=1))
    )
    return vae


def build_transformer(variant: Variant, expert: int = 0) -> Any:
    """A Wan transformer of three narrow blocks; each expert of a variant has its own weights."""
    import diffusers

    settings = {
        "num_attention_heads": HEADS,
        "attention_head_dim": HEAD_DIM,
        "num_layers": LAYERS,
        "ffn_dim": FFN_DIM,
        "in_channels": _LATENT_CHANNELS,
        "out_channels": _LATENT_CHANNELS,
        "text_dim": TEXT_DIM,
        "rope_max_seq_len": 1024,
    } | dict(variant.config)
    name = "transformer" if expert == 0 else f"transformer {expert}"
    model = random_model(name, getattr(diffusers, variant.transformer), **settings)
    dim, channels = settings["num_attention_heads"] * HEAD_DIM, settings["out_channels"]
    with torch.no_grad():
        model.condition_embedder.time_embedder.linear_2.weight.mul_(0.5)
        model.condition_embedder.time_proj.weight.mul_(0.3)
        for block in model.blocks:
            block.scale_shift_table[:, [2, 5]] += 1.0  # the two gates
        # Without its blocks the model would predict the noised latents: near the truth where noise
        # is strong.
        columns = isometry(dim, 4 * channels, "patch").unflatten(1, (channels, 1, 2, 2))
        model.patch_embedding.weight[:, :channels] = columns * math.sqrt(dim / (4 * channels))
        model.proj_out.weight.copy_(columns.permute(2, 3, 4, 1, 0).flatten(0, 3))
    return model


def build_official(arch: WanArch) -> dict[str, Tensor]:
    """The weights of a transformer that diffusers has no class of, by their official names."""
    from ditkit_core.models.precision import Precision
    from ditkit_wan.model.transformer import WanTransformer

    model = random_model("transformer", WanTransformer, arch, Precision(matmul=torch.float32))
    return {to_official(name): tensor.contiguous() for name, tensor in model.state_dict().items()}


def _clip_pixels() -> list[Float[Tensor, "3 frames height width"]]:
    """Every fourth of the demo's clips at the training size, in [-1, 1], before encoding to mp4."""
    clips = []
    for clip in CLIPS[::4]:
        frames = (
            torch.from_numpy(render_clip(clip)[:FRAMES]).permute(0, 3, 1, 2).float() / 127.5 - 1
        )
        resized = torch.nn.functional.interpolate(
            frames, size=(SIDE, SIDE), mode="bilinear", antialias=True
        )
        clips.append(resized.transpose(0, 1))
    return clips


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 6) for value in values]
