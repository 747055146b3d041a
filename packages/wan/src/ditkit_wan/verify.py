"""Prove an exported adapter: diffusers loads the file and gets the output that our own model has."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ditkit_core.adapters.verify import compare_with_pipeline, share_base
from ditkit_core.adapters.verify_whole import compare_whole, load_whole
from ditkit_core.io.rng import generator
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.protocol import Engine
from ditkit_wan.model.inputs import WanInputs, empty_item, make_inputs
from ditkit_wan.presets import WanArch
from ditkit_wan.state_dict import NAMES


def verify_export(adapter_file: Path, components: ModelPaths, model: Any, engine: Engine) -> str:
    """Load an adapter file in official or diffusers form with diffusers, and compare outputs on fixed random inputs.

    Arguments and result are those of `AdapterSpec.verify`. diffusers' model shares the base's tensors in memory under its own
    names: that costs no memory, keeps merged adapters, and works for bases in any layout.

    Raises:
        UserError: If diffusers rejects the file or skips a part of it, or the outputs differ. They also differ if the adapter
            has an effect in our model alone.
    """
    from diffusers import WanPipeline

    inputs, transformer = _inputs(model), _diffusers_transformer(model)
    return compare_with_pipeline(
        adapter_file,
        components,
        model,
        NAMES,
        pipeline=WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=None, transformer=transformer),
        ours=lambda: engine(model, inputs)[0].float(),
        theirs=lambda: _run_diffusers(transformer, inputs),
    )


def _inputs(model: Any) -> WanInputs:
    """Inputs of a tiny clip of noise at a middle noise level, with a short text and noise for all other conditions, on the model's device."""
    arch: WanArch = model.embed.arch
    device = model.embed.patch_embedding.weight.device
    random = generator("verify export")
    side = 4 * arch.latent_stride
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in empty_item(arch, (5, side, side)).items()}
    item = {name: torch.randn(shape, generator=random).to(device) for name, shape in shapes.items()}
    item["text"][8:] = 0  # padding, which both models attend to
    return make_inputs([item["latents"]], torch.tensor([0.6], device=device), [item], 1.0)


def _diffusers_transformer(model: Any) -> Any:
    """diffusers' transformer over the tensors of our base, without its adapter.

    The blocks' matrices are shared. Other tensors are small, and copies of them have the dtype that diffusers computes in.
    """
    transformer = _empty_transformer(model)
    fp32 = tuple(transformer._keep_in_fp32_modules)
    dtype = model.embed.precision.matmul

    def dtype_of(name: str) -> torch.dtype:
        keep = any(part in fp32 for part in name.split("."))
        return torch.float32 if keep and dtype != torch.float64 else dtype

    share_base(transformer, model, NAMES, "diffusers", dtype_of)
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
        theirs=lambda: _run_diffusers(transformer, inputs),
    )


def _to_diffusers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    converted: dict[str, Tensor] = convert_wan_transformer_to_diffusers(state)
    return converted


def _empty_transformer(model: Any) -> Any:
    """diffusers' transformer of our architecture, with parameters on `meta`."""
    from diffusers import WanTransformer3DModel, WanVACETransformer3DModel

    arch: WanArch = model.embed.arch
    kind, more = WanTransformer3DModel, {}
    if arch.vace_layers:
        kind, more = (
            WanVACETransformer3DModel,
            {"vace_layers": arch.vace_layers, "vace_in_channels": arch.vace_channels},
        )
    if arch.image_dim:
        more |= {"image_dim": arch.image_dim, "added_kv_proj_dim": arch.dim}
    if arch.image_positions:
        more["pos_embed_seq_len"] = arch.image_positions
    with torch.device("meta"):
        transformer = kind(
            patch_size=arch.patch,
            num_attention_heads=arch.heads,
            attention_head_dim=arch.head_dim,
            in_channels=arch.in_channels,
            out_channels=arch.out_channels,
            text_dim=arch.text_dim,
            freq_dim=arch.freq_dim,
            ffn_dim=arch.ffn_dim,
            num_layers=arch.layers,
            eps=arch.eps,
            **more,
        )
    device = model.embed.patch_embedding.weight.device
    transformer.rope = type(transformer.rope)(arch.head_dim, arch.patch, 1024).to(
        device
    )  # built anew: its tables are no parameters, and are on `meta`
    return transformer.eval()


def _run_diffusers(transformer: Any, inputs: WanInputs) -> Tensor:
    dtype = transformer.patch_embedding.weight.dtype
    hidden = [*inputs.latents, *(inputs.y or ())]
    given = {"hidden_states": torch.cat(hidden), "encoder_hidden_states": inputs.text[0]}
    if inputs.image is not None:
        given["encoder_hidden_states_image"] = inputs.image[0]
    if inputs.vace is not None:
        given["control_hidden_states"] = inputs.vace[0]
    batch = {name: tensor[None].to(dtype) for name, tensor in given.items()}
    if transformer.config.pos_embed_seq_len:  # it takes the two images of a sample as two rows of the batch
        batch["encoder_hidden_states_image"] = batch["encoder_hidden_states_image"][0].unflatten(0, (2, -1))
    timestep = inputs.timestep
    if inputs.late is not None:
        timestep = torch.where(inputs.late, timestep[:, 1:], timestep[:, :1])
    velocity: Tensor = transformer(timestep=timestep, return_dict=False, **batch)[0][0]
    return velocity.float()
