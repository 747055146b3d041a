"""The head of the Wan transformer: the last carry to one velocity per sample."""

from dataclasses import replace

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ditkit_core.models.precision import Precision
from ditkit_core.nn.functional import modulated_norm, per_token
from ditkit_core.nn.linear import CastLinear
from ditkit_wan.model.carry import WanCarry
from ditkit_wan.presets import WanArch


class WanHead(nn.Module):
    """A modulated norm and a linear layer; WanToDance has a second pair for keyframes."""

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        pf, ph, pw = arch.patch
        self.modulation = nn.Parameter(torch.randn(1, 2, arch.dim) / arch.dim**0.5)
        self.head = CastLinear(arch.dim, arch.out_channels * pf * ph * pw)
        if arch.music:
            self.head_global = WanHead(replace(arch, music=None), precision)

    def forward(self, carry: WanCarry) -> list[Tensor]:
        fronts = (0,) * len(carry.grids) if carry.reference is None else carry.reference.fronts
        samples = zip(self._rows(carry), carry.grids, fronts, strict=True)
        return [self._unpatch(row, grid, front) for row, grid, front in samples]

    def _rows(self, carry: WanCarry) -> list[Tensor]:
        """[tokens, features] of each sample, from the head for its frame rate."""
        steps = () if carry.music is None else carry.music.steps
        heads = [self.head_global if step > 1 else self for step in steps] or [self]
        if len(set(heads)) == 1:
            return list(heads[0].patches(carry.tokens, carry.time, carry.late))
        samples = zip(heads, carry.tokens.split(1), carry.time.split(1), strict=True)
        return [head.patches(tokens, time)[0] for head, tokens, time in samples]

    def patches(
        self,
        tokens: Float[Tensor, "batch tokens dim"],
        time: Float[Tensor, "batch times dim"],
        late: Bool[Tensor, "batch tokens"] | None = None,
    ) -> Float[Tensor, "batch tokens features"]:
        """The velocity of each token's patch."""
        dtype = self.precision.head
        shift, scale = (self.modulation[:, None].to(dtype) + time[:, :, None].to(dtype)).unbind(2)
        scale, shift = per_token(scale, late), per_token(shift, late)
        return self.head(modulated_norm(tokens, scale, shift, self.arch.eps, dtype, dtype))

    def _unpatch(
        self, row: Float[Tensor, "tokens features"], grid: tuple[int, int, int], front: int
    ) -> Tensor:
        """A sample's velocity, without padding and the `front` reference frames before it."""
        (f, h, w), (pf, ph, pw) = grid, self.arch.patch
        pattern = "(f h w) (pf ph pw c) -> c (f pf) (h ph) (w pw)"
        return rearrange(
            row[front * h * w : f * h * w], pattern, f=f - front, h=h, w=w, pf=pf, ph=ph, pw=pw
        )
