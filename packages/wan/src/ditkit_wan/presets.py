"""Wan architectures by name. Parameters counted on the official code are in the tests."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

PATCH = (1, 2, 2)
"""Latent frames, rows and columns that make a token, in every Wan."""


MUSIC_LAYERS = (0, 4, 8, 12, 16, 20, 24, 27)
"""Blocks of WanToDance that end with music; its files have what they hear it with by their place in this list."""


@dataclass(frozen=True, kw_only=True)
class MusicArch:
    """How WanToDance hears music."""

    layers: tuple[int, ...] = MUSIC_LAYERS
    """Blocks that end with music, in order: `MUSIC_LAYERS`, or as many of the first of them as there are blocks for."""
    features: int = 35
    """Of music at each moment."""
    width: int = 256
    """Of its encoder."""
    heads: int = 4
    ffn_dim: int = 1024
    skipped: int = 9
    """The block that the negative side of guidance leaves out."""
    fps: float = 30.0
    """Frames per second of clips: 30 for those that are drawn between keyframes, 30 / k for keyframes."""

    @property
    def keyframes(self) -> bool:
        """Whether clips are keyframes of a whole piece of music."""
        return self.fps < 30


@dataclass(frozen=True, kw_only=True)
class WanArch:
    """Sizes of one Wan transformer, and what it is conditioned on."""

    dim: int
    ffn_dim: int
    heads: int
    layers: int
    in_channels: int = 16
    """Of the patch embedding: noised latents, and where it is more than `out_channels`, `y` behind them."""
    out_channels: int = 16
    """Of latents."""
    text_dim: int = 4096
    text_tokens: int = 512
    """Text is zero-padded to this many rows, and attended to whole: the model was trained so."""
    freq_dim: int = 256
    patch: tuple[int, int, int] = PATCH
    eps: float = 1e-6
    image_dim: int = 0
    """Width of CLIP's image tokens, which blocks have keys and values of their own for; 0: the model takes none."""
    image_positions: int = 0
    """Image tokens that have a position: those of a first and a last picture; 0: those of one picture, without positions."""
    boundary: float = 0.0
    """Noise level from which on the high-noise expert works, of a model of two such transformers; 0: one works at all."""
    token_times: bool = False
    """Whether a first frame is given clean, its tokens at t = 0, in latents of the Wan 2.2 VAE."""
    vace_layers: tuple[int, ...] = ()
    """Blocks behind which a hint of a VACE block is added, in order; the first is 0."""
    vace_channels: int = 96
    """Of what VACE blocks are conditioned on."""
    ref_conv: bool = False
    """Whether a picture of what the clip shows may stand in front of it."""
    camera_channels: int = 0
    """Of a camera's rays, 6 for each of the four frames of a latent one; 0: the model knows no camera."""
    music: MusicArch | None = None
    """What WanToDance has beside; None for all others."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def latent_stride(self) -> int:
        """Pixels to a row or column of latents."""
        return 16 if self.token_times else 8

    @property
    def image_tokens(self) -> int:
        """CLIP's tokens of the pictures that the model is given, 257 of each; 0 if it takes none."""
        return (self.image_positions or 257) if self.image_dim else 0


_1_3B = WanArch(dim=1536, ffn_dim=8960, heads=12, layers=30)
_14B = WanArch(dim=5120, ffn_dim=13824, heads=40, layers=40)
_I2V_14B = replace(_14B, in_channels=36, image_dim=1280)

PRESETS = {
    "t2v-1.3b": _1_3B,
    "t2v-14b": _14B,
    "i2v-14b-480p": _I2V_14B,
    "i2v-14b-720p": _I2V_14B,
    "flf2v-14b-720p": replace(_I2V_14B, image_positions=514),
    "vace-1.3b": replace(_1_3B, vace_layers=tuple(range(0, 30, 2))),
    "vace-14b": replace(_14B, vace_layers=tuple(range(0, 40, 5))),
    "ti2v-5b": WanArch(dim=3072, ffn_dim=14336, heads=24, layers=30, in_channels=48, out_channels=48, token_times=True),
    "t2v-a14b": replace(_14B, boundary=0.875),
    "i2v-a14b": replace(_14B, in_channels=36, boundary=0.9),
    "fun-v1.1-control-1.3b": replace(_1_3B, in_channels=48, image_dim=1280, ref_conv=True),
    "fun-v1.1-control-14b": replace(_14B, in_channels=48, image_dim=1280, ref_conv=True),
    "fun-v1.1-control-camera-1.3b": replace(_1_3B, in_channels=32, image_dim=1280, camera_channels=24),
    "fun-v1.1-control-camera-14b": replace(_14B, in_channels=32, image_dim=1280, camera_channels=24),
    "wantodance-14b": replace(_I2V_14B, ref_conv=True, music=MusicArch()),
    "wantodance-14b-global": replace(_I2V_14B, ref_conv=True, music=MusicArch(fps=7.5)),
}


def arch_from_config(config: Mapping[str, Any], index: Mapping[str, Any]) -> WanArch | None:
    """The architecture that diffusers' files describe.

    Args:
        config: `transformer/config.json`.
        index: The pipeline's `model_index.json`; empty if there is none, and then a pair of experts is not told from one transformer.

    Returns:
        The architecture; None for the authors' own config.json, which does not tell all variants apart.

    Raises:
        KeyError: If the configuration is another model's.
    """
    if "num_attention_heads" not in config and {"dim", "ffn_dim", "num_heads", "num_layers"} <= config.keys():
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
        # Converters have given 2.1 models a boundary too: it means something where there is a second transformer.
        boundary=(index.get("boundary_ratio") or 0.0) if two else 0.0,
        token_times=bool(index.get("expand_timesteps", out_channels == 48)),
        vace_layers=tuple(config.get("vace_layers") or ()),
        vace_channels=config.get("vace_in_channels") or 96,
    )
