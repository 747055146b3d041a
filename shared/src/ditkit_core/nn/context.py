"""What is global to the process while a forward, or its recompute, runs, in one place.

What a block needs travels in its carry, and what a layer needs in its arguments. Four things cannot: they belong to the engine or the
planner, and are read at calls of `attend`, or of a product, deep inside model code that knows no engine.

- How attention is run, and whether a checkpoint keeps it. A ContextVar that the engine sets *inside* the function it checkpoints: autograd
  recomputes on threads of its own, where a setting that was made outside is not seen.
- What a block saves behind the boundary of its recompute (`remat.py`). A ContextVar, set where the first one is.
- Where calls of attention are counted in a first step. A ContextVar that is set around a step.
- The kind of device that fake tensors stand for. A list: it is read in compiled code too, and up to torch 2.11 the compiler cannot read
  a ContextVar.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ditkit_core.errors import UserError


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


_scope: ContextVar[Any] = ContextVar("recompute_scope", default=None)


def scope_in_force() -> Any:
    """The `remat.RecomputeScope` of the block that runs, if its policy has one."""
    return _scope.get()


@contextmanager
def scope_set(scope: Any) -> Iterator[None]:
    """Put a scope in force."""
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)


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


_stand_in: list[str] = []
"""Not a ContextVar, which older compilers cannot trace."""


@contextmanager
def as_on(kind: str) -> Iterator[None]:
    """Inside the block, go by this kind of device (`cuda`) whatever a tensor says: for fake tensors that stand for it."""
    _stand_in.append(kind)
    try:
        yield
    finally:
        _stand_in.pop()


def device_kind(x: Tensor) -> str:
    """The kind of device that a tensor is on: `cpu` or `cuda`."""
    return _stand_in[-1] if _stand_in else "cpu" if x.device.type == "cpu" else "cuda"
