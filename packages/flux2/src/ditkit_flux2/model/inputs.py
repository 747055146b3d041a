"""The model's inputs, and how they are made of noised latents and training items."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.families.references import numbered_tensors


class Flux2Inputs(NamedTuple):
    """The model's inputs: one entry per sample; samples may differ in size."""

    latents: Sequence[Tensor]
    """[channels, 1, height, width] each."""
    sigma: Float[Tensor, " batch"]
    """Noise level from 0 to 1, fp32 or wider."""
    guidance: Float[Tensor, " batch"] | None
    """Guidance scale; a model without an embedding of it ignores it."""
    text: Sequence[Tensor]
    """[text_tokens, text_dim] each; all rows are attended to."""
    references: Sequence[Sequence[Tensor]]
    """Latents of each sample's reference images, in order; may be empty."""


def make_inputs(
    noised: Sequence[Tensor], sigma: Tensor, items: Sequence[Mapping[str, Tensor]], guidance: float
) -> Flux2Inputs:
    """Make the model's inputs of noised latents and training items."""
    device = noised[0].device
    return Flux2Inputs(
        latents=noised,
        sigma=sigma,
        guidance=torch.full_like(sigma, guidance),
        text=[item["text"].to(device) for item in items],
        references=[numbered_tensors(item, "reference", device) for item in items],
    )
