"""Prove an exported adapter: diffusers loads the file and gets the output that our own model has."""

from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ditkit_core.adapters.verify import compare_with_pipeline, share_base
from ditkit_core.io.rng import generator
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.protocol import Engine
from ditkit_flux2.model.inputs import Flux2Inputs
from ditkit_flux2.model.rope import token_positions
from ditkit_flux2.presets import Flux2Arch
from ditkit_flux2.state_dict import NAMES

_TARGET, _REFERENCE = (2, 3), (3, 2)
"""Rows and columns of the pictures that outputs are compared on: tiny, of different shapes."""
_SIGMA, _GUIDANCE = 0.5, 1.0
"""A thousand times of these is exact in 16 bits, in which diffusers multiplies them."""


def verify_export(adapter_file: Path, components: ModelPaths, model: Any, engine: Engine) -> str:
    """Load an adapter file with diffusers over our own base weights, and compare outputs on fixed random inputs.

    The inputs have a reference picture. The base is handed over in memory, tensor by tensor under diffusers' names, not read
    again: that costs no memory, keeps what was merged into it, and works for bases in any layout.

    Args:
        adapter_file: The file, in official or diffusers form.
        components: Where the model lies; named in messages.
        model: Our model with the adapter that the file should hold, on any device.
        engine: The engine that runs it.

    Returns:
        One line that says what was compared and how close it was.

    Raises:
        UserError: If diffusers rejects the file or leaves a part of it out, or the outputs differ; so also if only ours has
            an effect.
    """
    from diffusers import Flux2KleinPipeline, Flux2Pipeline

    inputs, transformer = _inputs(model), diffusers_transformer(model)
    pipeline = Flux2Pipeline if model.embed.arch.guidance else Flux2KleinPipeline
    return compare_with_pipeline(
        adapter_file,
        components,
        model,
        NAMES,
        pipeline=pipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=None, transformer=transformer),
        ours=lambda: engine(model, inputs)[0].float(),
        theirs=lambda: run_diffusers(transformer, inputs)[0].float(),
    )


def _inputs(model: Any) -> Flux2Inputs:
    """A tiny picture of noise at a middle noise level, with text and a reference; on the model's device."""
    arch: Flux2Arch = model.embed.arch
    device = model.embed.img_in.weight.device
    random = generator("verify export")

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=random).to(device)

    return Flux2Inputs(
        latents=[drawn(arch.in_channels, 1, *_TARGET)],
        sigma=torch.tensor([_SIGMA], device=device),
        guidance=torch.tensor([_GUIDANCE], device=device),
        text=[drawn(arch.text_tokens, arch.text_dim)],
        references=[[drawn(arch.in_channels, 1, *_REFERENCE)]],
    )


def diffusers_transformer(model: Any) -> Any:
    """diffusers' transformer over the very tensors of our base, without its adapter.

    What diffusers computes in the matmuls' dtype and we do not is cast: 2 % of the model. Blocks' matrices are shared.
    """
    from diffusers import Flux2Transformer2DModel

    arch: Flux2Arch = model.embed.arch
    with torch.device("meta"):
        transformer = Flux2Transformer2DModel(
            in_channels=arch.in_channels, out_channels=arch.out_channels, num_layers=arch.double_layers,
            num_single_layers=arch.single_layers, num_attention_heads=arch.heads, attention_head_dim=arch.head_dim,
            joint_attention_dim=arch.text_dim, timestep_guidance_channels=arch.freq_dim, mlp_ratio=arch.mlp_ratio,
            axes_dims_rope=arch.axes, rope_theta=arch.theta, eps=arch.eps, guidance_embeds=arch.guidance,
        )  # fmt: skip
    dtype = model.embed.precision.matmul
    share_base(transformer, model, NAMES, "diffusers", lambda name: dtype)
    return transformer.eval()


def run_diffusers(transformer: Any, inputs: Flux2Inputs) -> list[Tensor]:
    """What diffusers' transformer predicts for one sample, in our layout."""
    (latents,), (text,), (references,) = inputs.latents, inputs.text, inputs.references
    dtype, grid = transformer.x_embedder.weight.dtype, (latents.shape[2], latents.shape[3])
    tokens = torch.cat([rearrange(picture, "c 1 h w -> 1 (h w) c") for picture in (latents, *references)], 1)
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
    return [rearrange(output[0, : height * width], "(h w) c -> c 1 h w", h=height)]
