"""Keeps the results of named operations: the contexts of torch's selective checkpoint for `ops(...)`.

An operation is recognised by its full name below autograd (`aten.mm.default`). So this works for what torch runs as one operation:
attention that is made of several, with dropout or in the math kernel, is not kept. `attn_only` keeps it, because it marks the call.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ditkit_core.engine.generator_state import GeneratorHook
from ditkit_core.engine.op_names import SETS, kept_results_reach_hooks
from ditkit_core.errors import UserError


class Decision(NamedTuple):
    """What to do with an operation."""

    keep: bool
    is_attention: bool
    samples: bool
    """Whether it may sample random numbers. If it is kept, the generator has to be advanced as if it had run again."""
    dropout: int | None
    """Index of its argument with a dropout probability; the operation runs again if that is above 0."""


class KeptOps:
    """Which operations are kept. The decision on each operation is made once, because it is needed at every call."""

    def __init__(self, names: tuple[str, ...]):
        self._named = frozenset(names) - SETS.keys()
        self._kept_names = self._named.union(*(SETS[name] for name in names if name in SETS))
        # By identity, because not every operation can be hashed. The operation is stored as well, so that its identity is not reused.
        self._decisions: dict[int, tuple[Any, Decision]] = {}
        self.may_sample = any(_may_sample(name) for name in self._named)
        """Whether an operation that is named itself may sample random numbers."""

    def decision(self, op: Any) -> Decision:
        """What to do with an operation."""
        entry = self._decisions.get(id(op))
        if entry is None:
            entry = self._decisions[id(op)] = op, self._decide(op)
        return entry[1]

    def keeps(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the result of a call is kept."""
        decision = self.decision(op)
        return decision.keep and not (decision.dropout is not None and _has_dropout(decision.dropout, args, kwargs))

    def _decide(self, op: Any) -> Decision:
        name = str(op)
        named = name in self._named
        # Dropout inside a set's attention is found by its argument; an operation that is named itself is kept as the user asked.
        arguments = op._schema.arguments if isinstance(op, torch._ops.OpOverload) and not named else ()
        indices = (index for index, argument in enumerate(arguments) if argument.name in ("dropout_p", "p_dropout"))
        return Decision(
            name in self._kept_names, name in SETS["attention"], named and _may_sample(name), next(indices, None)
        )


def _may_sample(name: str) -> bool:
    """Whether an operation may sample random numbers. torch tags its own operations; operations of libraries may lack the tag."""
    namespace, *rest = name.split(".")
    entry: Any = getattr(torch.ops, namespace)
    for part in rest:
        entry = getattr(entry, part)
    return torch.Tag.nondeterministic_seeded in entry.tags or namespace not in ("aten", "prims", "_c10d_functional")


kept_ops = lru_cache(maxsize=64)(KeptOps)
"""(names) to the operations to keep; the same object for the same names."""


class Region:
    """One run of a block, and the results that are kept of it until its backward."""

    def __init__(self, ops: KeptOps, generator: GeneratorHook):
        self.num_attention = 0
        """Number of attention calls that are kept."""
        self._ops = ops
        states: list[Any] = []
        forward, recompute = ([mode] for mode in create_selective_checkpoint_contexts(self._policy))
        if kept_results_reach_hooks():
            # `checkpoint` sets this from its argument of the same name, but only on torch's own context, and ours is a wrapper.
            forward[0].respect_saved_tensors_hooks = True
        if ops.may_sample:
            forward.append(_Aligned(ops, lambda: states.append(generator.snapshot())))
            recompute.append(_Aligned(ops, lambda: generator.restore(states.pop(0))))
        self.contexts = _Modes(forward), _Modes(recompute)
        """The contexts for the forward and for the recompute."""

    def _policy(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not self._ops.keeps(op, args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        # Only in the forward: the recompute asks again about the same calls.
        if self._ops.decision(op).is_attention and not context.is_recompute:
            self.num_attention += 1
        return CheckpointPolicy.MUST_SAVE


def _has_dropout(index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call samples a dropout mask. It then runs again, so that random numbers after it are the same."""
    rate = args[index] if index < len(args) else kwargs.get("dropout_p", kwargs.get("p_dropout", 0.0))
    return rate > 0


class _Aligned(TorchDispatchMode):
    """Records the generator's state after each kept operation that may sample, and restores it where the recompute skips the operation."""

    supports_higher_order_operators = True

    def __init__(self, ops: KeptOps, after: Callable[[], None]):
        super().__init__()
        self._ops, self._after = ops, after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._ops.decision(func).samples:
            self._after()
        return out


class _Modes(AbstractContextManager[None]):
    """Modes that are entered the first time only.

    Kept results are handed out once: a second backward of the same graph finds none and recomputes the complete block.
    """

    def __init__(self, modes: Sequence[AbstractContextManager[Any]]):
        self._modes = modes
        self._running = ExitStack()

    def __enter__(self) -> None:
        modes, self._modes = self._modes, ()
        for mode in modes:
            self._running.enter_context(mode)

    def __exit__(self, *exception: object) -> None:
        self._running.close()
        error = exception[1]
        if isinstance(error, RuntimeError) and (reason := _explained(str(error))):
            raise UserError(reason) from error


def _explained(message: str) -> str | None:
    """A one-line explanation of an error of torch's selective checkpoint; None for any other error."""
    # By its words: torch raises a plain RuntimeError for both.
    if "cached during selective activation checkpoint has been mutated" in message:
        return (
            "train.checkpointing: an operation named in ops(...) returned a tensor that the block then overwrote, so it cannot be "
            "kept; name fewer operations, or use attn_only"
        )
    if "encountered during backward" in message and "not found in storage" in message:
        return "train.checkpointing: under ops(...) a block ran other operations in its recompute than in its forward; use attn_only or full"
    return None
