"""FLUX.3 architectures by name.

Parameters, counted on `meta` and as many as diffusers' model has: klein-base has 5,538,458,368,
klein 5,548,681,984.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ditkit_core.families.config_json import check_axes


@dataclass(frozen=True, kw_only=True)
class Flux3Arch:
    """Sizes of one FLUX.3 transformer."""

    dim: int = 3072
    heads: int = 24
    tower_layers: int = 5
    """Blocks of the text alone, as many of the image and of the references, before the joint
    ones."""
    layers: int = 28
    """Blocks of text, image and references together."""
    text_dim: int = 20480
    """Width of a row of text: the concatenated hidden states of eight layers of the text
    encoder."""
    in_channels: int = 128
    flow_map: bool = False
    """Whether the model was distilled to a flow map, which is told the noise level that a step
    jumps to: it samples fast, and training should start from the base model instead."""
    freq_dim: int = 256
    mlp_ratio: float = 3.0
    axes: tuple[int, ...] = (32, 32, 32, 32)
    """Features of a head that are rotated by each axis of a position (time, row, column, index of
    text row or reference)."""
    theta: float = 10000.0
    eps: float = 1e-6

    @property
    def mlp_dim(self) -> int:
        """Width of an MLP between its matmuls, after the gate."""
        return int(self.dim * self.mlp_ratio)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads


PRESETS = {"klein-base": Flux3Arch(), "klein": Flux3Arch(flow_map=True)}
HUB_PRESETS = {
    "black-forest-labs/flux-3-image-klein-base": "klein-base",
    "black-forest-labs/flux-3-image-klein": "klein",
}
"""The presets of published models, by hub id."""


def arch_from_config(config: Mapping[str, Any], index: Mapping[str, Any]) -> Flux3Arch:
    """The architecture that a diffusers `transformer/config.json` describes.

    Args:
        config: Its content.
        index: Unused: the transformer's own file says whether it is a flow map.

    Raises:
        KeyError: If the configuration belongs to another model.
        ValueError: If its sizes contradict each other, or references have channels of their own.
    """
    heads, channels = config["num_attention_heads"], config["in_channels"]
    if config["cond_in_channels"] != channels:
        raise ValueError(
            f"cond_in_channels {config['cond_in_channels']} is not in_channels {channels}: "
            f"references of another VAE than the image's are not supported"
        )
    arch = Flux3Arch(
        dim=heads * config["attention_head_dim"],
        heads=heads,
        tower_layers=config["num_layers"],
        layers=config["num_single_layers"],
        text_dim=config["joint_attention_dim"],
        in_channels=channels,
        flow_map=config.get("flow_map", False),
        freq_dim=config["timestep_channels"],
        mlp_ratio=float(config["mlp_ratio"]),
        axes=tuple(config["axes_dims_rope"]),
        theta=float(config["rope_theta"]),
        eps=config["eps"],
    )
    check_axes(arch.axes, arch.head_dim)
    return arch
