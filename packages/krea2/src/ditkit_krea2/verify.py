"""diffusers' transformer of Krea 2, which verifies what is exported."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ditkit_core.adapters.diffusers_model import DiffusersModel, noise_inputs
from ditkit_core.models.spec import lazy
from ditkit_krea2.model import PATCH, Krea2Inputs, make_inputs
from ditkit_krea2.presets import Krea2Arch, config_of
from ditkit_krea2.state_dict import NAMES


def _sizes(arch: Krea2Arch) -> Mapping[str, Sequence[int]]:
    return {
        "latents": (arch.in_channels, 1, 4, 6),
        "text": (5, arch.text_layers * arch.text_dim),
    }


def diffusers_arguments(inputs: Krea2Inputs, layers: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The arguments of diffusers' transformer for the one sample of our inputs."""
    (latents,), (text,) = inputs.latents, inputs.text
    rows = rearrange(latents, "c 1 (h p) (w q) -> 1 (h w) (c p q)", p=PATCH, q=PATCH)
    grid = [torch.arange(size // PATCH, device=latents.device) for size in latents.shape[2:]]
    image = torch.cartesian_prod(torch.zeros_like(grid[0][:1]), *grid)
    positions = torch.cat([image.new_zeros(len(text), 3), image])
    return {
        "hidden_states": rows.to(dtype),
        "encoder_hidden_states": text[None].unflatten(-1, (layers, -1)).to(dtype),
        "timestep": inputs.sigma,
        "position_ids": positions,
    }


def _run_diffusers(transformer: Any, inputs: Krea2Inputs) -> Tensor:
    """The velocity of the one sample, in fp32, with the shape of its latents."""
    layers = transformer.config.num_text_layers
    arguments = diffusers_arguments(inputs, layers, transformer.img_in.weight.dtype)
    (rows,) = transformer(**arguments, return_dict=False)[0]
    height = inputs.latents[0].shape[2] // PATCH
    pattern = "(h w) (c p q) -> c 1 (h p) (w q)"
    return rearrange(rows, pattern, h=height, p=PATCH, q=PATCH).float()


DIFFUSERS = DiffusersModel(
    names=NAMES,
    kind=lambda arch: "Krea2Transformer2DModel",
    config=config_of,
    pipeline=lambda transformer: "Krea2Pipeline",
    inputs=noise_inputs(make_inputs, _sizes),
    run=_run_diffusers,
    convert=lazy(
        "diffusers.loaders.single_file_utils:convert_krea2_transformer_checkpoint_to_diffusers"
    ),
)
"""diffusers' transformer of any architecture."""
