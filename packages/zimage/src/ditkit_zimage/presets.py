"""Z-Image architectures by name; both have 6,154,908,736 parameters, counted on `meta` and as many
as diffusers' model has."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ditkit_core.families.config_json import check_axes


@dataclass(frozen=True, kw_only=True)
class ZImageArch:
    """Sizes of one Z-Image transformer."""

    dim: int = 3840
    heads: int = 30
    layers: int = 30
    """Blocks of image and caption together."""
    refiner_layers: int = 2
    """Blocks of the image alone, and as many of the caption alone, before the others."""
    text_dim: int = 2560
    in_channels: int = 16
    axes: tuple[int, ...] = (32, 48, 48)
    """Features of a head that are rotated by each axis of a position (caption row, row, column)."""
    theta: float = 256.0
    eps: float = 1e-5
    distilled: bool = False
    """Whether the model was distilled to a few steps: it samples fast, and is a poor start for
    training."""

    @property
    def mlp_dim(self) -> int:
        """Width of an MLP between its matmuls."""
        return int(self.dim / 3 * 8)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def time_dim(self) -> int:
        """Width of the embedded noise level, which every block has a linear layer of its own
        for."""
        return min(self.dim, 256)


PRESETS = {"base": ZImageArch(), "turbo": ZImageArch(distilled=True)}
HUB_PRESETS = {"Tongyi-MAI/Z-Image": "base", "Tongyi-MAI/Z-Image-Turbo": "turbo"}
"""The presets of published models, by hub id."""


def arch_from_config(config: Mapping[str, Any], index: Mapping[str, Any]) -> ZImageArch:
    """The architecture that a diffusers `transformer/config.json` describes.

    Args:
        config: Its content; fields that files leave out have diffusers' defaults.
        index: Unused: no file of a pipeline says whether the model is distilled.

    Raises:
        KeyError: If the configuration belongs to another model.
        ValueError: If it has parts that are not trained here, or sizes that contradict each other.
    """
    if config.get("siglip_feat_dim") is not None:
        raise ValueError("siglip_feat_dim is set: Z-Image-Omni is not supported")
    if list(config["all_patch_size"]) != [2] or list(config["all_f_patch_size"]) != [1]:
        raise ValueError("all_patch_size and all_f_patch_size are not [2] and [1]")
    if not config["qk_norm"] or config.get("t_scale", 1000.0) != 1000.0:
        raise ValueError("qk_norm is off, or t_scale is not 1000")
    arch = ZImageArch(
        dim=config["dim"],
        heads=config["n_heads"],
        layers=config["n_layers"],
        refiner_layers=config["n_refiner_layers"],
        text_dim=config["cap_feat_dim"],
        in_channels=config["in_channels"],
        axes=tuple(config["axes_dims"]),
        theta=float(config["rope_theta"]),
        eps=config["norm_eps"],
    )
    check_axes(arch.axes, arch.head_dim, key="axes_dims")
    return arch
