"""The blocks of the Wan transformer, from carry to carry."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.models.precision import Precision
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.functional import (
    affine_norm,
    gated_sum,
    modulated_norm,
    normalised_heads,
    per_token,
    plain_sum,
)
from ditkit_core.nn.remat import recompute_boundary
from ditkit_wan.model.carry import WanCarry
from ditkit_wan.presets import WanArch


class WanSelfAttention(nn.Module):
    """Attention among the tokens of a sample; q and k are normalised over the full width and
    rotated."""

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__()
        self.heads, self.precision = arch.heads, precision
        self.q, self.k, self.v, self.o = (nn.Linear(arch.dim, arch.dim) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(arch.dim, eps=arch.eps) for _ in range(2))

    def forward(self, h: Tensor, carry: WanCarry) -> Tensor:
        precision, rotary = self.precision, carry.rotary
        q = normalised_heads(self.q(h), self.norm_q, self.heads, precision, rotary)
        k = normalised_heads(self.k(h), self.norm_k, self.heads, precision, rotary)
        v = self.v(h).unflatten(-1, (self.heads, -1)).to(precision.attention)
        return self.o(
            attend(q, k, v, name="self", padding_mask=carry.padding_mask)
            .flatten(2)
            .to(precision.matmul)
        )


class WanCrossAttention(nn.Module):
    """Attention from the tokens to all rows of text, with padding as in training, and to image
    tokens with separate keys and values."""

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__()
        self.heads, self.precision = arch.heads, precision
        self.q, self.k, self.v, self.o = (nn.Linear(arch.dim, arch.dim) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(arch.dim, eps=arch.eps) for _ in range(2))
        if arch.image_dim:
            self.k_img, self.v_img = (nn.Linear(arch.dim, arch.dim) for _ in range(2))
            self.norm_k_img = nn.RMSNorm(arch.dim, eps=arch.eps)

    def forward(
        self,
        h: Tensor,
        text: Float[Tensor, "batch text dim"],
        image: Float[Tensor, "batch image dim"] | None,
    ) -> Tensor:
        return self.o(self.attended(h, text, image))

    def attended(
        self,
        h: Tensor,
        text: Float[Tensor, "batch text dim"],
        image: Float[Tensor, "batch image dim"] | None,
        name: str = "cross",
    ) -> Float[Tensor, "batch tokens dim"]:
        """The input of the last layer; `attend` is called with `name`."""
        q = normalised_heads(self.q(h), self.norm_q, self.heads, self.precision)
        k = normalised_heads(self.k(text), self.norm_k, self.heads, self.precision)
        v = self.v(text).unflatten(-1, (self.heads, -1)).to(self.precision.attention)
        out = attend(q, k, v, name=name)
        if image is not None:
            k = normalised_heads(self.k_img(image), self.norm_k_img, self.heads, self.precision)
            v = self.v_img(image).unflatten(-1, (self.heads, -1)).to(self.precision.attention)
            out = out + attend(q, k, v, name="image")
        return out.flatten(2).to(self.precision.matmul)


class WanBlock(nn.Module):
    """Self-attention, cross-attention and feed-forward on a residual stream."""

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__()
        self.eps, self.precision = arch.eps, precision
        self.modulation = nn.Parameter(torch.randn(1, 6, arch.dim) / arch.dim**0.5)
        self.self_attn = WanSelfAttention(arch, precision)
        self.norm3 = nn.LayerNorm(arch.dim, eps=arch.eps)
        self.cross_attn = WanCrossAttention(arch, precision)
        self.ffn = nn.Sequential(
            nn.Linear(arch.dim, arch.ffn_dim),
            nn.GELU(approximate="tanh"),
            nn.Linear(arch.ffn_dim, arch.dim),
        )

    def forward(self, carry: WanCarry) -> WanCarry:
        return carry._replace(tokens=self.advanced(carry.tokens, carry))

    def advanced(
        self, x: Float[Tensor, "batch tokens dim"], carry: WanCarry, *, is_end: bool = True
    ) -> Float[Tensor, "batch tokens dim"]:
        """A residual stream after this block, given the rest of the carry; VACE advances a second
        stream by it.

        Args:
            x: The stream.
            carry: The rest of the carry.
            is_end: False where a part of the block follows whose recompute needs the stream.
        """
        precision = self.precision
        matmul, norms = precision.matmul, precision.norms
        modulation = self.modulation.to(precision.modulation) + carry.modulation
        shift_sa, scale_sa, gate_sa, shift_ffn, scale_ffn, gate_ffn = modulation.unbind(2)
        late = carry.late
        scale_sa, shift_sa = per_token(scale_sa, late), per_token(shift_sa, late)
        h = modulated_norm(x, scale_sa, shift_sa, self.eps, precision.norms_of(x.dtype), matmul)
        x = gated_sum(self.self_attn(h, carry), x.to(precision.residual), gate_sa, late)
        x = plain_sum(
            self.cross_attn(affine_norm(self.norm3, x, norms, matmul), carry.text, carry.image), x
        )
        scale_ffn, shift_ffn = per_token(scale_ffn, late), per_token(shift_ffn, late)
        h = modulated_norm(x, scale_ffn, shift_ffn, self.eps, norms, matmul)
        h = self.ffn[1](self.ffn[0](h))
        # A recompute of the block can stop in front of this matmul: its input and gate are all that
        # the backward needs.
        y = recompute_boundary(self.ffn[2], h, gate_ffn) if is_end else self.ffn[2](h)
        return gated_sum(y, x, gate_ffn, late)
