"""A linear layer for layers that compute in another dtype than the matmuls.

Its parameters are stored in one dtype (fp32 where a model keeps them so), and the caller chooses
the dtype of the product.
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class CastLinear(nn.Linear):
    """nn.Linear that multiplies in its input's dtype. Parameters of another dtype are cast."""

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        """The product, in the dtype of `x`."""
        return F.linear(
            x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        )
