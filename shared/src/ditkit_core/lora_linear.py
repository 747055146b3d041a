"""The arithmetic of a plain LoRA over a frozen layer, in fewer passes over large tensors than peft's own forward.

peft holds the adapter, its names and its options; only the product is ours. Composed eagerly it makes an fp32 copy of the
input that autograd keeps per target, and scales and rounds in passes of their own over the output. Here what is kept is the
input as it came and a [tokens, rank] product, which is where the scaling happens. The arithmetic is
peft's: adapter in fp32, sum in fp32, one rounding at the end.
"""

from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


def low_rank(
    x: Float[Tensor, "*batch in"], down: Float[Tensor, "rank in"], up: Float[Tensor, "out rank"], scaling: float
) -> Float[Tensor, "*batch out"]:
    """scaling · x Aᵀ Bᵀ in the adapter's dtype.

    Args:
        x: Input of the layer, after adapter dropout.
        down: A.
        up: B.
        scaling: alpha / rank.
    """
    out: Tensor = _LowRank.apply(x, down, up, scaling)
    return out


def rounded_sum(result: Float[Tensor, "*batch out"], delta: Float[Tensor, "*batch out"]) -> Float[Tensor, "*batch out"]:
    """result + delta in delta's dtype, rounded once to the dtype of `result`; keeps nothing for its backward."""
    if result.dtype == delta.dtype:
        return result + delta
    out: Tensor = _RoundedSum.apply(result, delta)
    return out


class _LowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
        low = (x.flatten(0, -2).to(down.dtype) @ down.T).mul_(scaling)
        ctx.save_for_backward(x, down, up, low)
        ctx.scaling = scaling
        return (low @ up.T).view(*x.shape[:-1], len(up))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, down, up, low = ctx.saved_tensors
        wide = gradient.flatten(0, -2)
        d_low = (wide @ up).mul_(ctx.scaling)
        d_up = wide.T @ low if ctx.needs_input_grad[2] else None
        d_down = d_low.T @ x.flatten(0, -2).to(down.dtype) if ctx.needs_input_grad[1] else None
        d_x = (d_low @ down).to(x.dtype).view_as(x) if ctx.needs_input_grad[0] else None
        return d_x, d_down, d_up, None


class _RoundedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, delta: Tensor) -> Tensor:
        ctx.dtype = delta.dtype
        return torch.add(delta, result).to(result.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.to(ctx.dtype)


class PlainLora:
    """A LoRA layer that can say whether its next forward is the plain product."""

    def is_plain(self) -> bool:
        """One active, unmerged adapter without dropout."""
        raise NotImplementedError


def keeps_only_its_input(layer: nn.Module) -> bool:
    """Whether a frozen layer's forward, with its adapter, saves nothing large for its backward but the input it was given.

    A layer that is trained itself is none: what follows it (a trained gate) needs its output.
    """
    frozen = type(layer) is nn.Linear and not layer.weight.requires_grad
    return frozen or (isinstance(layer, PlainLora) and layer.is_plain())


@cache
def lora_linear_class() -> type:
    """peft's Linear adapter with this product; made on first use, because importing peft costs seconds."""
    from peft.tuners.lora import Linear

    class LoraLinear(PlainLora, Linear):
        """Takes the short way for one active, unmerged, plain LoRA and leaves every other case to peft."""

        def is_plain(self) -> bool:
            names = [name for name in self.active_adapters if name in self.lora_A]
            short = not self.disable_adapters and not self.merged and len(names) == 1
            if not short or names[0] in self.lora_variant:
                return False
            dropout = self.lora_dropout[names[0]]
            return not (self.training and isinstance(dropout, nn.Dropout) and dropout.p > 0)

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            active = [name for name in self.active_adapters if name in self.lora_A]
            if (
                args
                or kwargs
                or self.disable_adapters
                or self.merged
                or len(active) != 1
                or active[0] in self.lora_variant
            ):
                result: Tensor = super().forward(x, *args, **kwargs)
                return result
            (name,) = active
            down: Any = self.lora_A[name]
            up: Any = self.lora_B[name]
            dropout = self.lora_dropout[name]
            # The adapter first: what follows keeps nothing, so a checkpoint that recomputes a block whose last layer this is
            # stops before the frozen matmul, the dearest thing it could have left out.
            delta = low_rank(dropout(x), down.weight, up.weight, self.scaling[name])
            return rounded_sum(self.base_layer(x), delta)

    return LoraLinear
