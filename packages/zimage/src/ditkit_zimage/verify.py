"""diffusers' transformer of Z-Image, which verifies what is exported."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ditkit_core.adapters.diffusers_model import DiffusersModel, noise_inputs
from ditkit_zimage.model import ZImageInputs, make_inputs
from ditkit_zimage.presets import ZImageArch
from ditkit_zimage.state_dict import NAMES


def _sizes(arch: ZImageArch) -> Mapping[str, Sequence[int]]:
    return {"latents": (arch.in_channels, 1, 4, 6), "text": (5, arch.text_dim)}


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
    inputs=noise_inputs(make_inputs, _sizes),
    run=_run_diffusers,
)
"""diffusers' transformer of any architecture."""
