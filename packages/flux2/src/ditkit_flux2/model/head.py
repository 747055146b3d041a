"""The head of the FLUX.2 transformer: the last carry to one velocity per sample."""

from einops import rearrange
from torch import Tensor, nn

from ditkit_core.models.precision import Precision
from ditkit_core.nn.functional import modulated_norm
from ditkit_core.nn.linear import CastLinear
from ditkit_flux2.model.carry import Flux2SingleCarry
from ditkit_flux2.presets import Flux2Arch


class Flux2Head(nn.Module):
    """The last carry to one velocity per sample; text and references are dropped first."""

    def __init__(self, arch: Flux2Arch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        self.linear = CastLinear(arch.dim, arch.out_channels, bias=False)
        self.adaLN_modulation = nn.Sequential(
            nn.SiLU(), CastLinear(arch.dim, 2 * arch.dim, bias=False)
        )

    def forward(self, carry: Flux2SingleCarry) -> list[Tensor]:
        dtype = self.precision.head
        shift, scale = self.adaLN_modulation(carry.time.to(dtype))[:, None].chunk(2, -1)
        # The target comes first, so references and padding behind the longest target are never
        # normalised or projected.
        longest = max(height * width for height, width in carry.grids)
        target = carry.tokens[:, self.arch.text_tokens : self.arch.text_tokens + longest]
        rows = self.linear(modulated_norm(target, scale, shift, self.arch.eps, dtype, dtype))
        return [
            rearrange(row[: height * width], "(h w) c -> c 1 h w", h=height, w=width)
            for row, (height, width) in zip(rows, carry.grids, strict=True)
        ]
