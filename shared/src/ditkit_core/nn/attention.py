"""All attention of all models: one function, and the mark that checkpoint policies read.

A model calls `attend(q, k, v, name="self")` and nothing else. Which kernel runs (`attention_backends`), and whether a checkpoint keeps
what the call saves, are settings that the core puts in force *inside* the function it checkpoints: autograd recomputes on threads
of its own, and a setting made outside would be invisible there.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch_remat as remat
from jaxtyping import Bool, Float
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.nn.attention_backends import BACKENDS, Backend


@dataclass(kw_only=True)
class AttentionCalls:
    """What was attended to in a first step: shows whether policies keep what they are to keep."""

    made: Counter[str] = field(default_factory=Counter)
    """Calls of `attend` in blocks that recompute, in grad mode, by name; those of a recompute are not counted."""
    wanted: dict[str, str] = field(default_factory=dict)
    """Names that policies are to keep, and the policy that names each; empty for all."""
    traced: set[Any] = field(default_factory=set)
    """Kinds of compiled blocks, each with its policy, whose calls were entered."""

    def want(self, names: tuple[str, ...], policy: str) -> None:
        """A block runs under a policy that keeps calls of these names; none for all."""
        self.wanted |= dict.fromkeys(names or ("",), policy)

    def check(self) -> None:
        """Refuse, after a forward and before the first update, a policy that keeps nothing.

        Raises:
            UserError: Naming what it could keep.
        """
        for name, policy in self.wanted.items():
            if not self.made:
                raise UserError(
                    f"train.checkpointing: {policy} keeps what attention returns, and no block calls attention; write full"
                )
            if name and name not in self.made:
                raise UserError(
                    f"train.checkpointing: {policy} keeps attention {name!r}, which no block calls; the blocks call "
                    f"{', '.join(sorted(self.made))}"
                )


_calls: ContextVar[AttentionCalls | None] = ContextVar("attention_calls", default=None)


def calls_in_force() -> AttentionCalls | None:
    """Where calls of attention are to be entered, if anybody counts them."""
    return _calls.get()


@contextmanager
def counted_calls(calls: AttentionCalls | None) -> Iterator[None]:
    """Enter the calls of forwards inside the block, those of policies that recompute; None counts nothing."""
    token = _calls.set(calls)
    try:
        yield
    finally:
        _calls.reset(token)


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """What is in force while a block runs."""

    backend: str = "sdpa"
    keep: tuple[str, ...] | None = None
    """Names of the calls of which an enclosing checkpoint keeps what attention saves instead of running it again: empty for all, None
    for none."""
    recomputing: bool = False
    """Whether a block is run again for its backward."""
    calls: AttentionCalls | None = None
    """Where calls are entered."""

    def keeps(self, name: str) -> bool:
        """Whether the call of this name is kept."""
        return self.keep is not None and (not self.keep or name in self.keep)


_DEFAULT = AttentionSettings()
_settings: ContextVar[AttentionSettings] = ContextVar("attention_settings", default=_DEFAULT)
_traced = [_DEFAULT]
"""In force, at its end, in what is compiled: up to torch 2.11 the compiler cannot read a ContextVar, and it runs no Python in a backward."""


def settings_in_force() -> AttentionSettings:
    """The settings of the enclosing `attention_settings`, or in compiled code `traced_settings`, or the defaults."""
    return _traced[-1] if torch.compiler.is_compiling() else _settings.get()


@contextmanager
def traced_settings(settings: AttentionSettings) -> Iterator[None]:
    """Put settings in force for compiled code that is called inside the block."""
    _traced.append(settings)
    try:
        yield
    finally:
        _traced.pop()


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
        UserError: If the backend in force cannot take a mask, dropout, this dtype or this device; or if a call that a policy keeps
            would run again.
    """
    settings = settings_in_force()
    backend = BACKENDS[settings.backend]
    _check(settings.backend, backend, q, key_mask, dropout)
    if settings.calls is not None and not settings.recomputing and torch.is_grad_enabled():
        settings.calls.made[name] += 1
    if not settings.keeps(name):
        return backend.kernel(q, k, v, key_mask, dropout)
    return _kept(backend.kernel, f"attention {name!r}", name, q, k, v, key_mask, dropout)


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


def _check(name: str, backend: Backend, q: Tensor, key_mask: Tensor | None, dropout: float) -> None:
    if key_mask is not None and not backend.takes_mask:
        raise UserError(f"attention backend {name!r} takes no mask: batch samples of one size, or use sdpa")
    if dropout and not backend.takes_dropout:
        raise UserError(f"attention backend {name!r} has no dropout: set it to 0, or use sdpa")
    if backend.half_only and q.dtype not in (torch.float16, torch.bfloat16):
        raise UserError(f"attention backend {name!r} runs in bf16 or fp16 only, not {q.dtype}; use sdpa")
    if backend.devices and q.device.type not in backend.devices:
        raise UserError(
            f"attention backend {name!r} runs on {' and '.join(backend.devices)} alone, not on {q.device.type}; use sdpa"
        )
