"""diffusers' transformer of FLUX.3, which verifies what is exported."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ditkit_core.adapters.diffusers_model import DiffusersModel, noise_inputs
from ditkit_core.models.spec import lazy
from ditkit_flux3.model import Flux3Inputs, make_inputs
from ditkit_flux3.presets import Flux3Arch
from ditkit_flux3.state_dict import NAMES


def _sizes(arch: Flux3Arch) -> Mapping[str, Sequence[int]]:
    return {
        "latents": (arch.in_channels, 1, 2, 3),
        "reference.0": (arch.in_channels, 1, 3, 2),
        "text": (5, arch.text_dim),
    }


def _config(arch: Flux3Arch) -> Mapping[str, Any]:
    return {
        "in_channels": arch.in_channels,
        "cond_in_channels": arch.in_channels,
        "num_layers": arch.tower_layers,
        "num_single_layers": arch.layers,
        "num_attention_heads": arch.heads,
        "attention_head_dim": arch.head_dim,
        "joint_attention_dim": arch.text_dim,
        "timestep_channels": arch.freq_dim,
        "mlp_ratio": arch.mlp_ratio,
        "axes_dims_rope": arch.axes,
        "rope_theta": arch.theta,
        "eps": arch.eps,
        "flow_map": arch.flow_map,
    }


_ROPE_SCALE = 0.5
"""`image_rope_scale` of diffusers' pipeline: not the model's constant, which this is to check."""


def positions(
    device: torch.device, *, text: int = 1, grid: Sequence[int] = (1, 1), index: int = 0
) -> Tensor:
    """diffusers' position ids [tokens, 4] of rows of text, or of an image's grid."""
    axes = [torch.arange(size, device=device).double() for size in (1, *grid, text)]
    ids = torch.cartesian_prod(*axes)
    return ids * torch.tensor([1, _ROPE_SCALE, _ROPE_SCALE, 1], device=device) + torch.tensor(
        [0, 0, 0, index], device=device
    )


def diffusers_arguments(inputs: Flux3Inputs, dtype: torch.dtype, flow_map: bool) -> dict[str, Any]:
    """Arguments of diffusers' forward for one sample."""
    (latents,), (text,), (references,) = inputs.latents, inputs.text, inputs.references
    device = latents.device

    def packed(image: Tensor) -> Tensor:
        return rearrange(image, "c 1 h w -> 1 (h w) c").to(dtype)

    others = {}
    if references:
        others["image_cond_hidden_states"] = torch.cat([packed(image) for image in references], 1)
        others["image_cond_ids"] = torch.cat(
            [
                positions(device, grid=image.shape[2:], index=-1 - index)
                for index, image in enumerate(references)
            ]
        )
    if flow_map:
        others["target_timestep"] = inputs.target
    return {
        "hidden_states": packed(latents),
        "encoder_hidden_states": text[None].to(dtype),
        "timestep": inputs.sigma,
        "img_ids": positions(device, grid=latents.shape[2:]),
        "txt_ids": positions(device, text=len(text)),
        **others,
    }


def _run_diffusers(transformer: Any, inputs: Flux3Inputs) -> Tensor:
    (latents,) = inputs.latents
    dtype = transformer.context_embedder.weight.dtype
    output = transformer(
        **diffusers_arguments(inputs, dtype, transformer.config.flow_map), return_dict=False
    )[0]
    return rearrange(output[0], "(h w) c -> c 1 h w", h=latents.shape[2]).float()


DIFFUSERS = DiffusersModel(
    names=NAMES,
    kind=lambda arch: "Flux3Transformer2DModel",
    config=_config,
    # Both pipelines have one loader; this one lacks the blocks of guidance, which warn.
    pipeline=lambda transformer: "Flux3DistilledModularPipeline",
    inputs=noise_inputs(make_inputs, _sizes),
    run=_run_diffusers,
    # diffusers keeps the norms of q and k in fp32.
    dtype_of=lambda transformer, name, matmul: (
        torch.promote_types(matmul, torch.float32) if ".norm_" in name else matmul
    ),
    convert=lazy(
        "diffusers.loaders.single_file_utils:convert_flux3_transformer_checkpoint_to_diffusers"
    ),
)
"""diffusers' transformer of any architecture."""
