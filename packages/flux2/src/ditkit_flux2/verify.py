"""diffusers' transformer of FLUX.2, which verifies what is exported."""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ditkit_core.adapters.diffusers_model import DiffusersModel
from ditkit_core.io.rng import generator
from ditkit_flux2.model.inputs import Flux2Inputs
from ditkit_flux2.model.rope import token_positions
from ditkit_flux2.presets import Flux2Arch
from ditkit_flux2.state_dict import NAMES

_TARGET, _REFERENCE = (2, 3), (3, 2)
"""Rows and columns of latents of the two images: tiny, and of different shapes, so that swapped axes show."""
_SIGMA, _GUIDANCE = 0.5, 1.0
"""diffusers multiplies both by 1000 in 16 bits; the products of these values are exact there."""


def _inputs(model: Any) -> Flux2Inputs:
    """Inputs of noise at a middle noise level, with text and a reference image, on the model's device."""
    arch: Flux2Arch = model.embed.arch
    device = model.embed.img_in.weight.device
    random = generator("verify export")

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=random).to(device)

    return Flux2Inputs(
        latents=[noise(arch.in_channels, 1, *_TARGET)],
        sigma=torch.tensor([_SIGMA], device=device),
        guidance=torch.tensor([_GUIDANCE], device=device),
        text=[noise(arch.text_tokens, arch.text_dim)],
        references=[[noise(arch.in_channels, 1, *_REFERENCE)]],
    )


def _pipeline(transformer: Any) -> Any:
    from diffusers import Flux2KleinPipeline, Flux2Pipeline

    kind = Flux2Pipeline if transformer.config.guidance_embeds else Flux2KleinPipeline
    return kind(tokenizer=None, text_encoder=None, vae=None, scheduler=None, transformer=transformer)


def _to_diffusers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers

    converted: dict[str, Tensor] = convert_flux2_transformer_checkpoint_to_diffusers(state)
    return converted


def _empty_transformer(model: Any) -> Any:
    """diffusers' transformer of our architecture, with parameters on `meta`."""
    from diffusers import Flux2Transformer2DModel

    arch: Flux2Arch = model.embed.arch
    with torch.device("meta"):
        transformer = Flux2Transformer2DModel(
            in_channels=arch.in_channels,
            out_channels=arch.out_channels,
            num_layers=arch.double_layers,
            num_single_layers=arch.single_layers,
            num_attention_heads=arch.heads,
            attention_head_dim=arch.head_dim,
            joint_attention_dim=arch.text_dim,
            timestep_guidance_channels=arch.freq_dim,
            mlp_ratio=arch.mlp_ratio,
            axes_dims_rope=arch.axes,
            rope_theta=arch.theta,
            eps=arch.eps,
            guidance_embeds=arch.guidance,
        )
    return transformer.eval()


def _run_diffusers(transformer: Any, inputs: Flux2Inputs) -> Tensor:
    (latents,), (text,), (references,) = inputs.latents, inputs.text, inputs.references
    dtype, grid = transformer.x_embedder.weight.dtype, (latents.shape[2], latents.shape[3])
    tokens = torch.cat([rearrange(image, "c 1 h w -> 1 (h w) c") for image in (latents, *references)], 1)
    grids = [(reference.shape[2], reference.shape[3]) for reference in references]
    positions = token_positions(len(text), grid, grids, latents.device)
    output = transformer(
        hidden_states=tokens.to(dtype),
        encoder_hidden_states=text[None].to(dtype),
        timestep=inputs.sigma,
        guidance=inputs.guidance if transformer.config.guidance_embeds else None,
        txt_ids=positions[: len(text)],
        img_ids=positions[len(text) :],
        return_dict=False,
    )[0]
    height, width = grid
    return rearrange(output[0, : height * width], "(h w) c -> c 1 h w", h=height).float()


DIFFUSERS = DiffusersModel(
    names=NAMES,
    inputs=_inputs,
    empty=_empty_transformer,
    dtype_of=lambda transformer, name, matmul: matmul,  # in which diffusers computes everything
    run=_run_diffusers,
    pipeline=_pipeline,
    convert=_to_diffusers,
)
"""diffusers' transformer of any architecture."""
