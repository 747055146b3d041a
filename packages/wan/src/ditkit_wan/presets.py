"""Wan architectures by name. Counted on the official code: T2V-1.3B has 1,418,996,800 parameters, T2V-14B 14,288,491,584."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class WanArch:
    """Sizes of one Wan transformer."""

    dim: int
    ffn_dim: int
    heads: int
    layers: int
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    text_tokens: int = 512
    """Text is zero-padded to this many rows, and attended to whole: the model was trained so."""
    freq_dim: int = 256
    patch: tuple[int, int, int] = (1, 2, 2)
    eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads


PRESETS = {
    "t2v-1.3b": WanArch(dim=1536, ffn_dim=8960, heads=12, layers=30),
    "t2v-14b": WanArch(dim=5120, ffn_dim=13824, heads=40, layers=40),
}


def arch_from_config(config: Mapping[str, Any], index: Mapping[str, Any]) -> WanArch:
    """The architecture that a diffusers `transformer/config.json` describes; the pipeline's index is not needed."""
    return WanArch(
        dim=config["num_attention_heads"] * config["attention_head_dim"],
        ffn_dim=config["ffn_dim"],
        heads=config["num_attention_heads"],
        layers=config["num_layers"],
        in_channels=config["in_channels"],
        out_channels=config["out_channels"],
        text_dim=config["text_dim"],
        freq_dim=config["freq_dim"],
        patch=tuple(config["patch_size"]),
        eps=config["eps"],
    )
