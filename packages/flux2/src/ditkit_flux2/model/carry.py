"""The values that one block of FLUX.2 hands to the next."""

from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from ditkit_core.models.token_streams import TokenStreams
from ditkit_flux2.model.rope import Grid


class Flux2DoubleCarry(NamedTuple):
    """Everything one block hands to the next before the join."""

    image: Float[Tensor, "batch image dim"]
    """Target first, then references, then padding."""
    text: Float[Tensor, "batch text dim"]
    image_modulation: Float[Tensor, "batch 6 dim"]
    text_modulation: Float[Tensor, "batch 6 dim"]
    single_modulation: Float[Tensor, "batch 3 dim"]
    time: Float[Tensor, "batch dim"]
    rotary: Float[Tensor, "tables tokens 1 pairs 2"]
    """Cosines and sines, side by side, of text, then image; `tables` is 1 when all samples share a
    layout."""
    padding_mask: Bool[Tensor, "batch tokens"] | None
    """False on the padding of samples shorter than the longest; None when all have one size."""
    grids: tuple[Grid, ...]
    """Rows and columns of each sample's target."""


class Flux2SingleCarry(NamedTuple):
    """Everything one block hands to the next after the join."""

    tokens: Float[Tensor, "batch tokens dim"]
    """Text, then image."""
    modulation: Float[Tensor, "batch 3 dim"]
    time: Float[Tensor, "batch dim"]
    rotary: Float[Tensor, "tables tokens 1 pairs 2"]
    padding_mask: Bool[Tensor, "batch tokens"] | None
    grids: tuple[Grid, ...]


def _token_fields(carry: Flux2DoubleCarry | Flux2SingleCarry) -> dict[str, tuple[str, ...]]:
    both = ("text", "image")
    if isinstance(carry, Flux2SingleCarry):
        return {"tokens": both, "rotary": both}
    return {"image": ("image",), "text": ("text",), "rotary": both}


TOKEN_STREAMS = TokenStreams(
    names=("text", "image"),
    fields=_token_fields,
    inputs={"*.txt_*": ("text",), "*.img_*": ("image",)},
    residual=("text", "image", "tokens"),
    routed="image",
)
"""Text and image, each divided among ranks by itself: blocks before the join have different weights
for them. Text skips no block."""
