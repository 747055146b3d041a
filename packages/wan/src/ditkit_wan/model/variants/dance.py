"""WanToDance's blocks: those that end with a music layer, and the one that guidance skips.

Source: Wan-Video/Wan-Dancer, diffsynth/models/wan_video_dit.py and
diffsynth/pipelines/wan_video_new.py.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.models.precision import Precision
from ditkit_core.nn.functional import plain_sum
from ditkit_wan.model.block import WanBlock
from ditkit_wan.model.carry import WanCarry, at_positions
from ditkit_wan.model.variants.music import GROUPS
from ditkit_wan.presets import WanArch


class _Unused(nn.Module):
    """A linear layer that files contain and no result depends on; not an nn.Linear, so that
    adapters do not target it."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(dim, dim)), nn.Parameter(torch.zeros(dim))


class MusicInjector(nn.Module):
    """The term that each row of music adds to its group of tokens.

    The authors have cross-attention here, from each group of tokens to its single row of music. A
    softmax over one key is 1 for any query, so the result of attention is bitwise identical to the
    value, and queries, keys and their norms have zero gradients. They are not computed, and they
    are parameters only because the files contain them.
    """

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__()
        self.precision = precision
        self.q, self.k = _Unused(arch.dim), _Unused(arch.dim)
        self.v, self.o = nn.Linear(arch.dim, arch.dim), nn.Linear(arch.dim, arch.dim)
        self.norm_q, self.norm_k = (nn.RMSNorm(arch.dim, eps=arch.eps) for _ in range(2))

    def forward(self, music: Float[Tensor, "batch music dim"]) -> Float[Tensor, "batch music dim"]:
        return self.o(self.v(music).to(self.precision.attention).to(self.precision.matmul))


class MusicBlock(WanBlock):
    """A block followed by a music layer."""

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__(arch, precision)
        self.music = MusicInjector(arch, precision)

    def forward(self, carry: WanCarry) -> WanCarry:
        assert carry.music is not None, "embed makes it"
        # Before the block: the sum after it is then all that follows the block's last matmul.
        music_rows = self.music(carry.music.rows)
        carry = super().forward(carry)
        return carry._replace(
            tokens=plain_sum(
                at_positions(_by_token(music_rows, carry.grids), carry.positions), carry.tokens
            )
        )


class SkippedBlock(WanBlock):
    """A block that the negative side of guidance skips: guidance steers away from the velocity
    without it."""

    def forward(self, carry: WanCarry) -> WanCarry:
        return carry if carry.music is not None and carry.music.skips else super().forward(carry)


def _by_token(
    music_rows: Float[Tensor, "batch music dim"], grids: tuple[tuple[int, int, int], ...]
) -> Float[Tensor, "batch tokens dim"]:
    """The music of every token's group; zeros for padding."""
    rows = [
        row[: GROUPS * f].repeat_interleave(h * w // GROUPS, dim=0)
        for row, (f, h, w) in zip(music_rows, grids, strict=True)
    ]
    return pad_sequence(rows, batch_first=True)
