"""Reference attention in plain products over a few queries at a time: for any dtype on any device,
without the full matrix of scores.

A GPU's fast kernels take no fp64, and torch's own kernel for it stores all scores at once, the
square of the number of tokens. Here scores are computed for some queries, used and freed; the
backward computes them again. It is slow: other backends are compared with it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

SCORES_AT_ONCE = 2**26
"""Number of scores in memory at once: half a GiB of fp64 each for scores, exponentials and
gradients."""


def exact_attention(
    q: Float[Tensor, "batch queries heads head_dim"],
    k: Float[Tensor, "batch keys heads head_dim"],
    v: Float[Tensor, "batch keys heads head_dim"],
    padding_mask: Bool[Tensor, "batch keys"] | None,
    dropout: float,
    causal: bool = False,
) -> Float[Tensor, "batch queries heads head_dim"]:
    """softmax(q kᵀ / √head_dim) v, in the dtype of q, k and v.

    `padding_mask` is True where a key may be attended to; None if all may. `dropout` is always 0:
    all kernels have one signature. With `causal`, a query attends to the keys up to its place.
    """
    out: Tensor = _Exact.apply(q, k, v, padding_mask, causal)
    return out


class _Exact(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None, causal: bool
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, padding_mask)
        ctx.causal = causal
        # Written span by span: the results of all spans and their concatenation would be in memory
        # twice.
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        keys, values = k.transpose(1, 2), v.transpose(1, 2)
        for span in _spans(q, k):
            part = _weights(q, span, keys, padding_mask, causal) @ values
            out[:, span] = part.transpose(1, 2)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, padding_mask = ctx.saved_tensors
        keys, values = k.transpose(1, 2), v.transpose(1, 2)
        d_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        # Every span of queries adds to the gradients of all keys and values.
        d_k, d_v = torch.zeros_like(keys), torch.zeros_like(values)
        for span in _spans(q, k):
            weights, d_out = (
                _weights(q, span, keys, padding_mask, ctx.causal),
                gradient[:, span].transpose(1, 2),
            )
            d_v += weights.transpose(-2, -1) @ d_out
            d_weights = d_out @ values.transpose(-2, -1)
            # The softmax's backward: dS = W ∘ (dW - Σ dW ∘ W), per query.
            inner = (d_weights * weights).sum(-1, keepdim=True)
            d_scores = (d_weights - inner).mul_(weights).mul_(_scale(q))
            d_q[:, span] = (d_scores @ keys).transpose(1, 2)
            d_k += d_scores.transpose(-2, -1) @ q[:, span].transpose(1, 2)
        return d_q, d_k.transpose(1, 2), d_v.transpose(1, 2), None, None


def _weights(
    q: Tensor, span: slice, keys: Tensor, padding_mask: Tensor | None, causal: bool
) -> Tensor:
    """Attention weights [batch, heads, queries, keys] of the queries in a span."""
    scores = q[:, span].transpose(1, 2) @ keys.transpose(-2, -1) * _scale(q)
    if causal:
        positions = torch.arange(keys.shape[2], device=q.device)
        scores = scores.masked_fill(positions > positions[span, None], -float("inf"))
    if padding_mask is not None:
        scores = scores.masked_fill(~padding_mask[:, None, None, :], -float("inf"))
    return scores.softmax(-1)


def _scale(q: Tensor) -> float:
    return float(q.shape[-1] ** -0.5)


def _spans(q: Tensor, k: Tensor) -> Iterator[slice]:
    batch, num_queries, heads, _ = q.shape
    at_once = max(1, SCORES_AT_ONCE // (batch * heads * k.shape[1]))
    for start in range(0, num_queries, at_once):
        yield slice(start, start + at_once)
