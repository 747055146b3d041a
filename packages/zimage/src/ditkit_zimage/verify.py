"""diffusers' transformer of Z-Image, which verifies what is exported."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ditkit_core.adapters.diffusers_model import DiffusersModel, noise_item
from ditkit_zimage.model import ZImageInputs, make_inputs
from ditkit_zimage.presets import ZImageArch
from ditkit_zimage.state_dict import NAMES

_SIGMA, _TEXT = 0.5, 5


def _inputs(model: Any) -> ZImageInputs:
    """Inputs of noise at a middle noise level, on the model's device: of a tiny image whose sides
    differ, so that swapped axes show."""
    arch: ZImageArch = model.embed.arch
    device = model.embed.x_pad_token.device
    empty = {
        "latents": torch.empty(arch.in_channels, 1, 4, 6),
        "text": torch.empty(_TEXT, arch.text_dim),
    }
    item = noise_item(empty, device)
    return make_inputs([item["latents"]], torch.tensor([_SIGMA], device=device), [item], 1.0)


def _config(arch: ZImageArch) -> Mapping[str, Any]:
    return {
        "in_channels": arch.in_channels,
        "dim": arch.dim,
        "n_layers": arch.layers,
        "n_refiner_layers": arch.refiner_layers,
        "n_heads": arch.heads,
        "n_kv_heads": arch.heads,
        "norm_eps": arch.eps,
        "cap_feat_dim": arch.text_dim,
        "rope_theta": arch.theta,
        "axes_dims": list(arch.axes),
    }


def _run_diffusers(transformer: Any, inputs: ZImageInputs) -> Tensor:
    (latents,), (text,), (mask,) = inputs.latents, inputs.text, inputs.text_mask
    dtype = transformer.x_pad_token.dtype
    output = transformer(
        [latents.to(dtype)], 1 - inputs.sigma, [text[mask].to(dtype)], return_dict=False
    )[0][0]
    return -output.float()


DIFFUSERS = DiffusersModel(
    names=NAMES,
    kind=lambda arch: "ZImageTransformer2DModel",
    config=_config,
    pipeline=lambda transformer: "ZImagePipeline",
    inputs=_inputs,
    run=_run_diffusers,
)
"""diffusers' transformer of any architecture."""
