"""diffusers' transformer of Zed, which verifies what is exported.

FILL IN 7: the names of the classes, the arguments of the transformer, and how it is called; then `verifier` of family_spec in spec.py names this file.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ditkit_zed.model import ZedInputs, make_inputs
from ditkit_zed.presets import ZedArch
from ditkit_zed.state_dict import NAMES
from torch import Tensor

from ditkit_core.adapters.diffusers_model import DiffusersModel, noise_inputs


def _sizes(arch: ZedArch) -> Mapping[str, Sequence[int]]:
    return {
        "latents": (arch.in_channels, LATENT_FRAMES, 4, 6),
        "text": (5, arch.text_dim),
    }


def _config(arch: ZedArch) -> Mapping[str, Any]:
    """Arguments of diffusers' class."""
    return {
        "in_channels": arch.in_channels,
        "num_layers": arch.layers,
        "num_attention_heads": arch.heads,
    }


def _run_diffusers(transformer: Any, inputs: ZedInputs) -> Tensor:
    """The velocity from data to noise of the one sample, in fp32, with the shape of its latents."""
    (latents,), (text,) = inputs.latents, inputs.text
    dtype = next(transformer.parameters()).dtype
    output = transformer(
        latents[None].to(dtype), inputs.sigma * 1000, text[None].to(dtype), return_dict=False
    )[0]
    return output[0].float()


DIFFUSERS = DiffusersModel(
    names=NAMES,
    kind=lambda arch: "ZedTransformer3DModel",
    config=_config,
    pipeline=lambda transformer: "ZedPipeline",
    inputs=noise_inputs(make_inputs, _sizes),
    run=_run_diffusers,
)
"""diffusers' transformer of any architecture."""
