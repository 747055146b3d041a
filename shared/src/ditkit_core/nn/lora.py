"""The product of a plain LoRA over a frozen layer, in fewer passes over large tensors than peft's own forward.

peft has the adapter, its names and its options; only the product is ours. Composed eagerly, peft's forward makes an fp32 copy of the input
per target, which autograd keeps, and scales and rounds the output in passes of their own. Here the backward keeps the input as it came and
a [tokens, rank] product, and the scaling is applied to that product. The arithmetic is peft's: adapter in fp32, sum in fp32, one rounding
at the end.

On a GPU, fp32 products miss the tensor cores, and an fp32 copy of a bf16 input is most of a LoRA's memory traffic. There each fp32 factor
is written as a sum of three bf16 matrices, without loss, and tensor cores multiply those: products of bf16 are exact in fp32, and the sums
are fp32. `_wide_product` and `_cross_terms` are all of it. fp16 lacks the exponents for such a sum, so fp16 runs take the other path.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.nn.context import device_kind, settings_in_force

AT_ONCE = {"cpu": 2**21, "cuda": 2**26}
"""By kind of device: number of elements of a product that are in the adapter's wider dtype at once.

A complete wide copy behind a fused projection would be the largest tensor of a block: nine times the stream. On the CPU, a part that fits
the cache is also several times faster. On a GPU a part has to fill the device, and each costs three kernel launches. Counted under
fake tensors, not timed, for 4608 tokens and a fused projection from 6144 to 55296 features, which 2**26 splits into four parts of 1200
rows: that quarter of a GiB does not raise the step's peak (the complete copy does, by 0.7 GiB), a smaller part does not lower it, and
2**25 launches a tenth more kernels.
"""

TENSOR_CORES_FROM = 2**23
"""Elements of a layer's input or gradient from which a GPU's tensor cores multiply. The split launches about 18 kernels more in a layer's
forward, and as many in its backward, which a smaller product does not earn back: 1,536 tokens of width 3072 stay below, 20,280 of width
5120 are far above. Counted, not timed."""


def low_rank_sum(
    x: Float[Tensor, "*batch in"],
    down: Float[Tensor, "rank in"],
    up: Float[Tensor, "out rank"],
    scaling: float,
    base: Callable[[], Float[Tensor, "*batch out"]],
) -> Float[Tensor, "*batch out"]:
    """base() + scaling · x Aᵀ Bᵀ, summed in the adapter's dtype and rounded once to the dtype of `base()`.

    Everything that the backward needs is saved before `base` runs, and nothing after it. So where this is a block's
    last layer, a checkpoint stops its recompute before the frozen matmul, the most expensive operation of the layer.

    Args:
        x: Input of the layer, after adapter dropout.
        down: A.
        up: B.
        scaling: alpha / rank.
        base: Calls the frozen layer on its input. Its result is new, and may be overwritten.
    """
    if torch.compiler.is_compiling():
        # The compiler finds by itself what the backward needs. That of torch 2.11 keeps everything that an autograd function returns, inside
        # a checkpoint too, so it gets the plain composition.
        low = F.linear(x.to(down.dtype), down) * scaling
        result = base()
        return (result + F.linear(low, up)).to(result.dtype)
    low, placeholder = _LowRank.apply(x, down, up, scaling)
    out: Tensor = _Sum.apply(base(), placeholder, low, up.detach())
    return out


class _LowRank(torch.autograd.Function):
    """The product with A, and a placeholder for the product with B: of its shape but without its memory, to receive its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, up: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        rows = x.flatten(0, -2)
        product = _wide_product(rows, down.T) if _on_tensor_cores(rows, down) else rows.to(down.dtype) @ down.T
        low = product * scaling  # not in place: a checkpoint may have kept the product
        ctx.save_for_backward(x, down, up, low)
        ctx.scaling = scaling
        # Its gradient comes through the placeholder, which has the full width.
        ctx.mark_non_differentiable(low)
        return low, x.new_zeros(()).expand(*x.shape[:-1], len(up))

    @staticmethod
    def backward(ctx: Any, _: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient of the placeholder is that of the layer's output: `_Sum` passes it on as it is.
        x, down, up, low = ctx.saved_tensors
        rows, of_down, of_x = x.flatten(0, -2), ctx.needs_input_grad[1], ctx.needs_input_grad[0]
        d_low, d_up = _products(gradient.flatten(0, -2), up, low if ctx.needs_input_grad[2] else None)
        d_low.mul_(ctx.scaling)
        if _on_tensor_cores(rows, down):
            d_down = _wide_product(rows.T, d_low).T if of_down else None
            d_x = torch.mm(*_cross_terms(d_low, down)).view_as(x) if of_x else None
        else:
            d_down = d_low.T @ rows.to(down.dtype) if of_down else None
            d_x = (d_low @ down).to(x.dtype).view_as(x) if of_x else None
        return d_x, d_down, d_up, None


class _Sum(torch.autograd.Function):
    """result + low Bᵀ; keeps nothing for its backward."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, placeholder: Tensor, low: Tensor, up: Tensor) -> Tensor:
        rows = result.flatten(0, -2)
        if _on_tensor_cores(rows, up):
            # The products are summed in fp32 and added to the result before that is rounded. In place, since nobody else reads the
            # result, unless a checkpoint keeps it by its operation's name. Detached: a view would make autograd copy the gradient.
            out = rows.clone() if settings_in_force().keeps_results else rows.detach()
            return out.addmm_(*_cross_terms(low, up.T)).view(result.shape)
        # A part of the rows at a time: only that part exists in the adapter's wider dtype.
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        if out.dtype == low.dtype:
            return torch.mm(low, up.T, out=out).add_(rows).view(result.shape)
        for span, wide in _spans(len(rows), low.new_empty(_at_once(rows, 0), len(up))):
            out[span].copy_(torch.mm(low[span], up.T, out=wide).add_(rows[span]))
        return out.view(result.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, gradient, None, None


def _products(gradient: Tensor, up: Tensor, low: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """gradient · B, and gradientᵀ · low, in the adapter's dtype. No sum is split, so the results do not depend on the spans."""
    if _on_tensor_cores(gradient, up):
        return _wide_product(gradient, up), None if low is None else _wide_product(gradient.T, low)
    if gradient.dtype == up.dtype:
        return gradient @ up, None if low is None else gradient.T @ low
    if _at_once(gradient, 0) == len(gradient):  # the complete matrix fits: one conversion serves both products
        whole = gradient.to(up.dtype)
        return whole @ up, None if low is None else whole.T @ low
    d_low = up.new_empty(len(gradient), up.shape[1])
    for span, wide in _spans(len(gradient), up.new_empty(_at_once(gradient, 0), len(up))):
        torch.mm(wide.copy_(gradient[span]), up, out=d_low[span])
    if low is None:
        return d_low, None
    # By columns: each row of d_up is then a complete sum over tokens, as in the product of the complete
    # matrices.
    d_up = torch.empty_like(up)
    for span, wide in _spans(len(up), up.new_empty(_at_once(gradient, 1), len(gradient))):
        torch.mm(wide.copy_(gradient[:, span].T), low, out=d_up[span])
    return d_low, d_up


def _on_tensor_cores(rows: Tensor, factor: Tensor) -> bool:
    """Whether the split serves a layer's input, output or gradient and an adapter's factor."""
    is_split = rows.dtype == torch.bfloat16 and factor.dtype == torch.float32
    return is_split and device_kind(rows) == "cuda" and rows.numel() >= TENSOR_CORES_FROM


def _wide_product(a: Float[Tensor, "n k"], b: Float[Tensor, "k m"]) -> Float[Tensor, "n m"]:
    """a · b for `a` in bf16 and `b` in fp32, in fp32."""
    parts = torch.mm(a, torch.cat(_parts(b), 1), out_dtype=torch.float32)
    return parts.view(len(a), 3, -1).sum(1)


def _cross_terms(a: Float[Tensor, "n k"], b: Float[Tensor, "k m"]) -> tuple[Tensor, Tensor]:
    """bf16 matrices [n, 6k] and [6k, m] with the product a · b of two fp32 matrices.

    Of the nine products of parts, the three smallest are left out: together at most 2**-24 of the largest, an fp32
    rounding.
    """
    (a1, a2, a3), (b1, b2, b3) = _parts(a), _parts(b)
    return torch.cat((a1, a1, a2, a1, a2, a3), 1), torch.cat((b1, b2, b1, b3, b2, b1))


def _parts(wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three bf16 tensors whose sum is an fp32 tensor: each has 8 bits of the 24."""
    first = wide.bfloat16()
    rest = wide - first
    second = rest.bfloat16()
    return first, second, torch.sub(rest, second, out=torch.empty_like(second))


def _at_once(x: Tensor, axis: int) -> int:
    """Number of rows (axis 0) or columns (axis 1) of a matrix that are in the adapter's wider dtype at once."""
    return min(max(1, AT_ONCE[device_kind(x)] // x.shape[1 - axis]), x.shape[axis])


def _spans(count: int, buffer: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Spans of at most the buffer's length over `count` rows, each with a part of the buffer of its length."""
    for start in range(0, count, max(1, len(buffer))):
        stop = min(start + len(buffer), count)
        yield slice(start, stop), buffer[: stop - start]


class KeepsOnlyItsInput:
    """A frozen layer, other than torch's Linear, whose forward saves nothing large for its backward but its input."""


class PlainLora:
    """A LoRA layer that can say whether its next forward is the plain product."""

    def is_plain(self) -> bool:
        """Whether there is one active, unmerged adapter, without dropout."""
        raise NotImplementedError


def keeps_only_its_input(layer: nn.Module) -> bool:
    """Whether a frozen layer's forward, with its adapter, saves nothing large for its backward but its input.

    False for a layer that is trained itself: an operation behind it (a trained gate) needs its output.
    """
    # `type`, not isinstance: a subclass may save more.
    frozen = type(layer) is nn.Linear and not layer.weight.requires_grad
    return frozen or isinstance(layer, KeepsOnlyItsInput) or (isinstance(layer, PlainLora) and layer.is_plain())


@cache
def lora_linear_class() -> type:
    """peft's Linear adapter with this product; made on first use, because importing peft costs seconds."""
    from peft.tuners.lora import Linear

    class LoraLinear(PlainLora, Linear):
        """Uses our product for one active, unmerged, plain LoRA and leaves every other case to peft."""

        def _alone(self) -> str | None:
            """The name of the only active adapter, if it is unmerged and without a variant."""
            names = [name for name in self.active_adapters if name in self.lora_A]
            is_short = not self.disable_adapters and not self.merged and len(names) == 1
            return names[0] if is_short and names[0] not in self.lora_variant else None

        def is_plain(self) -> bool:
            if (name := self._alone()) is None:
                return False
            dropout = self.lora_dropout[name]
            return not (self.training and isinstance(dropout, nn.Dropout) and dropout.p > 0)

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            name = self._alone()
            if args or kwargs or name is None:
                result: Tensor = super().forward(x, *args, **kwargs)
                return result
            down: Any = self.lora_A[name]
            up: Any = self.lora_B[name]
            dropout = self.lora_dropout[name]
            return low_rank_sum(dropout(x), down.weight, up.weight, self.scaling[name], lambda: self.base_layer(x))

    return LoraLinear


@cache
def magnitude_class() -> type:
    """peft's layer for DoRA's magnitude, with a forward that compiles inside a checkpoint. Made on first use, like `lora_linear_class`."""
    from peft.tuners.lora.dora import DoraLinearLayer

    class Magnitude(DoraLinearLayer):
        """Does not clear its cache while it is traced: the compiler cannot repeat that in a recompute. Nothing fills the cache in training."""

        def _cache_clear(self) -> None:
            if not torch.compiler.is_compiling():
                super()._cache_clear()

    return Magnitude
