"""FLUX.2 architectures by name.

Parameters, counted on `meta` and as many as diffusers' model has: dev has 32,223,281,152
parameters, klein-9b 9,078,581,248, klein-4b 3,875,544,576.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ditkit_core.families.config_json import check_axes


@dataclass(frozen=True, kw_only=True)
class Flux2Arch:
    """Sizes of one FLUX.2 transformer."""

    dim: int
    heads: int
    double_layers: int
    """Blocks in which text and image have weights of their own."""
    single_layers: int
    """Blocks after the join, in which text and image share weights."""
    text_dim: int
    """Width of a row of text: the concatenated hidden states of three layers of the text
    encoder."""
    guidance: bool
    """Whether the guidance scale is an input, embedded like the noise level."""
    distilled: bool = False
    """Whether the model was distilled to a few steps: it samples fast, and training should start
    from the base model instead."""
    in_channels: int = 128
    out_channels: int = 128
    text_tokens: int = 512
    """Rows of text, padding included; all are attended to, as in training."""
    freq_dim: int = 256
    mlp_ratio: float = 3.0
    axes: tuple[int, ...] = (32, 32, 32, 32)
    """Features of a head that are rotated by each axis of a position (reference, row, column, text
    row)."""
    theta: float = 2000.0
    eps: float = 1e-6

    @property
    def mlp_dim(self) -> int:
        """Width of an MLP between its matmuls, after the gate."""
        return int(self.dim * self.mlp_ratio)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads


_DEV = Flux2Arch(
    dim=6144, heads=48, double_layers=8, single_layers=48, text_dim=15360, guidance=True
)
_KLEIN_9B: Mapping[str, Any] = {
    "dim": 4096,
    "heads": 32,
    "double_layers": 8,
    "single_layers": 24,
    "text_dim": 12288,
    "guidance": False,
}
_KLEIN_4B: Mapping[str, Any] = {
    "dim": 3072,
    "heads": 24,
    "double_layers": 5,
    "single_layers": 20,
    "text_dim": 7680,
    "guidance": False,
}

PRESETS = {
    "dev": _DEV,
    "klein-9b": Flux2Arch(**_KLEIN_9B, distilled=True),
    "klein-base-9b": Flux2Arch(**_KLEIN_9B),
    "klein-4b": Flux2Arch(**_KLEIN_4B, distilled=True),
    "klein-base-4b": Flux2Arch(**_KLEIN_4B),
}
HUB_PRESETS = {
    "black-forest-labs/FLUX.2-dev": "dev",
    "black-forest-labs/FLUX.2-klein-9B": "klein-9b",
    "black-forest-labs/FLUX.2-klein-base-9B": "klein-base-9b",
    "black-forest-labs/FLUX.2-klein-4B": "klein-4b",
    "black-forest-labs/FLUX.2-klein-base-4B": "klein-base-4b",
}
"""The presets of published models, by hub id."""


def arch_from_config(config: Mapping[str, Any], index: Mapping[str, Any]) -> Flux2Arch:
    """The architecture that a diffusers `transformer/config.json` describes.

    Args:
        config: Its content.
        index: The pipeline's `model_index.json`, the only file that says whether the model is
            distilled; empty if missing.

    Raises:
        KeyError: If the configuration belongs to another model.
        ValueError: If its sizes contradict each other.
    """
    heads = config["num_attention_heads"]
    arch = Flux2Arch(
        dim=heads * config["attention_head_dim"],
        heads=heads,
        double_layers=config["num_layers"],
        single_layers=config["num_single_layers"],
        text_dim=config["joint_attention_dim"],
        # files from before the models without guidance do not say
        guidance=config.get("guidance_embeds", True),
        distilled=index.get("is_distilled", False),
        in_channels=config["in_channels"],
        out_channels=config.get("out_channels") or config["in_channels"],
        freq_dim=config["timestep_guidance_channels"],
        mlp_ratio=float(config["mlp_ratio"]),
        axes=tuple(config["axes_dims_rope"]),
        theta=float(config["rope_theta"]),
        eps=config["eps"],
    )
    check_axes(arch.axes, arch.head_dim)
    return arch
