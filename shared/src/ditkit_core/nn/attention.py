"""All attention of all models: one function, and the mark that checkpoint policies read.

A model calls `attend(q, k, v, name="self")` and nothing else. Which kernel runs (`attention_backends`), and whether a checkpoint keeps
what the call saves, are settings in force (`context.py`).
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch_remat as remat
from jaxtyping import Bool, Float
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.nn.attention_backends import BACKENDS, Backend
from ditkit_core.nn.context import settings_in_force


def attend(
    q: Float[Tensor, "batch queries heads head_dim"],
    k: Float[Tensor, "batch keys heads head_dim"],
    v: Float[Tensor, "batch keys heads head_dim"],
    *,
    name: str,
    padding_mask: Bool[Tensor, "batch keys"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "batch queries heads head_dim"]:
    """Scaled dot-product attention through the backend in force.

    Args:
        q: Queries, in the matmuls' dtype.
        k: Keys; k and v may be longer or shorter than q.
        v: Values.
        name: Unique within a block (`self`, `cross`): a checkpoint recognises the call by it.
        key_mask: True where a key may be seen; None when all may.
        dropout: Probability of dropping an attention weight.

    Raises:
        UserError: If the backend in force cannot take a mask, dropout, this dtype or this device; or if a call that a policy keeps
            would run again.
    """
    settings = settings_in_force()
    backend = BACKENDS[settings.backend]
    _check(settings.backend, backend, q, padding_mask, dropout)
    if settings.calls is not None and not settings.recomputing and torch.is_grad_enabled():
        # Not of a recompute: that is the same call again, and one that is kept is not even made.
        settings.calls.made[name] += 1
    if not settings.keeps(name):
        return backend.kernel(q, k, v, padding_mask, dropout)
    return _kept(backend.kernel, f"attention {name!r}", name, q, k, v, padding_mask, dropout)


def kept(function: Callable[..., Tensor], name: str, *given: Any) -> Tensor:
    """Call a function that must not run again where attention is kept, such as a collective between ranks behind an MLP.

    Policies that keep attention keep what this call saves and returns as well, whatever names of attention they are given; the others
    take it for any other part of the block.

    Args:
        function: Returns one tensor; takes whatever tensors it needs as arguments, and closes over none.
        name: Unique within a block, among names of attention too.
        given: Its arguments.
    """
    if settings_in_force().keep is None:
        return function(*given)
    return _kept(function, f"the call {name!r}", name, *given)


def _kept(function: Callable[..., Tensor], what: str, name: str, *given: Any) -> Tensor:
    # Where a checkpoint keeps the call, the recompute does not run what it is given.
    called = _never(what) if settings_in_force().recomputing else function
    out: Tensor = remat.region(called, name, recompute=False)(*given)
    remat.recompute_needs_tensor(out)  # what follows is recomputed from it
    return out


def _never(what: str) -> Callable[..., NoReturn]:
    def kernel(*given: object) -> NoReturn:
        raise UserError(
            f"{what} was to be kept and is computed again: the checkpoint around the block does not see the mark of it. "
            "Write train.checkpointing = full to recompute all, and report this policy"
        )

    return kernel


def _check(name: str, backend: Backend, q: Tensor, padding_mask: Tensor | None, dropout: float) -> None:
    if padding_mask is not None and not backend.takes_mask:
        raise UserError(f"attention backend {name!r} takes no mask: batch samples of one size, or use sdpa")
    if dropout and not backend.takes_dropout:
        raise UserError(f"attention backend {name!r} has no dropout: set it to 0, or use sdpa")
    if backend.half_only and q.dtype not in (torch.float16, torch.bfloat16):
        raise UserError(f"attention backend {name!r} runs in bf16 or fp16 only, not {q.dtype}; use sdpa")
    if backend.devices and q.device.type not in backend.devices:
        raise UserError(
            f"attention backend {name!r} runs on {' and '.join(backend.devices)} alone, not on {q.device.type}; use sdpa"
        )
