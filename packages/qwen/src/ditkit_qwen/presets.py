"""Qwen-Image 2.1 by name: 7,115,124,736 parameters, counted on `meta` and as many as diffusers'
model has."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ditkit_core.families.config_json import check_axes, check_fixed


@dataclass(frozen=True, kw_only=True)
class QwenArch:
    """Sizes of one Qwen-Image 2.1 transformer.

    Source: `QwenImage21Transformer2DModel` of diffusers.
    """

    dim: int = 4096
    heads: int = 32
    layers: int = 32
    mlp_ratio: int = 3
    """Width of the MLP, in widths of the model."""
    in_channels: int = 64
    """Channels of the VAE's latents; each latent pixel is a token."""
    text_dim: int = 4096
    """Width of the language model."""
    axes: tuple[int, int, int] = (16, 56, 56)
    """Features of a head that are rotated by frame, row and column."""
    eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads


PRESETS = {"2.1": QwenArch()}
HUB_PRESETS = {"Qwen/Qwen-Image-2.1": "2.1"}
"""The preset of the published model, by the hub id that diffusers names."""

_FIELDS = {
    "heads": "num_attention_heads",
    "layers": "num_layers",
    "mlp_ratio": "mlp_ratio",
    "in_channels": "in_channels",
    "text_dim": "context_in_dim",
    "eps": "eps",
}
"""Ours and diffusers' names of sizes that mean the same."""
_ONLY = {"patch_size": 1, "causal_condition": True}
"""Values of diffusers' configuration that have one here."""


def config_of(arch: QwenArch) -> dict[str, Any]:
    """The arguments of diffusers' transformer, and the sizes in its `config.json`."""
    return {
        **_ONLY,
        "attention_head_dim": arch.head_dim,
        "out_channels": arch.in_channels,
        "axes_dims_rope": list(arch.axes),
        **{theirs: getattr(arch, ours) for ours, theirs in _FIELDS.items()},
    }


def arch_from_config(config: Mapping[str, Any], index: Mapping[str, Any]) -> QwenArch:
    """The architecture that a diffusers `transformer/config.json` describes.

    Args:
        config: Its content.
        index: The pipeline's `model_index.json`, which may have noise levels of its own, or be of
            the distilled form.

    Raises:
        KeyError: If the configuration belongs to another model.
        ValueError: If its sizes contradict each other, or it has a switch that is not known here.
    """
    heads = config["num_attention_heads"]
    arch = QwenArch(
        dim=heads * config["attention_head_dim"],
        axes=tuple(config["axes_dims_rope"]),
        **{ours: config[theirs] for ours, theirs in _FIELDS.items()},
    )
    check_fixed(config, {**_ONLY, "out_channels": arch.in_channels})
    check_axes(arch.axes, arch.head_dim)
    if index.get("sample_sigmas") is not None:
        raise ValueError("model_index.json has noise levels of its own (sample_sigmas)")
    if "Turbo" in (pipeline := str(index.get("_class_name"))):
        raise ValueError(
            f"its pipeline is {pipeline}, of the distilled form, and nobody knows how an adapter "
            f"of that is trained; name the folder of Qwen-Image 2.1"
        )
    return arch
