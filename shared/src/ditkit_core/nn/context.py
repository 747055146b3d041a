"""All state that is global to the process while a forward, or its recompute, runs.

A block gets its inputs in the carry, and a layer in its arguments. Five things cannot travel that
way: they belong to the engine or the planner, and are read in calls of `attend`, or of a product,
deep inside model code that has no access to an engine.

- How attention and elementwise work run, and whether a checkpoint keeps attention. A ContextVar
  that the engine sets *inside* the function that it checkpoints: autograd recomputes on threads of
  its own, which do not see a setting that was made outside.
- What a block saves behind the boundary of its recompute (`remat.py`). A ContextVar, set in the
  same place.
- The counter of attention calls in a first step. A ContextVar that is set around a step.
- CUDA's current device, which kernels that are not torch's own are launched on. It belongs to a
  thread, so it is set around each launch.
- The kind of device that fake tensors stand for. A list, which all threads read.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxtyping import Bool, Float
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.io.runtimes import runtime_of


@dataclass(kw_only=True)
class AttentionCalls:
    """The attention calls of a first step: they show whether policies keep what they should."""

    counts: Counter[str] = field(default_factory=Counter)
    """Calls of `attend` in blocks that recompute, in grad mode, by name; calls of a recompute are
    not counted."""
    wanted: dict[str, str] = field(default_factory=dict)
    """Names of calls that policies should keep, each with its policy; an empty name means all
    calls."""

    def want(self, names: tuple[str, ...], policy: str) -> None:
        """Note that a block's policy keeps calls with these names; no names mean all calls."""
        # Only recorded here: which names exist is known once all blocks have run.
        self.wanted |= dict.fromkeys(names or ("",), policy)

    def check(self) -> None:
        """Refuse, after a forward and before the first update, a policy that keeps nothing."""
        # A misspelled name would otherwise train with `full` in effect, only slower.
        for name, policy in self.wanted.items():
            if not self.counts:
                raise UserError(
                    f"train.checkpointing: {policy} keeps the results of attention, but no block "
                    f"calls attention; write full"
                )
            if name and name not in self.counts:
                raise UserError(
                    f"train.checkpointing: {policy} keeps attention {name!r}, which no block "
                    f"calls; the blocks call {', '.join(sorted(self.counts))}"
                )


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_calls: ContextVar[AttentionCalls | None] = ContextVar("attention_calls", default=None)


def calls_in_force() -> AttentionCalls | None:
    """The counter of attention calls, if there is one."""
    return _calls.get()


def counted_calls(calls: AttentionCalls | None) -> AbstractContextManager[None]:
    """Count attention calls of blocks that recompute, in forwards inside the `with` block; None
    counts nothing."""
    return _set(_calls, calls)


_scope: ContextVar[Any] = ContextVar("recompute_scope", default=None)


def scope_in_force() -> Any:
    """The `remat.RecomputeScope` of the running block, if its policy has one."""
    return _scope.get()


def scope_set(scope: Any) -> AbstractContextManager[None]:
    """Set the scope inside the `with` block."""
    return _set(_scope, scope)


class AttentionExchange(Protocol):
    """What a block needs of ranks that share the tokens of each sample;
    `distributed/context_parallel.py: TokenExchange` is the one there is."""

    @property
    def calls(self) -> tuple[str, ...]:
        """Names of the calls of `attend` that need an exchange."""

    def attend(
        self,
        kernel: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor],
        name: str,
        q: Float[Tensor, "batch part heads head_dim"],
        k: Float[Tensor, "batch part heads head_dim"],
        v: Float[Tensor, "batch part heads head_dim"],
        padding_mask: Bool[Tensor, "batch tokens"] | None,
        dropout: float,
    ) -> Float[Tensor, "batch part heads head_dim"]:
        """A kernel's attention of this rank's queries to the keys of all ranks."""

    def dropout(self, x: Float[Tensor, "batch part *rest"], rate: float, layer: str) -> Tensor:
        """Dropout of a layer's input, with this rank's part of the mask that one process has for
        all tokens."""


@dataclass(frozen=True, kw_only=True)
class BlockSettings:
    """How attention and elementwise work run in a block."""

    backend: str = "sdpa"
    kernels: str = "torch"
    """Implementation of norms, rotations, gated units, LoRA factors and quantized weights: `torch`,
    or `triton` for the kernels of `nn/kernels/`."""
    keep: tuple[str, ...] | None = None
    """Names of the attention calls that an enclosing checkpoint keeps instead of running them
    again: empty for all, None for none."""
    recomputing: bool = False
    """Whether a block runs again for its backward."""
    calls: AttentionCalls | None = None
    exchange: AttentionExchange | None = None
    """How ranks that share the tokens of each sample attend to all of them; None if this process
    has all tokens."""

    def keeps(self, name: str) -> bool:
        """Whether the call with this name is kept."""
        return self.keep is not None and (not self.keep or name in self.keep)


_DEFAULT = BlockSettings()
_settings: ContextVar[BlockSettings] = ContextVar("block_settings", default=_DEFAULT)


def settings_in_force() -> BlockSettings:
    """The settings of the enclosing `block_settings`, or else the defaults."""
    return _settings.get()


def block_settings(settings: BlockSettings) -> AbstractContextManager[None]:
    """Set the settings of `attend` calls inside the `with` block."""
    return _set(_settings, settings)


_stand_in: list[str] = []
"""Kinds of device for `as_on`."""


@contextmanager
def as_on(kind: str) -> Iterator[None]:
    """Treat every tensor inside the `with` block as one on this kind of device (`cuda`): for fake
    tensors that stand for it."""
    _stand_in.append(kind)
    try:
        yield
    finally:
        _stand_in.pop()


def device_kind(x: Tensor) -> str:
    """The kind of device that a tensor is on: `cpu` or `cuda`."""
    return _stand_in[-1] if _stand_in else "cpu" if x.device.type == "cpu" else "cuda"


def device_current(x: Tensor) -> AbstractContextManager[Any]:
    """Context for launching a kernel that is not torch's own, a library's or one of Triton, on
    tensors of one device: makes it current.

    Such a kernel goes to the current device's stream wherever its tensors are. torch's operations
    see to it themselves.
    """
    if (runtime := runtime_of(x.device)) is None:
        return nullcontext()
    manager: AbstractContextManager[Any] = runtime.device(x.device)
    return manager
