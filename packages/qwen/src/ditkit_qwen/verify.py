"""diffusers' transformer of Qwen-Image 2.1, which verifies what is exported."""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ditkit_core.adapters.diffusers_model import DiffusersModel, noise_item
from ditkit_core.models.spec import lazy
from ditkit_qwen.model import QwenInputs, make_inputs
from ditkit_qwen.presets import QwenArch, config_of
from ditkit_qwen.state_dict import NAMES

_SIGMA, _TEXT = 0.5, 5


def _inputs(model: Any) -> QwenInputs:
    """Inputs of noise at a middle noise level, on the model's device: of a tiny image whose sides
    differ, so that swapped axes show."""
    arch: QwenArch = model.embed.arch
    device = model.embed.img_in.weight.device
    empty = {
        "latents": torch.empty(arch.in_channels, 1, 4, 6),
        "text": torch.empty(_TEXT, arch.text_dim),
    }
    item = noise_item(empty, device)
    return make_inputs([item["latents"]], torch.tensor([_SIGMA], device=device), [item], 1.0)


def diffusers_arguments(inputs: QwenInputs, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of diffusers' transformer for the one sample of our inputs."""
    (latents,), (text,) = inputs.latents, inputs.text
    _, _, height, width = latents.shape
    # An image has a slot for each 2 x 2 of its tokens.
    slots = torch.arange(len(text) + height * width // 4, device=latents.device) >= len(text)
    return {
        "hidden_states": rearrange(latents, "c 1 h w -> 1 (h w) c").to(dtype),
        "encoder_hidden_states": text[None].to(dtype),
        "timestep": inputs.sigma,
        "img_shapes": [[(1, height, width)]],
        "img_mask": slots[None],
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
    inputs=_inputs,
    run=_run_diffusers,
    prepare=_make_tables,
    convert=lazy(
        "diffusers.loaders.single_file_utils:"
        "convert_qwen_image21_transformer_checkpoint_to_diffusers"
    ),
)
"""diffusers' transformer of any architecture."""
