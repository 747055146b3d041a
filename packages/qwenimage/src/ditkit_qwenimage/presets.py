"""Qwen-Image (20B) by name; each has 20,430,401,088 parameters, counted on `meta` and as many as
diffusers' model has."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ditkit_core.families.config_json import check_axes, check_fixed

TASKS = {
    "QwenImagePipeline": "image",
    "QwenImageEditPipeline": "edit",
    "QwenImageEditPlusPipeline": "edit-plus",
}
"""diffusers' pipelines and the task of their models."""


@dataclass(frozen=True, kw_only=True)
class QwenImageArch:
    """Sizes of one Qwen-Image transformer.

    Source: `QwenImageTransformer2DModel` of diffusers.
    """

    dim: int = 3072
    heads: int = 24
    layers: int = 60
    in_channels: int = 16
    """Channels of the VAE's latents; 2 x 2 latent pixels are a token."""
    text_dim: int = 3584
    """Width of the language model."""
    axes: tuple[int, int, int] = (16, 56, 56)
    """Features of a head that are rotated by frame, row and column."""
    task: Literal["image", "edit", "edit-plus"] = "image"
    """What it generates from: a caption; an instruction and one reference that it describes; an
    instruction and several references, each with a number."""
    clean_references: bool = False
    """Whether blocks modulate references as at noise level 0, and not at the sample's."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads


PRESETS = {
    "t2i": QwenImageArch(),
    "edit": QwenImageArch(task="edit"),
    "edit-2509": QwenImageArch(task="edit-plus"),
    "edit-2511": QwenImageArch(task="edit-plus", clean_references=True),
}
HUB_PRESETS = {
    "Qwen/Qwen-Image": "t2i",
    "Qwen/Qwen-Image-2512": "t2i",
    "Qwen/Qwen-Image-Edit": "edit",
    "Qwen/Qwen-Image-Edit-2509": "edit-2509",
    "Qwen/Qwen-Image-Edit-2511": "edit-2511",
}
"""The presets of published models, by hub id."""

_FIELDS = {
    "heads": "num_attention_heads",
    "layers": "num_layers",
    "text_dim": "joint_attention_dim",
}
"""Ours and diffusers' names of sizes that mean the same."""
_ONLY = {
    "patch_size": 2,
    "guidance_embeds": False,
    "use_additional_t_cond": False,
    "use_layer3d_rope": False,
}
"""Values of diffusers' configuration that have one here; others are Qwen-Image-Layered's."""


def config_of(arch: QwenImageArch) -> dict[str, Any]:
    """The arguments of diffusers' transformer, and the sizes in its `config.json`."""
    return {
        **_ONLY,
        "in_channels": 4 * arch.in_channels,
        "out_channels": arch.in_channels,
        "attention_head_dim": arch.head_dim,
        "axes_dims_rope": list(arch.axes),
        "zero_cond_t": arch.clean_references,
        **{theirs: getattr(arch, ours) for ours, theirs in _FIELDS.items()},
    }


def arch_from_config(config: Mapping[str, Any], index: Mapping[str, Any]) -> QwenImageArch:
    """The architecture that a diffusers `transformer/config.json` describes.

    Args:
        config: Its content.
        index: The pipeline's `model_index.json`, whose class says what the model generates from.
            Without it `zero_cond_t` decides.

    Raises:
        KeyError: If the configuration belongs to another model.
        ValueError: If its sizes contradict each other, or it has a switch that is not known here.
    """
    heads, clean = config["num_attention_heads"], bool(config.get("zero_cond_t", False))
    task: Any = TASKS.get(str(index.get("_class_name")), "edit-plus" if clean else "image")
    arch = QwenImageArch(
        dim=heads * config["attention_head_dim"],
        in_channels=config["in_channels"] // 4,
        axes=tuple(config["axes_dims_rope"]),
        task=task,
        clean_references=clean,
        **{ours: config[theirs] for ours, theirs in _FIELDS.items()},
    )
    check_fixed(config, {**_ONLY, "out_channels": arch.in_channels})
    check_axes(arch.axes, arch.head_dim)
    return arch
