"""All attention of all models: one function, a table of backends, and the mark that checkpoint policies read.

A model calls `attend(q, k, v, name="self")` and nothing else. Which kernel runs, and whether a checkpoint keeps what the
call saves, are settings that the core puts in force *inside* the function it checkpoints: autograd recomputes on threads
of its own, and a setting made outside would be invisible there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
import torch_remat as remat
from jaxtyping import Bool, Float
from torch import Tensor

from ditkit_core.errors import UserError

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, dropout: float) -> Tensor:
    mask = None if key_mask is None else key_mask[:, None, None, :]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, dropout_p=dropout
    )
    return out.transpose(1, 2)


def _flash2(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, dropout: float) -> Tensor:
    from flash_attn import flash_attn_func

    return flash_attn_func(q, k, v, dropout_p=dropout)


def _flash3(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, dropout: float) -> Tensor:
    from flash_attn_interface import flash_attn_func

    out = flash_attn_func(q, k, v)
    return out[0] if isinstance(out, tuple) else out  # releases differ in whether they return the log-sum-exp


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to compute attention, and what it can do."""

    kernel: Kernel
    module: str | None
    """Package that must be installed; None is torch itself."""
    has_backward: bool
    takes_mask: bool
    takes_dropout: bool
    half_only: bool
    """Runs in fp16 and bf16 only."""


BACKENDS: dict[str, Backend] = {
    "sdpa": Backend(kernel=_sdpa, module=None, has_backward=True, takes_mask=True, takes_dropout=True, half_only=False),
    "flash2": Backend(
        kernel=_flash2, module="flash_attn", has_backward=True, takes_mask=False, takes_dropout=True, half_only=True
    ),
    "flash3": Backend(
        kernel=_flash3,
        module="flash_attn_interface",
        has_backward=True,
        takes_mask=False,
        takes_dropout=False,
        half_only=True,
    ),
}


def check_backend(name: str, *, training: bool) -> None:
    """Refuse, before the first step, a backend that is unknown, not installed, or has no backward.

    Raises:
        UserError: Naming the backends that would work.
    """
    usable = [
        other
        for other, backend in BACKENDS.items()
        if (backend.module is None or find_spec(backend.module)) and (backend.has_backward or not training)
    ]
    if name not in BACKENDS:
        raise UserError(f"unknown attention backend {name!r}; usable here: {', '.join(usable)}")
    backend = BACKENDS[name]
    if backend.module is not None and find_spec(backend.module) is None:
        raise UserError(
            f"attention backend {name!r} needs {backend.module}, not installed; usable here: {', '.join(usable)}"
        )
    if training and not backend.has_backward:
        raise UserError(
            f"attention backend {name!r} has no backward and cannot train; usable here: {', '.join(usable)}"
        )


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """What is in force while a block runs."""

    backend: str = "sdpa"
    keep: bool = False
    """Whether an enclosing checkpoint keeps what attention saves instead of running it again."""


_DEFAULT = AttentionSettings()
_settings: ContextVar[AttentionSettings] = ContextVar("attention_settings", default=_DEFAULT)


def settings_in_force() -> AttentionSettings:
    """The settings of the enclosing `attention_settings`, or the defaults."""
    return _settings.get()


@contextmanager
def attention_settings(settings: AttentionSettings) -> Iterator[None]:
    """Put settings in force for the calls of `attend` inside the block."""
    token = _settings.set(settings)
    try:
        yield
    finally:
        _settings.reset(token)


def attend(
    q: Float[Tensor, "batch queries heads head_dim"],
    k: Float[Tensor, "batch keys heads head_dim"],
    v: Float[Tensor, "batch keys heads head_dim"],
    *,
    name: str,
    key_mask: Bool[Tensor, "batch keys"] | None = None,
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
        UserError: If the backend in force cannot take a mask, dropout, or this dtype.
    """
    settings = settings_in_force()
    backend = BACKENDS[settings.backend]
    if key_mask is not None and not backend.takes_mask:
        raise UserError(f"attention backend {settings.backend!r} takes no mask: batch samples of one size, or use sdpa")
    if dropout and not backend.takes_dropout:
        raise UserError(f"attention backend {settings.backend!r} has no dropout: set it to 0, or use sdpa")
    if backend.half_only and q.dtype not in (torch.float16, torch.bfloat16):
        raise UserError(f"attention backend {settings.backend!r} runs in bf16 or fp16 only, not {q.dtype}; use sdpa")
    if not settings.keep:
        return backend.kernel(q, k, v, key_mask, dropout)
    out: Tensor = remat.region(backend.kernel, name, recompute=False)(q, k, v, key_mask, dropout)
    remat.recompute_needs_tensor(out)  # what follows is recomputed from it
    return out
