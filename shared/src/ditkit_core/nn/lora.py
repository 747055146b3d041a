"""The product of a plain LoRA over a frozen layer, in fewer passes over large tensors than peft's
own forward.

peft has the adapter, its names and its options; only the product is ours. Composed eagerly, peft's
forward makes an fp32 copy of the input per target, which autograd keeps, and scales and rounds the
output in passes of their own. Here autograd saves the input in its own dtype and a [tokens, rank]
product, and the scaling is applied to that product. The arithmetic is peft's: adapter in fp32, sum
in fp32, one rounding at the end.

On a GPU, fp32 products miss the tensor cores, and an fp32 copy of a bf16 input is most of a LoRA's
memory traffic. There each fp32 factor is written as a sum of three bf16 matrices, without loss, and
tensor cores multiply those: products of bf16 are exact in fp32, and the sums are fp32.
`bf16_parts.py` says how; with `kernels = "triton"` in force, a kernel of `nn/kernels/` makes the
parts. fp16 lacks the exponents for such a sum, so fp16 runs take the other path.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.nn.bf16_parts import IN_KERNELS, IN_TORCH, Split, wide_product
from ditkit_core.nn.context import device_kind, settings_in_force
from ditkit_core.nn.parameters import switched

AT_ONCE = {"cpu": 2**21, "cuda": 2**26}
"""By kind of device: number of elements of a product that are in the adapter's wider dtype at once.

A complete wide copy behind a fused projection would be the largest tensor of a block: nine times
the stream. On the CPU, a part that fits the cache is also several times faster. On a GPU a part has
to fill the device, and each costs three kernel launches. Counted under fake tensors, not timed, for
4608 tokens and a fused projection from 6144 to 55296 features, which 2**26 splits into four parts
of 1200 rows: that quarter of a GiB does not raise the step's peak (the complete copy does, by 0.7
GiB), a smaller part does not lower it, and 2**25 launches a tenth more kernels.
"""

TENSOR_CORES_FROM = 2**23
"""Elements of a layer's input or output from which a GPU's tensor cores multiply parts that torch
makes. Torch makes them in about 12 launches more than a layer's forward has otherwise, and 20 in
its backward, which a smaller product does not earn back: 1,024 tokens of width 6144 stay below,
20,280 of width 5120 are far above. Parts from a kernel serve every size, in fewer launches than
fp32 products. Counted, not timed."""


def low_rank_sum(
    x: Float[Tensor, "*batch in"],
    down: Float[Tensor, "rank in"],
    up: Float[Tensor, "out rank"],
    scaling: float,
    base: Callable[[Tensor], Float[Tensor, "*batch out"]],
) -> Float[Tensor, "*batch out"]:
    """base(x) + scaling · x Aᵀ Bᵀ, summed in the adapter's dtype and rounded once to the dtype of
    `base(x)`.

    Everything that the backward needs is saved before `base` runs, and nothing after it. So where
    this is a block's last layer, a checkpoint stops its recompute before the frozen matmul, the
    most expensive operation of the layer.

    Args:
        x: Input of the layer, after adapter dropout.
        down: A.
        up: B.
        scaling: alpha / rank.
        base: Calls the frozen layer. Its result, and the gradient that it makes for its input, are
            new, and may be overwritten.
    """
    settings = settings_in_force()
    split = _split_for(settings.kernels, x, down, up)
    out: Tensor
    if split is None:
        low, placeholder = _LowRank.apply(x, down, up, scaling)
        out = _Sum.apply(base(x), placeholder, low, up.detach())
    elif not x.is_contiguous() or not _is_frozen_linear(base):
        shared, placeholder, left, right = _SplitLowRank.apply(x, down, up, scaling, split)
        out = _SplitSum.apply(base(shared), placeholder, left, right, split)
    elif settings.recomputing:
        # Nobody goes backwards through what a recompute computes: it makes the tensors that
        # `_SplitLinear` saved, and may end with the last.
        _, placeholder, left, right = _SplitLowRank.apply(x, down, up, scaling, split)
        out = _SplitSum.apply(
            F.linear(x.detach(), base.weight, base.bias), placeholder, left, right, split
        )
    else:
        frozen = base._parameters  # `base.weight` takes the host ten times as long
        out = _SplitLinear.apply(x, down, up, frozen["weight"], frozen["bias"], scaling, split)
    return out


def _is_frozen_linear(base: Any) -> TypeGuard[nn.Linear]:
    """Whether a layer is torch's own, with nothing attached to it that a call of its product would
    leave out."""
    if type(base) is not nn.Linear or (
        base._forward_hooks
        or base._forward_pre_hooks
        or base._backward_hooks
        or base._backward_pre_hooks
    ):
        return False
    return not any(
        parameter is not None and parameter.requires_grad for parameter in base._parameters.values()
    )


class _LowRank(torch.autograd.Function):
    """The product with A, and a placeholder for the product with B: of its shape but without its
    memory, to receive its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, up: Tensor, scaling: float
    ) -> tuple[Tensor, Tensor]:
        product = x.flatten(0, -2).to(down.dtype) @ down.T
        low = product * scaling  # not in place: a checkpoint may have kept the product
        ctx.save_for_backward(x, down, up, low)
        ctx.scaling = scaling
        # Its gradient comes through the placeholder, which has the full width.
        ctx.mark_non_differentiable(low)
        ctx.set_materialize_grads(False)
        return low, _placeholder(x, up)

    @staticmethod
    def backward(ctx: Any, _: None, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient of the placeholder is the gradient of the layer's output: `_Sum` passes it on
        # as it is.
        x, down, up, low = ctx.saved_tensors
        rows, of_down, of_x = x.flatten(0, -2), ctx.needs_input_grad[1], ctx.needs_input_grad[0]
        d_low, d_up = _products(
            gradient.flatten(0, -2), up, low if ctx.needs_input_grad[2] else None
        )
        d_low.mul_(ctx.scaling)
        d_down = d_low.T @ rows.to(down.dtype) if of_down else None
        d_x = (d_low @ down).to(x.dtype).view_as(x) if of_x else None
        return d_x, d_down, d_up, None


def _placeholder(x: Tensor, up: Tensor) -> Tensor:
    return x.new_empty(()).expand(*x.shape[:-1], len(up))


class _Sum(torch.autograd.Function):
    """result + low Bᵀ; keeps nothing for its backward."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, placeholder: Tensor, low: Tensor, up: Tensor) -> Tensor:
        rows = result.flatten(0, -2)
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
    """gradient · B, and gradientᵀ · low, in the adapter's dtype. No sum is split, so the results do
    not depend on the spans."""
    if gradient.dtype == up.dtype:
        return gradient @ up, None if low is None else gradient.T @ low
    # the complete matrix fits: one conversion serves both products
    if _at_once(gradient, 0) == len(gradient):
        converted = gradient.to(up.dtype)
        return converted @ up, None if low is None else converted.T @ low
    d_low = up.new_empty(len(gradient), up.shape[1])
    for span, wide in _spans(len(gradient), up.new_empty(_at_once(gradient, 0), len(up))):
        torch.mm(wide.copy_(gradient[span]), up, out=d_low[span])
    if low is None:
        return d_low, None
    # By columns: each row of d_up is then a complete sum over tokens, as in the product of the
    # complete matrices. BLAS transposes: a copy that does takes a CPU several times as long.
    d_up = torch.empty_like(up)
    step, buffer = _at_once(gradient, 1), up.new_empty(len(gradient) * _at_once(gradient, 1))
    for columns, target in zip(gradient.split(step, 1), d_up.split(step), strict=True):
        wide = buffer[: columns.numel()].view_as(columns).copy_(columns)
        torch.mm(wide.T, low, out=target)
    return d_low, d_up


def _at_once(x: Tensor, axis: int) -> int:
    """Number of rows (axis 0) or columns (axis 1) of a matrix that are in the adapter's wider dtype
    at once."""
    return min(max(1, AT_ONCE[device_kind(x)] // x.shape[1 - axis]), x.shape[axis])


def _spans(count: int, buffer: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Spans of at most the buffer's length over `count` rows, each with a part of the buffer of its
    length."""
    for start in range(0, count, max(1, len(buffer))):
        stop = min(start + len(buffer), count)
        yield slice(start, stop), buffer[: stop - start]


class _SplitLowRank(torch.autograd.Function):
    """`_LowRank` on tensor cores: also the input for the frozen layer, whose gradient comes back
    here and takes up this one's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, up: Tensor, scaling: float, split: Split
    ) -> tuple[Tensor, ...]:
        rank, shared = len(down), x.view_as(x)
        of_down, of_up = split.factors(down, up)
        left, low = split.products(
            wide_product(x.flatten(0, -2), of_down[: 3 * rank].T), None, rank, scaling
        )
        ctx.save_for_backward(x, down, up, low)
        ctx.scaling, ctx.split = scaling, split
        ctx.mark_non_differentiable(left, of_up, *(() if x.requires_grad else (shared,)))
        ctx.set_materialize_grads(False)
        return shared, _placeholder(x, up), left, of_up

    @staticmethod
    def backward(
        ctx: Any, d_x: Tensor | None, gradient: Tensor, *_: None
    ) -> tuple[Tensor | None, ...]:
        x, *factors = ctx.saved_tensors
        saved = x.flatten(0, -2), *factors
        d_low, of_down, d_down, d_up = ctx.split.gradients(
            gradient.flatten(0, -2), saved, ctx.scaling, ctx.needs_input_grad[1:3]
        )
        if d_x is not None:
            d_x = ctx.split.add(d_x.flatten(0, -2), d_low, of_down).view_as(x)
        elif ctx.needs_input_grad[0]:  # under dropout, the frozen layer has another input
            d_x = torch.mm(d_low, of_down).view_as(x)
        return d_x, d_down, d_up, None, None


class _SplitLinear(torch.autograd.Function):
    """Product of a frozen layer and its adapter in one function, which costs the host half as much
    as three. It saves what `_SplitLowRank` saves.

    The node refers to the frozen weight itself, see `quantized_linear.py: _Product`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        down: Tensor,
        up: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scaling: float,
        split: Split,
    ) -> Tensor:
        rank, rows = down.shape[0], x.flatten(0, -2)
        of_down, of_up = split.factors(down, up)
        left, low = split.products(wide_product(rows, of_down[: 3 * rank].T), None, rank, scaling)
        ctx.save_for_backward(x, down, up, low)
        ctx.weight, ctx.scaling, ctx.split = weight, scaling, split
        return split.add(F.linear(rows, weight, bias), left, of_up.T).view(
            *x.shape[:-1], weight.shape[0]
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *factors = ctx.saved_tensors
        wanted, rows = ctx.needs_input_grad, gradient.flatten(0, -2)
        d_x = torch.mm(rows, ctx.weight) if wanted[0] else None
        d_low, of_down, d_down, d_up = ctx.split.gradients(
            rows, (x.flatten(0, -2), *factors), ctx.scaling, wanted[1:3]
        )
        if d_x is not None:
            d_x = ctx.split.add(d_x, d_low, of_down).view_as(x)
        return d_x, d_down, d_up, None, None, None, None


class _SplitSum(torch.autograd.Function):
    """`_Sum` on tensor cores."""

    @staticmethod
    def forward(
        ctx: Any, result: Tensor, placeholder: Tensor, left: Tensor, up: Tensor, split: Split
    ) -> Tensor:
        rows = result.flatten(0, -2)
        # In place, since nobody else reads the result. Detached: a view would make autograd copy
        # the gradient.
        return split.add(rows.detach(), left, up.T).view(result.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, gradient, None, None, None


def _split_for(kernels: str, x: Tensor, down: Tensor, up: Tensor) -> Split | None:
    """The functions for these factors; None if fp32 products suit the layer better."""
    if (
        x.dtype != torch.bfloat16
        or not down.dtype == up.dtype == torch.float32
        or device_kind(x) != "cuda"
    ):
        return None
    if kernels != "torch":
        return IN_KERNELS
    wider = max(down.shape[1], len(up))
    return IN_TORCH if x.numel() // x.shape[-1] * wider >= TENSOR_CORES_FROM else None


ASSISTANT = "assistant"
"""Name of a layer's frozen second adapter, which is there whether its first one is switched off or
not."""


class KeepsOnlyItsInput:
    """A frozen layer, other than torch's Linear, whose forward saves nothing large for its backward
    but its input."""


class PlainLora:
    """A LoRA layer that can say whether its next forward is the plain product."""

    def is_plain(self) -> bool:
        """Whether there is one active, unmerged adapter, without dropout."""
        raise NotImplementedError


def keeps_only_its_input(layer: nn.Module) -> bool:
    """Whether a frozen layer's forward, with its adapter, saves nothing large for its backward but
    its input.

    False for a layer that is trained itself: an operation behind it (a trained gate) needs its
    output.
    """
    # `type`, not isinstance: a subclass may save more.
    frozen = type(layer) is nn.Linear and not layer.weight.requires_grad
    return (
        frozen
        or isinstance(layer, KeepsOnlyItsInput)
        or (isinstance(layer, PlainLora) and layer.is_plain())
    )


class AdapterDropout(nn.Dropout):
    """Dropout of the input of an adapter's product: its masks cover all tokens, also where ranks
    share the tokens of a sample."""

    def __init__(self, rate: float, layer: str):
        """Make the dropout of the layer with this name, at a rate in [0, 1)."""
        super().__init__(rate)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """The input, with a fraction of its values zero in training."""
        exchange = settings_in_force().exchange
        if exchange is None or not self.training:
            return super().forward(x)
        return exchange.dropout(x, self.p, self.layer)


def without_adapters(model: Any) -> AbstractContextManager[None]:
    """Inside the block the layers of a `StagedModel` with peft's adapters compute what they would
    without them.

    peft's own switch, `enable_adapters`, also changes which parameters require a gradient.
    """
    layers = (
        module for module in model.modules() if getattr(module, "_disable_adapters", None) is False
    )
    return switched(layers, "_disable_adapters", True)
