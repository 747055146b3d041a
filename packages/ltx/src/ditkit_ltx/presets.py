"""LTX-Video architectures by name, with the parameters that diffusers' model has."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LtxArch:
    """Sizes of one LTX-Video transformer, and how its clips count time.

    Source: `LTXVideoTransformer3DModel` of diffusers.
    """

    dim: int = 2048
    heads: int = 32
    layers: int = 28
    in_channels: int = 128
    """Channels of the VAE's latents."""
    text_dim: int = 4096
    """Width of the text encoder."""
    freq_dim: int = 256
    """Features of the noise level."""
    eps: float = 1e-6
    theta: float = 10000.0
    causal: bool = False
    """Whether a clip's first latent frame, which is one frame and not eight, counts as one: the
    models from 0.9.5 on, which also read longer captions and sample along another line of noise
    levels."""
    distilled: bool = False
    """Whether the model was distilled to a few steps without guidance."""
    first_frame: bool = False
    """Whether a clip's first latent frame may be given: it has no noise then, and noise level 0."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads


_TEXT_TO_VIDEO = {
    "2b": LtxArch(),
    "2b_0.9.5": LtxArch(causal=True),
    "13b": LtxArch(dim=4096, layers=48, causal=True),
    "13b_distilled": LtxArch(dim=4096, layers=48, causal=True, distilled=True),
}
PRESETS = _TEXT_TO_VIDEO | {
    f"{name}_i2v": replace(arch, first_frame=True) for name, arch in _TEXT_TO_VIDEO.items()
}
"""The same weights from text, and from text and a first frame."""
HUB_PRESETS = {
    "Lightricks/LTX-Video": "2b",
    "diffusers/LTX-Video-0.9.0": "2b",
    "diffusers/LTX-Video-0.9.1": "2b",
    "Lightricks/LTX-Video-0.9.5": "2b_0.9.5",
    "Lightricks/LTX-Video-0.9.7-dev": "13b",
    "Lightricks/LTX-Video-0.9.7-distilled": "13b_distilled",
    "Lightricks/LTX-Video-0.9.8-13B-distilled": "13b_distilled",
}
"""The presets of published models, by hub id: those that diffusers names."""

_SWITCHES = {
    "patch_size": 1,
    "patch_size_t": 1,
    "activation_fn": "gelu-approximate",
    "qk_norm": "rms_norm_across_heads",
    "norm_elementwise_affine": False,
    "attention_bias": True,
    "attention_out_bias": True,
}
"""Fields of diffusers' configuration that all published models have alike."""
_PIPELINES = {
    "LTXPipeline": LtxArch(),
    "LTXImageToVideoPipeline": LtxArch(first_frame=True),
    "LTXConditionPipeline": LtxArch(causal=True),
}
"""Pipelines of diffusers, and what their models are, but for sizes. The last one is every later
model's, from text and from images."""


def config_of(arch: LtxArch) -> dict[str, Any]:
    """The arguments of diffusers' transformer, and the sizes in its `config.json`."""
    return {
        "in_channels": arch.in_channels,
        "out_channels": arch.in_channels,
        "num_attention_heads": arch.heads,
        "attention_head_dim": arch.head_dim,
        "cross_attention_dim": arch.dim,
        "num_layers": arch.layers,
        "norm_eps": arch.eps,
        "caption_channels": arch.text_dim,
        **_SWITCHES,
    }


def arch_from_config(config: Mapping[str, Any], index: Mapping[str, Any]) -> LtxArch:
    """The architecture that a diffusers `transformer/config.json` describes.

    Args:
        config: Its content.
        index: The pipeline's `model_index.json`, whose pipeline says how clips count time.

    Raises:
        KeyError: If the configuration belongs to another model.
        ValueError: If its sizes contradict each other, it has a switch that no published model has,
            or nothing says how clips count time.
    """
    heads = config["num_attention_heads"]
    arch = LtxArch(
        dim=heads * config["attention_head_dim"],
        heads=heads,
        layers=config["num_layers"],
        in_channels=config["in_channels"],
        text_dim=config["caption_channels"],
        eps=config["norm_eps"],
    )
    expected = config_of(arch)
    for name in ("cross_attention_dim", "out_channels", *_SWITCHES):
        if config.get(name) not in (None, expected[name]):
            raise ValueError(f"{name} is {config[name]}, and not {expected[name]}")
    pipeline = index.get("_class_name")
    if pipeline not in _PIPELINES:
        raise ValueError(
            "the config.json of models up to 0.9.1 and from 0.9.5 on is the same, and no "
            "model_index.json names their pipeline"
        )
    kind = _PIPELINES[pipeline]
    return replace(arch, causal=kind.causal, first_frame=kind.first_frame)
