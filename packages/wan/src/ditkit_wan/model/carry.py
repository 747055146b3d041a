"""What one block of Wan hands to the next."""

from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor


class ReferenceCarry(NamedTuple):
    """Of models with frames in front of the clip's."""

    fronts: tuple[int, ...]
    """Frames of each sample's grid that stand before the clip, which the head cuts off."""


class VaceCarry(NamedTuple):
    """Of VACE."""

    stream: Float[Tensor, "batch tokens dim"]
    """VACE's own stream, which its blocks advance."""


class MusicCarry(NamedTuple):
    """Of WanToDance."""

    rows: Float[Tensor, "batch music dim"]
    """What the tokens hear, a row for each group of them."""
    steps: tuple[int, ...]
    """Rows of music that each frame of a sample lasts."""
    skips: bool
    """Whether the block is left out that guidance steers away by."""


class WanCarry(NamedTuple):
    """Everything one block hands to the next; None is what a variant has not. What belongs to one variant alone is a tuple of its own."""

    tokens: Float[Tensor, "batch tokens dim"]
    modulation: Float[Tensor, "batch times 6 dim"]
    """`times` is 1; or 2, of which `late` says which a token has; or the number of tokens, when each has a time of its own."""
    time: Float[Tensor, "batch times dim"]
    cos: Float[Tensor, "tables tokens 1 pairs"]
    sin: Float[Tensor, "tables tokens 1 pairs"]
    text: Float[Tensor, "batch text dim"]
    padding_mask: Bool[Tensor, "batch tokens"] | None
    """False on the padding of samples shorter than the longest; None when all are of one size."""
    grids: tuple[tuple[int, int, int], ...]
    """Tokens of each sample along frames, height, width."""
    late: Bool[Tensor, "batch tokens"] | None = None
    """Which tokens have the second of their sample's two times; None where there are not two."""
    image: Float[Tensor, "batch image dim"] | None = None
    """Image tokens, which cross-attention reads with keys and values of their own."""
    reference: ReferenceCarry | None = None
    vace: VaceCarry | None = None
    music: MusicCarry | None = None
