"""diffusers' transformer of Wan, which verifies what is exported."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ditkit_core.adapters.diffusers_model import DiffusersModel, noise_item
from ditkit_core.models.spec import lazy
from ditkit_wan.model.inputs import WanInputs, empty_item, make_inputs
from ditkit_wan.model.variants.animate import blur_kernel
from ditkit_wan.presets import WanArch
from ditkit_wan.state_dict import NAMES


def _inputs(model: Any) -> WanInputs:
    """Inputs of a tiny clip of noise at a middle noise level, with a short text and noise for all
    other conditions, on the model's device."""
    arch: WanArch = model.embed.arch
    device = model.embed.patch_embedding.weight.device
    side = 4 * arch.latent_stride
    with torch.device("meta"):
        empty = empty_item(arch, (5, side, side))
    item = noise_item(empty, device)
    item["text"][8:] = 0  # padding, which both models attend to
    return make_inputs([item["latents"]], torch.tensor([0.6], device=device), [item], 1.0)


_FACE_MODULES = ("motion_encoder", "face_encoder")
"""Modules that diffusers computes in the dtype of their parameters; ours are fp32."""


def _dtype_of(transformer: Any, name: str, matmul: torch.dtype) -> torch.dtype:
    keep = any(
        part in (*transformer._keep_in_fp32_modules, *_FACE_MODULES) for part in name.split(".")
    )
    return torch.float32 if keep and matmul != torch.float64 else matmul


def _config(arch: WanArch) -> Mapping[str, Any]:
    config: dict[str, Any] = {
        "patch_size": arch.patch,
        "num_attention_heads": arch.heads,
        "attention_head_dim": arch.head_dim,
        "in_channels": arch.in_channels,
        "out_channels": arch.out_channels,
        "text_dim": arch.text_dim,
        "freq_dim": arch.freq_dim,
        "ffn_dim": arch.ffn_dim,
        "num_layers": arch.layers,
        "eps": arch.eps,
    }
    if arch.vace_layers:
        config |= {"vace_layers": arch.vace_layers, "vace_in_channels": arch.vace_channels}
    if arch.image_dim:
        config |= {"image_dim": arch.image_dim, "added_kv_proj_dim": arch.dim}
    if arch.image_positions:
        config["pos_embed_seq_len"] = arch.image_positions
    if (animate := arch.animate) is not None:
        size, layers = animate.face_size, animate.layers
        config |= {
            "motion_encoder_channel_sizes": {
                str(size >> level): num for level, num in enumerate(animate.face_channels)
            },
            "motion_encoder_size": size,
            "motion_style_dim": animate.style,
            "motion_dim": animate.motion,
            "motion_encoder_dim": animate.motion_dim,
            "face_encoder_hidden_dim": animate.width,
            "face_encoder_num_heads": animate.tokens,
            "inject_face_latents_blocks": layers[1] if len(layers) > 1 else arch.layers,
        }
    return config


def _kind(arch: WanArch) -> str:
    if arch.animate:
        return "WanAnimateTransformer3DModel"
    return "WanVACETransformer3DModel" if arch.vace_layers else "WanTransformer3DModel"


def _make_tables(transformer: Any, device: torch.device) -> None:
    config = transformer.config
    transformer.rope = type(transformer.rope)(
        config.attention_head_dim, config.patch_size, 1024
    ).to(device)
    if "motion_encoder_dim" in config:
        for module in transformer.motion_encoder.modules():
            if getattr(module, "blur", False):
                module.blur_kernel = blur_kernel(device)
        # Its face encoder is in fp32 like ours, and what follows is in the dtype of the matmuls.
        matmul = lambda module, inputs, out: out.to(transformer.pose_patch_embedding.weight.dtype)
        transformer.face_encoder.register_forward_hook(matmul)


def _run_diffusers(transformer: Any, inputs: WanInputs) -> Tensor:
    dtype = transformer.patch_embedding.weight.dtype
    hidden = [*inputs.latents, *(inputs.y or ())]
    arguments = {"hidden_states": torch.cat(hidden), "encoder_hidden_states": inputs.text[0]}
    if inputs.image is not None:
        arguments["encoder_hidden_states_image"] = inputs.image[0]
    if inputs.vace is not None:
        arguments["control_hidden_states"] = inputs.vace[0]
    batch = {name: tensor[None].to(dtype) for name, tensor in arguments.items()}
    if inputs.face is not None:
        assert inputs.pose is not None and inputs.pose[0] is not None, "Animate has poses"
        batch |= {
            "pose_hidden_states": inputs.pose[0][None].to(dtype),
            "face_pixel_values": inputs.face[0][None],
        }
    # it takes the two images of a sample as two rows of the batch
    if transformer.config.pos_embed_seq_len:
        batch["encoder_hidden_states_image"] = batch["encoder_hidden_states_image"][0].unflatten(
            0, (2, -1)
        )
    timestep = inputs.timestep
    if inputs.late is not None:
        timestep = torch.where(inputs.late, timestep[:, 1:], timestep[:, :1])
    velocity: Tensor = transformer(timestep=timestep, return_dict=False, **batch)[0][0]
    return velocity.float()


DIFFUSERS = DiffusersModel(
    names=NAMES,
    kind=_kind,
    config=_config,
    pipeline=lambda transformer: "WanPipeline",
    inputs=_inputs,
    run=_run_diffusers,
    dtype_of=_dtype_of,
    prepare=_make_tables,
    convert=lazy("diffusers.loaders.single_file_utils:convert_wan_transformer_to_diffusers"),
)
"""diffusers' transformer of any architecture that it has."""
