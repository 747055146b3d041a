"""Tiny models of the three kinds, for tests that compare with diffusers' pipelines."""

from typing import Any

import torch

from ditkit_core.io.rng import generator
from ditkit_core.models.precision import Precision
from ditkit_flux2.model.transformer import Flux2Transformer
from ditkit_flux2.presets import Flux2Arch
from ditkit_flux2.spec import FLUX2

_SIZES: dict[str, Any] = {
    "dim": 32, "heads": 2, "double_layers": 2, "single_layers": 2, "text_dim": 12,
    "in_channels": 16, "out_channels": 16,
    "text_tokens": 7, "axes": (4, 4, 4, 4),
}  # fmt: skip

ARCHS = {
    "dev": Flux2Arch(**_SIZES, guidance=True),
    "klein base": Flux2Arch(**_SIZES, guidance=False),
    "klein": Flux2Arch(**_SIZES, guidance=False, distilled=True),
}


def tiny_model(kind: str, dtype: torch.dtype = torch.float32) -> Flux2Transformer:
    """A model with random weights of which none is zero, and no adapter."""
    with torch.random.fork_rng(devices=[]):
        model = Flux2Transformer(ARCHS[kind], Precision(matmul=dtype))
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator("weight", name))
        fan_in = parameter.shape[-1] if parameter.ndim > 1 else 1
        values = values * fan_in**-0.5 if parameter.ndim > 1 else 1 + 0.2 * values
        parameter.data = values.to(
            torch.promote_types(dtype, torch.float32) if FLUX2.precision.keep_fp32(name) else dtype
        )
    return model.requires_grad_(False).eval()
