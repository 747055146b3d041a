"""A linear layer for the places of precision that are not the matmuls' own.

Its parameters are stored in one dtype (fp32 for what a model keeps so) and computed with in another, which is the caller's to say.
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class CastLinear(nn.Linear):
    """nn.Linear that multiplies in its input's dtype, to which it casts its parameters; where they have it, nothing is cast."""

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        """The product, in the dtype of `x`."""
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
