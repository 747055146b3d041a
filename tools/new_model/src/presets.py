"""Zed's architectures by name.

FILL IN 1: the sizes of the published models, each with the file that it was read in. `tests/test_conformance.py` counts their parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ZedArch:
    """Sizes of one Zed transformer."""

    dim: int = 64
    heads: int = 2
    layers: int = 2
    ffn_dim: int = 128
    text_dim: int = 32
    """Width of a row of text, as the text encoder returns it."""
    in_channels: int = 16
    """Channels of the VAE's latents."""
    axes: tuple[int, int, int] = (8, 12, 12)
    """Features of a head that are rotated by frame, row and column."""
    freq_dim: int = 64
    theta: float = 10000.0
    eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads


PRESETS = {"two-blocks": ZedArch()}
HUB_PRESETS: dict[str, str] = {}
"""The presets of published models, by hub id. FILL IN 1."""


def arch_from_config(config: Mapping[str, Any], index: Mapping[str, Any]) -> ZedArch:
    """The architecture that a `transformer/config.json` describes.

    FILL IN 1: the names of the fields in the published file. Those below are this template's.

    Args:
        config: Its content.
        index: The pipeline's `model_index.json`; empty if missing.

    Raises:
        KeyError: If the configuration belongs to another model.
        ValueError: If its sizes contradict each other.
    """
    names = (
        "dim",
        "heads",
        "layers",
        "ffn_dim",
        "text_dim",
        "in_channels",
        "freq_dim",
        "theta",
        "eps",
    )
    arch = ZedArch(axes=tuple(config["axes"]), **{name: config[name] for name in names})
    if sum(arch.axes) != arch.head_dim:
        raise ValueError(
            f"axes {list(arch.axes)} do not add up to a head of {arch.head_dim} features"
        )
    return arch
