"""DoRA's magnitudes in files: the norm that they are divided by, and the way from one to the other.

A row of a DoRA's weight is f · (W + s·B·A). Programs store f as a magnitude over a norm of that
row, and they differ in the norm:

- peft and diffusers, as the paper: over the norm of the merged row, so that the magnitude is the
  norm of the result.
- ComfyUI (comfy/weight_adapter/base.py, as of October 2025): `dora_scale` [out, 1] over the norm of
  the base's row.

Both are exact. Files for ComfyUI get the values with which ComfyUI's own computation results in the
trained weights, and a header that says so, because files of other trainers have the same key over
the merged norm. Going from one norm to the other needs the base.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ditkit_core.models.adapter_formats import ADAPTER_FORMS
from ditkit_core.nn.lora import AT_ONCE
from ditkit_core.weights.fused_tensors import LoraMatrices

DORA_METADATA = "ditkit.dora"
OVER_BASE = (
    "dora_scale is over the norm of each row of the base's weight, as ComfyUI computes it; no "
    "other program is known to read it so, and none was there to verify it"
)
"""Value of `DORA_METADATA` in files of forms whose magnitudes are over the base's norm."""


def is_over_base(metadata: Mapping[str, str]) -> bool:
    """Whether a file's header says that its magnitudes are over the norm of the base's rows."""
    return DORA_METADATA in metadata


def in_norm_of(
    form: str, matrices: LoraMatrices, scale: float, weight: Callable[[], Tensor]
) -> LoraMatrices:
    """An adapter whose magnitude, if it has one, is over the norm that a form (one of
    `ADAPTER_FORMS`) has.

    `scale` is the factor of B·A. `weight` returns the base's weight [out, in], on any device; it is
    called only if the norm changes.
    """
    over_base = ADAPTER_FORMS[form].dora == "base"
    if matrices.magnitude is None or matrices.over_base == over_base:
        return matrices
    base = weight().detach().float()
    ratio = norm_ratio(base, matrices.down, matrices.up, scale).to(matrices.magnitude.device)
    magnitude = matrices.magnitude / ratio if over_base else matrices.magnitude * ratio
    return replace(matrices, magnitude=magnitude, over_base=over_base)


def row_factors(weight: Tensor, matrices: LoraMatrices, scale: float) -> Tensor:
    """f of each row [out] of f · (W + s·B·A), in fp32, with some rows of the base's weight [out,
    in] in fp32 at a time."""
    assert matrices.magnitude is not None
    step, down, norms = max(1, AT_ONCE["cuda"] // weight.shape[1]), matrices.down.float(), []
    for rows, up in zip(weight.split(step), matrices.up.split(step), strict=True):
        if matrices.over_base:
            norms.append(base_norm(rows.float()))
        else:
            norms.append(
                torch.linalg.vector_norm(
                    torch.addmm(rows.float(), up.float(), down, alpha=scale), dim=1
                )
            )
    return matrices.magnitude / torch.cat(norms)


def norm_ratio(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """The norm of each row of W + s·B·A over the norm of the row of W, on the weight's device."""
    merged = torch.addmm(
        weight, up.to(weight.device).float(), down.to(weight.device).float(), alpha=scale
    )
    return torch.linalg.vector_norm(merged, dim=1) / base_norm(weight)


def base_norm(weight: Tensor) -> Tensor:
    """The norm of each row of the base's fp32 weight, with ComfyUI's addition for rows of zeros."""
    return torch.linalg.vector_norm(weight, dim=1) + torch.finfo(torch.float32).eps
