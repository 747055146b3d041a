"""The values that one block of Wan hands to the next."""

from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

from ditkit_core.models.token_streams import TokenStreams
from ditkit_wan.presets import WanArch


class ReferenceCarry(NamedTuple):
    """State of models with reference frames in front of the clip."""

    fronts: tuple[int, ...]
    """Number of reference frames at the start of each sample's grid, which the head removes."""


class VaceCarry(NamedTuple):
    """State of VACE."""

    stream: Float[Tensor, "batch tokens dim"]
    """VACE's own stream, which its blocks advance."""


class MusicCarry(NamedTuple):
    """State of WanToDance."""

    rows: Float[Tensor, "batch music dim"]
    """Encoded music, one row for each group of tokens."""
    steps: tuple[int, ...]
    """Rows of music per frame, for each sample."""
    skips: bool
    """Whether the block is skipped that the negative side of guidance leaves out."""


class SpeechCarry(NamedTuple):
    """State of S2V: encoded audio of every latent frame, padded with zeros."""

    rows: Float[Tensor, "batch frames audio dim"]
    """Tokens that the frame's tokens attend to."""
    style: Float[Tensor, "batch frames dim"]
    """The row that scales and shifts the frame's tokens before they do."""


class FaceCarry(NamedTuple):
    """State of Animate: the motion of the face in every latent frame, padded with zeros."""

    rows: Float[Tensor, "batch frames face dim"]
    """Normalised tokens that the frame's tokens attend to; the first frame is the reference image,
    with zeros."""


class WanCarry(NamedTuple):
    """Everything one block hands to the next; each variant's own state is a tuple, and None for
    other variants."""

    tokens: Float[Tensor, "batch tokens dim"]
    modulation: Float[Tensor, "batch times 6 dim"]
    """`times` is 1, or 2 with `late` as the choice of each token, or the number of tokens if each
    has its own time."""
    time: Float[Tensor, "batch times dim"]
    rotary: Float[Tensor, "tables tokens 1 pairs 2"]
    """Cosines and sines of positions, side by side."""
    text: Float[Tensor, "batch text dim"]
    padding_mask: Bool[Tensor, "batch tokens"] | None
    """False on the padding of samples shorter than the longest; None when all have one size."""
    grids: tuple[tuple[int, int, int], ...]
    """Tokens of each sample along frames, height, width, which come first; S2V's reference and
    motion follow."""
    positions: Int[Tensor, "batch tokens"] | None = None
    """Of WanToDance and S2V, whose blocks read groups of tokens: which of a sample's tokens these
    are; None for all of them."""
    late: Bool[Tensor, "batch tokens"] | None = None
    """Tokens with the second of their sample's two times; None if there is one time."""
    image: Float[Tensor, "batch image dim"] | None = None
    """Image tokens, for which cross-attention has separate keys and values."""
    reference: ReferenceCarry | None = None
    vace: VaceCarry | None = None
    music: MusicCarry | None = None
    speech: SpeechCarry | None = None
    face: FaceCarry | None = None


def token_streams(arch: WanArch) -> TokenStreams | None:
    """What runs along tokens; WanToDance's and S2V's blocks add music or speech to groups of tokens
    of a frame. None for Animate, whose blocks add a face's motion to all tokens of a frame."""
    if arch.animate:
        return None
    of_conditions = [f"cross_attn.{name}" for name in ("k", "v", "k_img", "v_img")]
    return TokenStreams(
        fields=_token_fields,
        head=("tokens", "late"),
        inputs=dict.fromkeys(of_conditions, ()),
        residual=("tokens", "vace.stream"),
        routed="tokens",
        positions="positions" if arch.music or arch.speech else "",
    )


def at_positions(
    x: Float[Tensor, "batch all_tokens dim"], positions: Int[Tensor, "batch tokens"] | None
) -> Float[Tensor, "batch tokens dim"]:
    """The rows of a carry's tokens, among the rows of all tokens."""
    return x if positions is None else x.take_along_dim(positions[..., None], 1)


def _token_fields(carry: WanCarry) -> dict[str, tuple[str, ...]]:
    fields = ["tokens", "rotary"]
    if carry.late is not None:
        fields.append("late")
    elif carry.modulation.shape[1] > 1:  # each token has its own time; only the head reads `time`
        fields.append("modulation")
    if carry.vace is not None:
        fields.append("vace.stream")
    return dict.fromkeys(fields, ("tokens",))
