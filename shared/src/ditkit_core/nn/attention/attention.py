"""All attention of all models: one function, with the mark that checkpointing policies read.

A model calls `attend(q, k, v, name="self")` and nothing else. The engine's settings (`context.py`)
decide which kernel runs (`attention_backends.py`) and whether a checkpoint keeps what the call
saves.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch_remat as remat
from jaxtyping import Bool, Float
from torch import Tensor

from ditkit_core.errors import UserError, argument
from ditkit_core.nn.attention.backends import BACKENDS, Backend, Kernel
from ditkit_core.nn.context import settings_in_force

Blocks = tuple[tuple[int, int], ...]
"""Stretches of a sample's tokens, in order: the first token of each, and the first behind it."""


def attend(
    q: Float[Tensor, "batch queries heads head_dim"],
    k: Float[Tensor, "batch keys heads head_dim"],
    v: Float[Tensor, "batch keys heads head_dim"],
    *,
    name: str,
    padding_mask: Bool[Tensor, "batch keys"] | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    blocks: Sequence[Blocks] = (),
) -> Float[Tensor, "batch queries heads head_dim"]:
    """Scaled dot-product attention through the current backend.

    Args:
        q: Queries, in the matmuls' dtype.
        k: Keys; k and v may be longer or shorter than q.
        name: Unique within a block (`self`, `cross`); a checkpoint recognises the call by it.
        padding_mask: True where a key may be attended to; None if all may.
        dropout: Probability of dropping an attention weight, 0 to 1.
        causal: Whether a query attends only to the keys up to its place. There are then as many
            keys as queries and no mask: what pads a sample behind its end is attended to by
            padding alone.
        blocks: Of each sample, the stretches of tokens that attend to each other in causal
            attention, whatever their order, and to all before them: images in a text.

    Returns:
        One row per query, in the dtype of q.

    Raises:
        UserError: If the current backend does not support a mask, dropout, this dtype or this
            device; or if a call that a policy keeps would run again.
    """
    settings = settings_in_force()
    backend = BACKENDS[settings.backend]
    _check(settings.backend, backend, q, padding_mask, dropout)
    if settings.calls is not None and not settings.recomputing and torch.is_grad_enabled():
        # Not in a recompute: it would count a call twice, and only those that are not kept.
        settings.calls.counts[name] += 1
    kernel: Callable[..., Any] = backend.kernel
    exchange = settings.exchange
    if exchange is not None and name not in exchange.calls:
        exchange = None
    if any(blocks):
        assert causal and len(blocks) == len(q), "blocks are in causal attention"
        kernel = partial(_in_blocks, kernel, blocks)
    if exchange is not None:
        # Inside of it, because blocks are among the tokens of all ranks.
        joined = partial(_joined_blocks, kernel, blocks) if any(blocks) else kernel
        kernel = partial(exchange.attend, joined, name)
    if causal:
        assert padding_mask is None and q.shape == k.shape, "causal attention of unequal lengths"
        kernel = partial(kernel, causal=True)
    if settings.keeps(name):
        kernel = partial(_kept, kernel, f"attention {name!r}", name)
    if exchange is None and any(blocks):
        kernel = partial(_joined_blocks, kernel, blocks)
    out: Tensor = kernel(q, k, v, padding_mask, dropout)
    return out


def _in_blocks(
    kernel: Kernel,
    blocks: Sequence[Blocks],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding_mask: None,
    dropout: float,
    causal: bool = True,
) -> tuple[Tensor, ...]:
    """Causal attention of all tokens, and for each block attention of its queries to all keys up to
    its end. No kernel needs a mask for it.

    Causal results of the blocks are of no use, at most a third of the scores.
    """
    parts = [kernel(q, k, v, padding_mask, dropout, causal=causal)]
    for samples, stretches in _alike(blocks):
        for start, end in stretches:
            queries, keys, values = q[samples, start:end], k[samples, :end], v[samples, :end]
            parts.append(kernel(queries, keys, values, padding_mask, dropout))
    return tuple(parts)


def _joined_blocks(
    kernel: Callable[..., tuple[Tensor, ...]],
    blocks: Sequence[Blocks],
    *args: Any,
    **options: Any,
) -> Tensor:
    """The result of `_in_blocks` for every token. A recompute joins again, instead of keeping it
    next to its parts."""
    out, *parts = kernel(*args, **options)
    rows, attended = [], iter(parts)
    for samples, stretches in _alike(blocks):
        pieces, behind = [], 0
        for start, end in stretches:
            pieces += [out[samples, behind:start], next(attended)]
            behind = end
        rows.append(torch.cat([*pieces, out[samples, behind:]], 1))
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def _alike(blocks: Sequence[Blocks]) -> list[tuple[slice, Blocks]]:
    """All samples at once if they have the same blocks, else one by one."""
    if len(set(blocks)) == 1:
        return [(slice(None), blocks[0])]
    return [(slice(index, index + 1), stretches) for index, stretches in enumerate(blocks)]


def kept(function: Callable[..., Tensor], name: str, *arguments: Any) -> Tensor:
    """Call a function that must not run again where attention is kept, such as a collective between
    ranks behind an MLP.

    Policies that keep attention also keep what this call saves and returns, whatever names of
    attention they list. Other policies treat it as any other part of the block.

    Args:
        function: Returns one tensor. It takes all tensors that it needs as arguments, and closes
            over none.
        name: Unique within a block, among the names of attention as well.
    """
    if settings_in_force().keep is None:
        return function(*arguments)
    out: Tensor = _kept(function, f"the call {name!r}", name, *arguments)
    return out


def _kept(function: Callable[..., Any], label: str, name: str, *arguments: Any) -> Any:
    # A checkpoint that keeps the call never runs the function in the recompute. If it does run, the
    # checkpoint has missed the region, and the failure must be loud: the numbers would be right, at
    # the full cost of a recompute.
    called = partial(_refuse, label) if settings_in_force().recomputing else function
    out = remat.region(called, name, recompute=False)(*arguments)
    for part in [out] if isinstance(out, Tensor) else out:
        remat.recompute_needs_tensor(part)  # the operations behind it are recomputed from it
    return out


def _refuse(label: str, *arguments: object) -> NoReturn:
    raise UserError(
        f"{label} should have been kept but is computed again: the checkpoint around the block "
        f"does not see its mark. Write {argument('train.checkpointing')} = full to recompute "
        "everything, and report this policy"
    )


def _check(
    name: str, backend: Backend, q: Tensor, padding_mask: Tensor | None, dropout: float
) -> None:
    # At the call, because a mask depends on the micro-batch: `check_backend` cannot know of it
    # before.
    if padding_mask is not None and not backend.takes_mask:
        raise UserError(
            f"attention backend {name!r} takes no mask: batch samples of one size only, or use sdpa"
        )
    if dropout and not backend.takes_dropout:
        raise UserError(f"attention backend {name!r} has no dropout: set it to 0, or use sdpa")
    if backend.half_only and q.dtype not in (torch.float16, torch.bfloat16):
        raise UserError(
            f"attention backend {name!r} runs in bf16 or fp16 only, not {q.dtype}; use sdpa"
        )
    if backend.devices and q.device.type not in backend.devices:
        raise UserError(
            f"attention backend {name!r} runs on {' and '.join(backend.devices)} only, not on "
            f"{q.device.type}; use sdpa"
        )
