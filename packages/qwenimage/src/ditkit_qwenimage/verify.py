"""diffusers' transformer of Qwen-Image, which verifies what is exported."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ditkit_core.adapters.diffusers_model import DiffusersModel, noise_inputs
from ditkit_qwenimage.model import PATCH, QwenImageInputs, make_inputs, tokens_of
from ditkit_qwenimage.presets import QwenImageArch, config_of
from ditkit_qwenimage.state_dict import NAMES


def _sizes(arch: QwenImageArch) -> Mapping[str, Sequence[int]]:
    """With a reference if the model edits."""
    images = {"latents": (arch.in_channels, 1, 4, 6)}
    if arch.task != "image":
        images["reference.0"] = (arch.in_channels, 1, 6, 4)
    return {**images, "text": (5, arch.text_dim)}


def diffusers_arguments(inputs: QwenImageInputs, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of diffusers' transformer for the one sample of our inputs."""
    (latents,), (text,), (references,) = inputs.latents, inputs.text, inputs.references
    images = [latents, *references]
    return {
        "hidden_states": torch.cat([tokens_of(image) for image in images])[None].to(dtype),
        "encoder_hidden_states": text[None].to(dtype),
        "timestep": inputs.sigma,
        "img_shapes": [[(1, x.shape[2] // PATCH, x.shape[3] // PATCH) for x in images]],
    }


def image_of(rows: Tensor, latents: Tensor) -> Tensor:
    """What diffusers predicts for the tokens of an image, with the shape of its latents."""
    height, width = (size // PATCH for size in latents.shape[2:])
    pattern = "(h w) (c p q) -> c 1 (h p) (w q)"
    return rearrange(rows[: height * width], pattern, h=height, p=PATCH, q=PATCH)


def _run_diffusers(transformer: Any, inputs: QwenImageInputs) -> Tensor:
    """The velocity of the one sample, in fp32, with the shape of its latents."""
    arguments = diffusers_arguments(inputs, transformer.img_in.weight.dtype)
    (rows,) = transformer(**arguments, return_dict=False)[0]
    return image_of(rows, inputs.latents[0]).float()


def _make_tables(transformer: Any, device: torch.device) -> None:
    """Make the tables of positions anew, which were made on `meta`."""
    rope = transformer.pos_embed
    new = type(rope)(rope.theta, rope.axes_dim, rope.scale_rope)
    rope.pos_freqs, rope.neg_freqs = new.pos_freqs.to(device), new.neg_freqs.to(device)


DIFFUSERS = DiffusersModel(
    names=NAMES,
    kind=lambda arch: "QwenImageTransformer2DModel",
    config=config_of,
    pipeline=lambda transformer: "QwenImagePipeline",
    inputs=noise_inputs(make_inputs, _sizes),
    run=_run_diffusers,
    prepare=_make_tables,
)
"""diffusers' transformer of any architecture."""
