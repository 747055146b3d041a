"""An image of a clip's subject as an additional frame in front of it. Source: aigc-apps/VideoX-Fun,
videox_fun/models/wan_transformer3d.py.

All blocks treat it as a frame. It has position 0 in time, the clip's frames start at 1, and the
head removes it. Its tokens have the timestep of the clip, although it has no noise.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.errors import UserError
from ditkit_wan.presets import WanArch


class ReferenceConv(nn.Module):
    """The official Conv2d, computed as a matmul, since its stride equals its kernel size."""

    def __init__(self, arch: WanArch):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(arch.dim, arch.reference_channels, *arch.patch[1:]))
        self.bias = nn.Parameter(torch.zeros(arch.dim))
        nn.init.xavier_uniform_(self.weight.data.flatten(1))

    def forward(
        self, reference: Float[Tensor, "channels 1 height width"]
    ) -> Float[Tensor, "tokens dim"]:
        """Tokens of one image, in the dtype of its latents."""
        ph, pw = self.weight.shape[2:]
        patches = rearrange(reference, "c 1 (h ph) (w pw) -> (h w) (c ph pw)", ph=ph, pw=pw)
        return F.linear(patches, self.weight.flatten(1), self.bias)


def check_references(
    arch: WanArch, references: Sequence[Tensor | None], latents: Sequence[Tensor]
) -> None:
    """Refuse references whose shape differs from a latent frame of their clip.

    Raises:
        UserError: If so; the message names both shapes.
    """
    for reference, clip in zip(references, latents, strict=False):
        wanted = (arch.reference_channels, 1, *clip.shape[2:])
        if reference is not None and reference.shape != wanted:
            raise UserError(
                f"'reference' has the shape {list(reference.shape)} where its clip has "
                f"{list(clip.shape)}: encode it at the size of the clip"
            )


def in_front(
    references: Sequence[Tensor | None],
    tokens: Float[Tensor, "batch padded dim"],
    lengths: Sequence[int],
) -> Float[Tensor, "batch tokens dim"]:
    """The tokens of every sample, after the tokens of its reference if it has one.

    Args:
        references: [tokens, dim] of each sample; None where it has none.
        tokens: Tokens of the clips.
        lengths: Number of tokens of each sample, without padding.
    """
    rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    pairs = zip(references, rows, strict=True)
    return pad_sequence(
        [row if front is None else torch.cat([front, row]) for front, row in pairs],
        batch_first=True,
    )


def times_in_front(
    timestep: Shaped[Tensor, "batch times"], fronts: Sequence[int], lengths: Sequence[int]
) -> Shaped[Tensor, "batch tokens"]:
    """A timestep per token, with the references' in front; these equal the timestep of their clip's
    last token.

    Args:
        timestep: Timestep of each token of the clips, or which of two timesteps it has.
        fronts: Number of reference tokens of each sample.
        lengths: Number of clip tokens of each sample.
    """
    triples = zip(timestep, fronts, lengths, strict=True)
    rows = [
        torch.cat([row[length - 1 : length].expand(front), row[:length]])
        for row, front, length in triples
    ]
    return pad_sequence(rows, batch_first=True)
