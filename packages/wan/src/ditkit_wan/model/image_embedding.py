"""CLIP's image tokens, brought to the model's width. Source: `MLPProj` in Wan-Video/Wan2.1, wan/modules/model.py."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision
from ditkit_wan.model.norms import affine_norm
from ditkit_wan.presets import WanArch


class WanImageEmbedding(nn.Module):
    """Norm, two linear layers, norm; before them, for a first and a last picture, a position for each token."""

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__()
        self.precision = precision
        width, dim = arch.image_dim, arch.dim
        if arch.image_positions:
            self.emb_pos = nn.Parameter(torch.zeros(1, arch.image_positions, width))
        else:
            self.emb_pos = None
        self.proj = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, dim), nn.LayerNorm(dim)
        )

    def forward(self, images: Sequence[Tensor]) -> Float[Tensor, "batch image dim"]:
        """Image tokens of every sample, in the matmuls' dtype.

        Args:
            images: [rows, image_dim] each, equally many.

        Raises:
            UserError: If there are more or fewer than the model has positions for.
        """
        norms, matmul = self.precision.norms, self.precision.matmul
        x = torch.stack(list(images)).to(norms)
        if self.emb_pos is not None:
            if x.shape[1] != self.emb_pos.shape[1]:
                raise UserError(
                    f"'image' has {x.shape[1]} tokens, and this model takes {self.emb_pos.shape[1]}: those of the first picture, "
                    "then those of the last"
                )
            x = x + self.emb_pos.to(norms)
        first, up, gelu, down, last = self.proj
        return affine_norm(last, down(gelu(up(affine_norm(first, x, norms).to(matmul)))), norms).to(matmul)
