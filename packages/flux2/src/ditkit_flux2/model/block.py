"""The blocks of the FLUX.2 transformer, from carry to carry: double, join, single."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.models.precision import Precision
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.functional import gated_sum, gated_unit, modulated_norm, normalised_heads
from ditkit_core.nn.remat import recompute_boundaries, recompute_boundary
from ditkit_flux2.model.carry import Flux2DoubleCarry, Flux2SingleCarry
from ditkit_flux2.presets import Flux2Arch


class Flux2QKNorm(nn.Module):
    """The norms of q and k, each over one head."""

    def __init__(self, arch: Flux2Arch):
        super().__init__()
        self.query_norm, self.key_norm = (nn.RMSNorm(arch.head_dim, eps=arch.eps) for _ in range(2))


class Flux2StreamAttention(nn.Module):
    """One stream's projections and norms for the attention that both streams share."""

    def __init__(self, arch: Flux2Arch, precision: Precision):
        super().__init__()
        self.heads, self.precision = arch.heads, precision
        self.q, self.k, self.v, self.proj = (
            nn.Linear(arch.dim, arch.dim, bias=False) for _ in range(4)
        )
        self.norm = Flux2QKNorm(arch)

    def forward(self, h: Float[Tensor, "batch rows dim"], rotary: Tensor) -> tuple[Tensor, ...]:
        """q, k and v [batch, rows, heads, head_dim]."""
        q = normalised_heads(self.q(h), self.norm.query_norm, self.heads, self.precision, rotary)
        k = normalised_heads(self.k(h), self.norm.key_norm, self.heads, self.precision, rotary)
        return q, k, self.v(h).unflatten(-1, (self.heads, -1)).to(self.precision.attention)


class Flux2GatedUnit(nn.Module):
    """silu(a) · b, where a, the gate, is the first half of the features. A module, so that both
    MLPs keep upstream's parameter names."""

    def forward(self, x: Float[Tensor, "*batch both"]) -> Float[Tensor, "*batch half"]:
        return gated_unit(x)


class Flux2DoubleBlock(nn.Module):
    """Joint attention over text and image; each stream has its own weights and modulation for
    everything else."""

    def __init__(self, arch: Flux2Arch, precision: Precision):
        super().__init__()
        self.eps, self.precision = arch.eps, precision
        self.img_attn, self.txt_attn = (Flux2StreamAttention(arch, precision) for _ in range(2))
        self.img_mlp, self.txt_mlp = (
            nn.Sequential(
                nn.Linear(arch.dim, 2 * arch.mlp_dim, bias=False),
                Flux2GatedUnit(),
                nn.Linear(arch.mlp_dim, arch.dim, bias=False),
            )
            for _ in range(2)
        )

    def forward(self, carry: Flux2DoubleCarry) -> Flux2DoubleCarry:
        precision, image, text = self.precision, carry.image, carry.text
        matmul, norms = precision.matmul, precision.norms_of(image.dtype)
        shift_i, scale_i, gate_i, *mlp_i = carry.image_modulation[:, None].unbind(2)
        shift_t, scale_t, gate_t, *mlp_t = carry.text_modulation[:, None].unbind(2)
        sizes = [text.shape[1], image.shape[1]]
        rotary_t, rotary_i = carry.rotary.split(sizes, 1)
        text_qkv = self.txt_attn(
            modulated_norm(text, scale_t, shift_t, self.eps, norms, matmul), rotary_t
        )
        image_qkv = self.img_attn(
            modulated_norm(image, scale_i, shift_i, self.eps, norms, matmul), rotary_i
        )
        q, k, v = (torch.cat(pair, 1) for pair in zip(text_qkv, image_qkv, strict=True))
        out = attend(q, k, v, name="self", padding_mask=carry.padding_mask).flatten(2).to(matmul)
        out_t, out_i = out.split(sizes, 1)
        text = gated_sum(self.txt_attn.proj(out_t), text.to(precision.residual), gate_t)
        image = gated_sum(self.img_attn.proj(out_i), image.to(precision.residual), gate_i)
        h_t = self._hidden(self.txt_mlp, text, *mlp_t)
        h_i = self._hidden(self.img_mlp, image, *mlp_i)
        # Both last matmuls at once: a recompute can stop in front of them only if nothing after the
        # first is recomputed.
        y_t, y_i = recompute_boundaries([(self.txt_mlp[2], h_t), (self.img_mlp[2], h_i)])
        return carry._replace(
            text=gated_sum(y_t, text, mlp_t[2]), image=gated_sum(y_i, image, mlp_i[2])
        )

    def _hidden(
        self, mlp: nn.Sequential, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor
    ) -> Tensor:
        h = modulated_norm(x, scale, shift, self.eps, self.precision.norms, self.precision.matmul)
        return mlp[1](mlp[0](h))


class Flux2Join(nn.Module):
    """Two streams become one: text, then image."""

    def forward(self, carry: Flux2DoubleCarry) -> Flux2SingleCarry:
        return Flux2SingleCarry(
            tokens=torch.cat([carry.text, carry.image], 1),
            modulation=carry.single_modulation,
            time=carry.time,
            rotary=carry.rotary,
            padding_mask=carry.padding_mask,
            grids=carry.grids,
        )


class Flux2SingleBlock(nn.Module):
    """Attention and MLP in parallel, with one matmul before both and one after both."""

    def __init__(self, arch: Flux2Arch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        self.linear1 = nn.Linear(arch.dim, 3 * arch.dim + 2 * arch.mlp_dim, bias=False)
        self.linear2 = nn.Linear(arch.dim + arch.mlp_dim, arch.dim, bias=False)
        self.norm = Flux2QKNorm(arch)

    def forward(self, carry: Flux2SingleCarry) -> Flux2SingleCarry:
        arch, precision, x = self.arch, self.precision, carry.tokens
        shift, scale, gate = carry.modulation[:, None].unbind(2)
        norms = precision.norms_of(x.dtype)
        h = self.linear1(modulated_norm(x, scale, shift, arch.eps, norms, precision.matmul))
        q, k, v, both = h.split([arch.dim, arch.dim, arch.dim, 2 * arch.mlp_dim], -1)
        q = normalised_heads(q, self.norm.query_norm, arch.heads, precision, carry.rotary)
        k = normalised_heads(k, self.norm.key_norm, arch.heads, precision, carry.rotary)
        v = v.unflatten(-1, (arch.heads, -1)).to(precision.attention)
        out = (
            attend(q, k, v, name="self", padding_mask=carry.padding_mask)
            .flatten(2)
            .to(precision.matmul)
        )
        h = torch.cat([out, gated_unit(both)], -1)
        return carry._replace(
            tokens=gated_sum(recompute_boundary(self.linear2, h), x.to(precision.residual), gate)
        )
