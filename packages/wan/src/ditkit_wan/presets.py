"""Wan architectures by name. The tests have the parameter counts of the official code."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

PATCH = (1, 2, 2)
"""Latent frames, rows and columns of one token, in all models."""


MUSIC_LAYERS = (0, 4, 8, 12, 16, 20, 24, 27)
"""Blocks of WanToDance that end with a music layer; its files number these layers by their index in
this list."""


@dataclass(frozen=True, kw_only=True)
class MusicArch:
    """Sizes of the music layers of WanToDance."""

    layers: tuple[int, ...] = MUSIC_LAYERS
    """Blocks that end with a music layer, in order: `MUSIC_LAYERS`, or its first ones for a model
    with fewer blocks."""
    features: int = 35
    """Features of music per row."""
    width: int = 256
    """Width of the music encoder."""
    heads: int = 4
    ffn_dim: int = 1024
    skipped: int = 9
    """The block that the negative side of guidance leaves out."""
    fps: float = 30.0
    """Frames per second of clips: 30 for clips that are generated between keyframes, 30 / k for
    keyframes."""

    @property
    def keyframes(self) -> bool:
        """Whether clips are keyframes of a whole piece of music."""
        return self.fps < 30


SPEECH_LAYERS = (0, 4, 8, 12, 16, 20, 24, 27, 30, 33, 36, 39)
"""Blocks of S2V after which the audio is injected; its files number the injectors by their index in
this list."""

FACE_LAYERS_APART = 5
"""Of this many blocks of Animate, the first ends with a face adapter; its files number the adapters
in order."""


@dataclass(frozen=True, kw_only=True)
class SpeechArch:
    """Sizes of what S2V adds: its audio encoder, and the injectors after some blocks."""

    layers: tuple[int, ...] = SPEECH_LAYERS
    """Blocks after which the audio is injected, in order: `SPEECH_LAYERS`, or its first ones for a
    model with fewer blocks."""
    features: int = 1024
    """Width of wav2vec2's hidden states."""
    states: int = 25
    """Number of these hidden states: the input of wav2vec2's first layer, and the output of
    each."""
    tokens: int = 4
    """Tokens of the audio per latent frame; a learned one is added."""
    pose_channels: int = 16
    """Channels of the latents of a video of poses."""


@dataclass(frozen=True, kw_only=True)
class AnimateArch:
    """Sizes of what Animate adds: its pose embedding, its encoder of a face's motion, and the
    adapters in some blocks."""

    layers: tuple[int, ...] = tuple(range(0, 40, FACE_LAYERS_APART))
    """Blocks that end with a face adapter, in order."""
    pose_channels: int = 16
    """Channels of the latents of a video of poses."""
    face_channels: tuple[int, ...] = (32, 64, 128, 256, 512, 512, 512, 512)
    """Channels of the motion encoder at the size of a face's pictures, at half of it, and so on
    down to 4 pixels."""
    style: int = 512
    """Width of the layers after these."""
    motion: int = 20
    """Number of directions of motion."""
    motion_dim: int = 512
    """Width of a direction."""
    width: int = 1024
    """Width of the face encoder."""
    tokens: int = 4
    """Tokens of a face per latent frame; a learned one is added."""

    @property
    def face_size(self) -> int:
        """Height and width of a face's pictures in pixels."""
        return 4 * 2 ** (len(self.face_channels) - 1)


@dataclass(frozen=True, kw_only=True)
class WanArch:
    """Sizes and conditions of one Wan transformer."""

    dim: int
    ffn_dim: int
    heads: int
    layers: int
    in_channels: int = 16
    """Channels of the patch embedding: noised latents, followed by `y` if this is more than
    `out_channels`."""
    out_channels: int = 16
    """Channels of latents."""
    text_dim: int = 4096
    text_tokens: int = 512
    """Text is zero-padded to this many rows, and blocks attend to the padding too, as in the
    authors' training."""
    freq_dim: int = 256
    patch: tuple[int, int, int] = PATCH
    eps: float = 1e-6
    image_dim: int = 0
    """Width of CLIP's image tokens, for which blocks have separate keys and values; 0 for a model
    without image tokens."""
    image_positions: int = 0
    """Image tokens with a position embedding, of a first and a last image; 0 for one image without
    positions."""
    boundary: float = 0.0
    """Noise level from which on the high-noise expert is used; 0 for a model with one
    transformer."""
    token_times: bool = False
    """Whether a first frame may be given clean, with its tokens at t = 0; such a model has the Wan
    2.2 VAE."""
    vace_layers: tuple[int, ...] = ()
    """Blocks after which a VACE block adds its hint, in order; the first is 0."""
    vace_channels: int = 96
    """Channels of the condition of VACE blocks."""
    ref_conv: bool = False
    """Whether a reference image may be put in front of the clip as a frame."""
    camera_channels: int = 0
    """Channels of a camera's rays, 6 for each of the four frames of a latent frame; 0 for a model
    without camera control."""
    music: MusicArch | None = None
    """The music layers of WanToDance; None for all other models."""
    speech: SpeechArch | None = None
    """What S2V adds; None for all other models."""
    animate: AnimateArch | None = None
    """What Animate adds; None for all other models. Its first latent frame is a reference image."""
    fun: bool = False
    """Whether it is a model of VideoX-Fun. Its samples have other defaults, and some have the
    shapes of a model of Wan's authors."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def latent_stride(self) -> int:
        """Pixels to a row or column of latents."""
        return 16 if self.token_times else 8

    @property
    def reference_channels(self) -> int:
        """Channels of the latents of a reference image, as the model's VAE makes them."""
        if self.speech:  # embedded like the clip
            return self.out_channels
        return 48 if self.token_times else 16

    @property
    def image_tokens(self) -> int:
        """CLIP tokens of the model's images, 257 per image; 0 if it takes none."""
        return (self.image_positions or 257) if self.image_dim else 0


_1_3B = WanArch(dim=1536, ffn_dim=8960, heads=12, layers=30)
_14B = WanArch(dim=5120, ffn_dim=13824, heads=40, layers=40)
_I2V_14B = replace(_14B, in_channels=36, image_dim=1280)
_I2V_A14B = replace(_14B, in_channels=36, boundary=0.9)
_5B = WanArch(
    dim=3072, ffn_dim=14336, heads=24, layers=30, in_channels=48, out_channels=48, token_times=True
)
_VACE_14B = replace(_14B, vace_layers=tuple(range(0, 40, 5)))

PRESETS = {
    "t2v-1.3b": _1_3B,
    "t2v-14b": _14B,
    "i2v-14b-480p": _I2V_14B,
    "i2v-14b-720p": _I2V_14B,
    "flf2v-14b-720p": replace(_I2V_14B, image_positions=514),
    "vace-1.3b": replace(_1_3B, vace_layers=tuple(range(0, 30, 2))),
    "vace-14b": _VACE_14B,
    "ti2v-5b": _5B,
    "t2v-a14b": replace(_14B, boundary=0.875),
    "i2v-a14b": _I2V_A14B,
    "s2v-14b": replace(_14B, speech=SpeechArch()),
    "animate-14b": replace(_I2V_14B, animate=AnimateArch()),
    "fun-v1.1-inp-1.3b": replace(_1_3B, in_channels=36, image_dim=1280, fun=True),
    "fun-v1.1-inp-14b": replace(_I2V_14B, fun=True),
    "fun-v1.1-control-1.3b": replace(
        _1_3B, in_channels=48, image_dim=1280, ref_conv=True, fun=True
    ),
    "fun-v1.1-control-14b": replace(_14B, in_channels=48, image_dim=1280, ref_conv=True, fun=True),
    "fun-v1.1-control-camera-1.3b": replace(
        _1_3B, in_channels=32, image_dim=1280, camera_channels=24, fun=True
    ),
    "fun-v1.1-control-camera-14b": replace(
        _14B, in_channels=32, image_dim=1280, camera_channels=24, fun=True
    ),
    "fun-inp-5b": replace(_5B, in_channels=100, fun=True),
    "fun-control-5b": replace(_5B, in_channels=148, ref_conv=True, fun=True),
    "fun-control-camera-5b": replace(_5B, in_channels=100, camera_channels=24, fun=True),
    "fun-inp-a14b": replace(_I2V_A14B, fun=True),
    "fun-control-a14b": replace(_I2V_A14B, in_channels=52, ref_conv=True, fun=True),
    "fun-control-camera-a14b": replace(_I2V_A14B, camera_channels=24, fun=True),
    "vace-fun-a14b": replace(_VACE_14B, boundary=0.875, fun=True),
    "wantodance-14b": replace(_I2V_14B, ref_conv=True, music=MusicArch()),
    "wantodance-14b-global": replace(_I2V_14B, ref_conv=True, music=MusicArch(fps=7.5)),
}
HUB_PRESETS = {
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "t2v-1.3b",
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": "t2v-14b",
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": "i2v-14b-480p",
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": "i2v-14b-720p",
    "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers": "flf2v-14b-720p",
    "Wan-AI/Wan2.1-VACE-1.3B-diffusers": "vace-1.3b",
    "Wan-AI/Wan2.1-VACE-14B-diffusers": "vace-14b",
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": "ti2v-5b",
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": "t2v-a14b",
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": "i2v-a14b",
    "Wan-AI/Wan2.2-S2V-14B": "s2v-14b",
    "Wan-AI/Wan2.2-Animate-14B-Diffusers": "animate-14b",
    "alibaba-pai/Wan2.1-Fun-V1.1-1.3B-InP": "fun-v1.1-inp-1.3b",
    "alibaba-pai/Wan2.1-Fun-V1.1-14B-InP": "fun-v1.1-inp-14b",
    "alibaba-pai/Wan2.1-Fun-V1.1-1.3B-Control": "fun-v1.1-control-1.3b",
    "alibaba-pai/Wan2.1-Fun-V1.1-14B-Control": "fun-v1.1-control-14b",
    "alibaba-pai/Wan2.1-Fun-V1.1-1.3B-Control-Camera": "fun-v1.1-control-camera-1.3b",
    "alibaba-pai/Wan2.1-Fun-V1.1-14B-Control-Camera": "fun-v1.1-control-camera-14b",
    "alibaba-pai/Wan2.2-Fun-5B-InP": "fun-inp-5b",
    "alibaba-pai/Wan2.2-Fun-5B-Control": "fun-control-5b",
    "alibaba-pai/Wan2.2-Fun-5B-Control-Camera": "fun-control-camera-5b",
    "alibaba-pai/Wan2.2-Fun-A14B-InP": "fun-inp-a14b",
    "alibaba-pai/Wan2.2-Fun-A14B-Control": "fun-control-a14b",
    "alibaba-pai/Wan2.2-Fun-A14B-Control-Camera": "fun-control-camera-a14b",
    "alibaba-pai/Wan2.2-VACE-Fun-A14B": "vace-fun-a14b",
}
"""The presets of published models, by the hub id of the model or of its transformer."""


def arch_from_config(config: Mapping[str, Any], index: Mapping[str, Any]) -> WanArch | None:
    """The architecture that diffusers' files describe.

    Args:
        config: `transformer/config.json`.
        index: The pipeline's `model_index.json`; empty if missing, and then a pair of experts looks
            like one transformer.

    Returns:
        The architecture; None for the authors' config.json, which is the same for several variants.

    Raises:
        KeyError: If the configuration belongs to another model.
    """
    if (
        "num_attention_heads" not in config
        and {"dim", "ffn_dim", "num_heads", "num_layers"} <= config.keys()
    ):
        return None
    out_channels = config["out_channels"]
    two = index.get("transformer_2", [None]) != [None, None]
    return WanArch(
        dim=config["num_attention_heads"] * config["attention_head_dim"],
        ffn_dim=config["ffn_dim"],
        heads=config["num_attention_heads"],
        layers=config["num_layers"],
        in_channels=config["in_channels"],
        out_channels=out_channels,
        text_dim=config["text_dim"],
        freq_dim=config["freq_dim"],
        patch=tuple(config["patch_size"]),
        eps=config["eps"],
        image_dim=config.get("image_dim") or 0,
        image_positions=config.get("pos_embed_seq_len") or 0,
        # Some converters wrote a boundary for 2.1 models too; it counts only with a second
        # transformer.
        boundary=(index.get("boundary_ratio") or 0.0) if two else 0.0,
        token_times=bool(index.get("expand_timesteps", out_channels == 48)),
        vace_layers=tuple(config.get("vace_layers") or ()),
        vace_channels=config.get("vace_in_channels") or 96,
        animate=_animate(config) if "motion_encoder_dim" in config else None,
    )


def _animate(config: Mapping[str, Any]) -> AnimateArch:
    """What diffusers' `WanAnimateTransformer3DModel` has besides."""
    apart, published = config["inject_face_latents_blocks"], AnimateArch()
    channels = config.get("motion_encoder_channel_sizes") or dict(
        zip(
            (str(published.face_size >> level) for level in range(8)),
            published.face_channels,
            strict=True,
        )
    )
    size = config["motion_encoder_size"]
    return AnimateArch(
        layers=tuple(range(0, config["num_layers"] // apart * apart, apart)),
        pose_channels=config["latent_channels"] or config["out_channels"],
        face_channels=tuple(channels[str(size >> level)] for level in range(size.bit_length() - 2)),
        style=config["motion_style_dim"],
        motion=config["motion_dim"],
        motion_dim=config["motion_encoder_dim"],
        width=config["face_encoder_hidden_dim"],
        tokens=config["face_encoder_num_heads"],
    )
