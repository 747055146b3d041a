"""Krea 2 architectures by name; both have 12,820,073,036 parameters, counted on `meta` and as many
as diffusers' model has."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ditkit_core.families.config_json import check_axes

TEXT_LAYERS = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)
"""The layers of Qwen3-VL 4B whose hidden states are read.

Source: `text_encoder_select_layers` of diffusers' `Krea2Pipeline`."""


@dataclass(frozen=True, kw_only=True)
class Krea2Arch:
    """Sizes of one Krea 2 transformer.

    Source: `Krea2Transformer2DModel` of diffusers.
    """

    dim: int = 6144
    heads: int = 48
    kv_heads: int = 12
    """Heads of keys and values; each serves `heads / kv_heads` heads of queries."""
    layers: int = 28
    mlp_dim: int = 16384
    freq_dim: int = 256
    """Features of the noise level."""
    in_channels: int = 16
    """Channels of the VAE's latents."""
    text_dim: int = 2560
    """Width of the language model, and of the blocks that fuse its layers."""
    text_layers: int = len(TEXT_LAYERS)
    """Layers of the language model that are read."""
    text_heads: int = 20
    text_kv_heads: int = 20
    text_mlp_dim: int = 6912
    layerwise_blocks: int = 2
    """Blocks in which the layers of one token attend to each other."""
    refiner_blocks: int = 2
    """Blocks in which the tokens of the caption attend to each other, behind the others."""
    axes: tuple[int, int, int] = (32, 48, 48)
    """Features of a head that are rotated by frame, row and column."""
    theta: float = 1000.0
    eps: float = 1e-5
    distilled: bool = False
    """Whether the model was distilled to a few steps: it samples fast, and is a poor start for
    training."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads


PRESETS = {"base": Krea2Arch(), "distilled": Krea2Arch(distilled=True)}
HUB_PRESETS = {"krea/Krea-2-Raw": "base"}
"""The presets of published models, by hub id: the one that diffusers names."""

_FIELDS = {
    "kv_heads": "num_key_value_heads",
    "layers": "num_layers",
    "mlp_dim": "intermediate_size",
    "freq_dim": "timestep_embed_dim",
    "text_dim": "text_hidden_dim",
    "text_layers": "num_text_layers",
    "text_heads": "text_num_attention_heads",
    "text_kv_heads": "text_num_key_value_heads",
    "text_mlp_dim": "text_intermediate_size",
    "layerwise_blocks": "num_layerwise_text_blocks",
    "refiner_blocks": "num_refiner_text_blocks",
    "theta": "rope_theta",
    "eps": "norm_eps",
}
"""Ours and diffusers' names of sizes that mean the same."""


def config_of(arch: Krea2Arch) -> dict[str, Any]:
    """The arguments of diffusers' transformer, and the sizes in its `config.json`."""
    return {
        "in_channels": 4 * arch.in_channels,
        "attention_head_dim": arch.head_dim,
        "num_attention_heads": arch.heads,
        "axes_dims_rope": list(arch.axes),
        **{theirs: getattr(arch, ours) for ours, theirs in _FIELDS.items()},
    }


def arch_from_config(config: Mapping[str, Any], index: Mapping[str, Any]) -> Krea2Arch:
    """The architecture that a diffusers `transformer/config.json` describes.

    Args:
        config: Its content.
        index: The pipeline's `model_index.json`, which says whether the model is distilled and
            which layers of the language model it reads.

    Raises:
        KeyError: If the configuration belongs to another model.
        ValueError: If its sizes contradict each other, or other layers are read.
    """
    heads = config["num_attention_heads"]
    arch = Krea2Arch(
        dim=heads * config["attention_head_dim"],
        heads=heads,
        in_channels=config["in_channels"] // 4,
        axes=tuple(config["axes_dims_rope"]),
        distilled=bool(index.get("is_distilled", False)),
        **{ours: config[theirs] for ours, theirs in _FIELDS.items()},
    )
    check_axes(arch.axes, arch.head_dim)
    if heads % arch.kv_heads or arch.text_heads % arch.text_kv_heads:
        raise ValueError("heads of queries are no multiple of heads of keys")
    layers = tuple(index.get("text_encoder_select_layers") or TEXT_LAYERS)
    if arch.text_layers == len(TEXT_LAYERS) and layers != TEXT_LAYERS:
        raise ValueError(f"text_encoder_select_layers {list(layers)} are not {list(TEXT_LAYERS)}")
    return arch
