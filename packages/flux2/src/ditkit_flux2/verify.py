"""Prove an exported adapter: diffusers loads the file and gets the output that our own model has."""

from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ditkit_core.adapters.verify import compare_with_pipeline, share_base
from ditkit_core.adapters.verify_whole import compare_whole, load_whole
from ditkit_core.io.rng import generator
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.protocol import Engine
from ditkit_flux2.model.inputs import Flux2Inputs
from ditkit_flux2.model.rope import token_positions
from ditkit_flux2.presets import Flux2Arch
from ditkit_flux2.state_dict import NAMES

_TARGET, _REFERENCE = (2, 3), (3, 2)
"""Rows and columns of latents of the two images: tiny, and of different shapes, so that swapped axes show."""
_SIGMA, _GUIDANCE = 0.5, 1.0
"""diffusers multiplies both by 1000 in 16 bits; the products of these values are exact there."""


def verify_export(adapter_file: Path, components: ModelPaths, model: Any, engine: Engine) -> str:
    """Load an adapter file in official or diffusers form with diffusers, and compare outputs on fixed random inputs.

    Arguments and result are those of `AdapterSpec.verify`. The inputs have a reference image. diffusers' model shares the base's tensors in memory under its own
    names: that costs no memory, keeps merged adapters, and works for bases in any layout.

    Raises:
        UserError: If diffusers rejects the file or skips a part of it, or the outputs differ. They also differ if the adapter
            has an effect in our model alone.
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


def diffusers_transformer(model: Any) -> Any:
    """diffusers' transformer over the tensors of our base, without its adapter.

    The blocks' matrices are shared. The other 2 % are copies in the matmuls' dtype, in which diffusers computes everything.
    """
    transformer, dtype = _empty_transformer(model), model.embed.precision.matmul
    share_base(transformer, model, NAMES, "diffusers", lambda name: dtype)
    return transformer


def verify_whole(folder: Path, form: str, model: Any, engine: Engine) -> str:
    """Load the folder of a whole transformer as diffusers does, and compare outputs on fixed random inputs.

    Arguments and result are those of `AdapterSpec.verify_whole`. diffusers' own conversion renames official tensors.

    Raises:
        UserError: If names or shapes are not those of diffusers' model, or the outputs differ.
    """
    inputs, transformer = _inputs(model), _empty_transformer(model)
    source = load_whole(transformer, folder, _to_diffusers if form == "official" else None)
    return compare_whole(
        folder,
        source,
        ours=lambda: engine(model, inputs)[0].float(),
        theirs=lambda: run_diffusers(transformer, inputs)[0].float(),
    )


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


def run_diffusers(transformer: Any, inputs: Flux2Inputs) -> list[Tensor]:
    """The velocity that diffusers' transformer predicts for one sample, in our layout."""
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
    return [rearrange(output[0, : height * width], "(h w) c -> c 1 h w", h=height)]
