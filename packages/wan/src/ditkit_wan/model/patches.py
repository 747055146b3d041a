"""Latents to tokens: patches, and the linear layer that embeds them."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn


class PatchEmbedding(nn.Module):
    """The official Conv3d, computed as a matmul, since its stride equals its kernel size."""

    def __init__(self, dim: int, channels: int, patch: Sequence[int]):
        super().__init__()
        self.patch = tuple(patch)
        self.weight = nn.Parameter(torch.empty(dim, channels, *patch))
        self.bias = nn.Parameter(torch.zeros(dim))
        nn.init.xavier_uniform_(self.weight.data.flatten(1))

    def patches(
        self, latent: Float[Tensor, "channels frames height width"]
    ) -> Float[Tensor, "tokens features"]:
        """The patches of latents; what is left over at the end of an axis is dropped, as the
        convolution does."""
        pf, ph, pw = self.patch
        f, h, w = (size // step for size, step in zip(latent.shape[1:], self.patch, strict=True))
        latent = latent[:, : f * pf, : h * ph, : w * pw]
        return rearrange(
            latent, "c (f pf) (h ph) (w pw) -> (f h w) (c pf ph pw)", pf=pf, ph=ph, pw=pw
        )

    def forward(self, patches: Float[Tensor, "*batch features"]) -> Float[Tensor, "*batch dim"]:
        return F.linear(patches, self.weight.flatten(1), self.bias)
