"""diffusers' transformer of Qwen-Image 2.1, which verifies what is exported."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ditkit_core.adapters.diffusers_model import DiffusersModel, noise_inputs
from ditkit_core.models.spec import lazy
from ditkit_qwen.model import QwenInputs, make_inputs
from ditkit_qwen.presets import QwenArch, config_of
from ditkit_qwen.state_dict import NAMES


def _sizes(arch: QwenArch) -> Mapping[str, Sequence[int]]:
    """With text around a reference."""
    return {
        "latents": (arch.in_channels, 1, 4, 6),
        "reference.0": (arch.in_channels, 1, 6, 4),
        "text.0": (3, arch.text_dim),
        "text": (5, arch.text_dim),
    }


def diffusers_arguments(inputs: QwenInputs, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of diffusers' transformer for the one sample of our inputs."""
    (latents,), (text,), (references,) = inputs.latents, inputs.text, inputs.references
    images = [*references, latents]
    grids = [(image.shape[2], image.shape[3]) for image in images]
    # An image has a slot for each 2 x 2 of its tokens, whose features are not read.
    rows, slots = list[Tensor](), list[Tensor]()
    for part, grid in zip(text, grids, strict=True):
        features = part.new_zeros(prod(grid) // 4, part.shape[1])
        rows += [part, features]
        slots += [part.new_zeros(len(x), dtype=torch.bool) + (x is features) for x in rows[-2:]]
    return {
        "hidden_states": torch.cat(
            [rearrange(image, "c 1 h w -> 1 (h w) c") for image in images], 1
        ).to(dtype),
        "encoder_hidden_states": torch.cat(rows[:-1])[None].to(dtype),
        "timestep": inputs.sigma,
        "img_shapes": [[(1, *grid) for grid in grids]],
        "img_mask": torch.cat(slots)[None],
    }


def _run_diffusers(transformer: Any, inputs: QwenInputs) -> Tensor:
    """The velocity of the one sample, in fp32, with the shape of its latents."""
    arguments = diffusers_arguments(inputs, transformer.img_in.weight.dtype)
    (rows,) = transformer(**arguments, return_dict=False)[0]
    _, _, height, width = inputs.latents[0].shape
    return rearrange(rows[-height * width :], "(h w) c -> c 1 h w", h=height).float()


def _make_tables(transformer: Any, device: torch.device) -> None:
    """Make the tables of positions and of the noise level anew, which were made on `meta`."""
    rope, sinusoid = transformer.pos_embed, transformer.time_text_embed.time_proj
    with device:
        rope.freqs = type(rope)(rope.theta, rope.axes_dim).freqs
        sinusoid.freqs = type(sinusoid)(sinusoid.timestep_dim).freqs


DIFFUSERS = DiffusersModel(
    names=NAMES,
    kind=lambda arch: "QwenImage21Transformer2DModel",
    config=config_of,
    # Its other pipeline asks a processor for tokens as soon as it is made.
    pipeline=lambda transformer: "QwenImage21ModularPipeline",
    inputs=noise_inputs(make_inputs, _sizes),
    run=_run_diffusers,
    prepare=_make_tables,
    convert=lazy(
        "diffusers.loaders.single_file_utils:"
        "convert_qwen_image21_transformer_checkpoint_to_diffusers"
    ),
)
"""diffusers' transformer of any architecture."""
