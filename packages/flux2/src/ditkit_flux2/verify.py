"""diffusers' transformer of FLUX.2, which verifies what is exported."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ditkit_core.adapters.diffusers_model import DiffusersModel, noise_inputs
from ditkit_core.models.spec import lazy
from ditkit_flux2.model.inputs import Flux2Inputs, make_inputs
from ditkit_flux2.model.rope import token_positions
from ditkit_flux2.presets import Flux2Arch
from ditkit_flux2.spec import FLUX2
from ditkit_flux2.state_dict import NAMES


def _sizes(arch: Flux2Arch) -> Mapping[str, Sequence[int]]:
    """With a reference image."""
    empty = FLUX2.training.empty_item(arch, (1, 32, 48), [(48, 32)])
    return {name: tensor.shape for name, tensor in empty.items()}


def _config(arch: Flux2Arch) -> Mapping[str, Any]:
    return {
        "in_channels": arch.in_channels,
        "out_channels": arch.out_channels,
        "num_layers": arch.double_layers,
        "num_single_layers": arch.single_layers,
        "num_attention_heads": arch.heads,
        "attention_head_dim": arch.head_dim,
        "joint_attention_dim": arch.text_dim,
        "timestep_guidance_channels": arch.freq_dim,
        "mlp_ratio": arch.mlp_ratio,
        "axes_dims_rope": arch.axes,
        "rope_theta": arch.theta,
        "eps": arch.eps,
        "guidance_embeds": arch.guidance,
    }


def _run_diffusers(transformer: Any, inputs: Flux2Inputs) -> Tensor:
    (latents,), (text,), (references,) = inputs.latents, inputs.text, inputs.references
    dtype, grid = transformer.x_embedder.weight.dtype, (latents.shape[2], latents.shape[3])
    tokens = torch.cat(
        [rearrange(image, "c 1 h w -> 1 (h w) c") for image in (latents, *references)], 1
    )
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
    kind=lambda arch: "Flux2Transformer2DModel",
    config=_config,
    pipeline=lambda transformer: (
        "Flux2Pipeline" if transformer.config.guidance_embeds else "Flux2KleinPipeline"
    ),
    inputs=noise_inputs(make_inputs, _sizes),
    run=_run_diffusers,
    convert=lazy(
        "diffusers.loaders.single_file_utils:convert_flux2_transformer_checkpoint_to_diffusers"
    ),
)
"""diffusers' transformer of any architecture."""
