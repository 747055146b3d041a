"""The picture of what a clip shows, as one more frame in front of it. Source: aigc-apps/VideoX-Fun, videox_fun/models/wan_transformer3d.py.

It is a frame to all blocks, with position 0 in time, the clip's own following from 1, and the head cuts it off. Its tokens are told the
timestep of the clip, although it is not noised.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.errors import UserError
from ditkit_wan.presets import WanArch

_CHANNELS = 16


class ReferenceConv(nn.Module):
    """The official Conv2d whose stride is its kernel, computed as the matmul that it is."""

    def __init__(self, arch: WanArch):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(arch.dim, _CHANNELS, *arch.patch[1:]))
        self.bias = nn.Parameter(torch.zeros(arch.dim))
        nn.init.xavier_uniform_(self.weight.data.flatten(1))

    def forward(self, reference: Float[Tensor, "16 1 height width"]) -> Float[Tensor, "tokens dim"]:
        """Tokens of one picture, in the dtype of its latents."""
        ph, pw = self.weight.shape[2:]
        patches = rearrange(reference, "c 1 (h ph) (w pw) -> (h w) (c ph pw)", ph=ph, pw=pw)
        return F.linear(patches, self.weight.flatten(1), self.bias)


def check_references(references: Sequence[Tensor | None], latents: Sequence[Tensor]) -> None:
    """Refuse references, if there are any, that are no frame of their clip.

    Raises:
        UserError: Naming both sizes.
    """
    for reference, clip in zip(references, latents, strict=False):
        wanted = (_CHANNELS, 1, *clip.shape[2:])
        if reference is not None and reference.shape != wanted:
            raise UserError(
                f"'reference' has the shape {list(reference.shape)} where its clip has {list(clip.shape)}: encode it at the size of the clip"
            )


def in_front(
    references: Sequence[Tensor | None], tokens: Float[Tensor, "batch padded dim"], lengths: Sequence[int]
) -> Float[Tensor, "batch tokens dim"]:
    """The tokens of every sample behind those of its reference, if it has one.

    Args:
        references: [tokens, dim] of each sample; None where it has none.
        tokens: Of the clips.
        lengths: How many of them are each sample's own.
    """
    rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    pairs = zip(references, rows, strict=True)
    return pad_sequence([row if front is None else torch.cat([front, row]) for front, row in pairs], batch_first=True)


def times_in_front(
    timestep: Float[Tensor, "batch times"], fronts: Sequence[int], lengths: Sequence[int]
) -> Float[Tensor, "batch tokens"]:
    """A timestep per token with those of references in front, which have that of their clip's last token.

    Args:
        timestep: Per token of the clips.
        fronts: How many tokens of a reference each sample has.
        lengths: How many tokens of its clip.
    """
    triples = zip(timestep, fronts, lengths, strict=True)
    rows = [torch.cat([row[length - 1 : length].expand(front), row[:length]]) for row, front, length in triples]
    return pad_sequence(rows, batch_first=True)
