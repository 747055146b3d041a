"""diffusers' transformer of LTX-Video, which verifies what is exported."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ditkit_core.adapters.diffusers_model import DiffusersModel, noise_inputs
from ditkit_core.models.spec import lazy
from ditkit_ltx.model import LtxInputs, make_inputs
from ditkit_ltx.presets import LtxArch, config_of
from ditkit_ltx.state_dict import NAMES


def _sizes(arch: LtxArch) -> Mapping[str, Sequence[int]]:
    return {
        "latents": (arch.in_channels, 2, 3, 4),
        "text": (5, arch.text_dim),
        "seconds": (2,),
    }


def diffusers_arguments(inputs: LtxInputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """The arguments of diffusers' transformer for the one sample of our inputs."""
    (latents,), (text,), (seconds,) = inputs.latents, inputs.text, inputs.seconds
    sides = (torch.arange(n, device=seconds.device).double() * 32 for n in latents.shape[2:])
    sigma = inputs.sigma[:, None]
    if inputs.late is not None:
        sigma = inputs.sigma.take_along_dim(inputs.late.long(), 1)
    positions = torch.cartesian_prod(seconds.double(), *sides)
    return {
        "hidden_states": rearrange(latents, "c f h w -> 1 (f h w) c").to(dtype),
        "encoder_hidden_states": text[None].to(dtype),
        "encoder_attention_mask": torch.ones_like(text[None, :, 0]),
        "timestep": 1000 * sigma,
        "video_coords": positions.T[None],
    }


def _run_diffusers(transformer: Any, inputs: LtxInputs) -> Tensor:
    """The velocity of the one sample, in fp32, with the shape of its latents."""
    arguments = diffusers_arguments(inputs, transformer.proj_in.weight.dtype)
    (rows,) = transformer(**arguments, return_dict=False)[0]
    _, frames, height, _ = inputs.latents[0].shape
    return rearrange(rows, "(f h w) c -> c f h w", f=frames, h=height).float()


DIFFUSERS = DiffusersModel(
    names=NAMES,
    kind=lambda arch: "LTXVideoTransformer3DModel",
    config=config_of,
    pipeline=lambda transformer: "LTXPipeline",
    inputs=noise_inputs(make_inputs, _sizes),
    run=_run_diffusers,
    convert=lazy(
        "diffusers.loaders.single_file_utils:convert_ltx_transformer_checkpoint_to_diffusers"
    ),
)
"""diffusers' transformer of any architecture."""
