"""Keeping what named operations return: the sets that `ops(...)` takes, and the contexts of torch's selective checkpoint.

An operation is recognised by the full name it has below autograd (`aten.mm.default`), so this holds for what torch runs as one operation:
attention made of several, with dropout or in the math kernel, is not kept. `attn_only` keeps it, being marked where it is called.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ditkit_core.errors import UserError

_ATTENTION = (
    *(f"aten._scaled_dot_product_{kernel}.default" for kernel in (
        "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu", "fused_attention_overrideable",
    )),
    "aten._flash_attention_forward.default", "aten._efficient_attention_forward.default", "aten._cudnn_attention_forward.default",
    "torch_attn._varlen_attn.default", "flash_attn._flash_attn_forward.default", "flash_attn._flash_attn_varlen_forward.default",
    "flash_attn_3.fwd.default",
)  # fmt: skip
_COLLECTIVES = (
    "all_reduce", "all_reduce_coalesced", "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced", "all_to_all_single", "broadcast", "wait_tensor",
)  # fmt: skip

SETS: dict[str, frozenset[str]] = {
    "matmul": frozenset(
        f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_int_mm")
    ),
    "attention": frozenset(_ATTENTION),
    "collectives": frozenset(f"_c10d_functional.{name}.default" for name in _COLLECTIVES),
}
"""Operations by the word for a set of them. Forwards alone; what writes into a tensor it is given, as collectives in place and
`mm.out` do, cannot be kept and runs again."""


SEEN_BY_HOOKS = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
"""Whether this torch can hand what it keeps for named operations to hooks on saved tensors, which is how it is offloaded."""


def check_names(names: tuple[str, ...]) -> None:
    """Refuse names that are no set and no operation that can be kept.

    Raises:
        ValueError: Saying what could stand there.
    """
    if not names:
        raise ValueError(f"ops takes names: {', '.join(SETS)}, or of operations, such as aten.mm.default")
    for name in names:
        if name not in SETS:
            _check_operation(name)


def _check_operation(name: str) -> None:
    found: Any = torch.ops
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except (AttributeError, RuntimeError):
            raise ValueError(f"ops knows no {name!r}; {_meant(name)}") from None
    match found:
        case torch._ops.OpOverloadPacket():
            overloads = {overload: getattr(found, overload) for overload in found.overloads()}
            kept = [f"{name}.{overload}" for overload, op in overloads.items() if not op._schema.is_mutable]
            meant = " or ".join(kept[:3]) or "another"
            raise ValueError(f"{name!r} is several operations and matches none; write {meant}")
        case torch._ops.OpOverload():
            pass
        case _:
            raise ValueError(f"ops knows no {name!r}; {_meant(name)}")
    if found._schema.is_mutable:
        raise ValueError(f"{name!r} writes into a tensor that it is given, and what it returns cannot be kept")


def _meant(name: str) -> str:
    namespace = name.split(".")[0]
    known = [n.replace("::", ".") for n in torch._C._dispatch_get_all_op_names() if n.startswith(f"{namespace}::")]
    full = [n if n.count(".") > 1 else f"{n}.default" for n in known]
    near = difflib.get_close_matches(name, [*SETS, *full], n=1)
    return f"did you mean {near[0]}?" if near else f"choose of {', '.join(SETS)}, or name one as aten.mm.default"


class Decision(NamedTuple):
    """What is done with an operation."""

    keep: bool
    is_attention: bool
    draws: bool
    """Whether it may draw random numbers: kept, what is drawn after it has to be kept aligned."""
    dropout: int | None
    """Place of the argument whose value, a probability of dropout, has it run again."""


class KeptOps:
    """Which operations are kept; an operation's name is looked at once, whether it can be hashed or not."""

    def __init__(self, names: tuple[str, ...]):
        self._named = frozenset(names) - SETS.keys()
        self._kept = self._named.union(*(SETS[name] for name in names if name in SETS))
        # By identity, beside the operation itself, so that the identity stays its own.
        self._decisions: dict[int, tuple[Any, Decision]] = {}
        self.may_draw = any(_may_draw(name) for name in self._named)
        """Whether one that is named itself may draw random numbers."""

    def decision(self, op: Any) -> Decision:
        """What is done with an operation."""
        found = self._decisions.get(id(op))
        if found is None:
            found = self._decisions[id(op)] = op, self._decide(op)
        return found[1]

    def keeps(self, op: Any, args: Sequence[Any], given: Mapping[str, Any]) -> bool:
        """Whether what a call of an operation returns is kept."""
        decision = self.decision(op)
        return decision.keep and not (decision.dropout is not None and _drops(decision.dropout, args, given))

    def _decide(self, op: Any) -> Decision:
        name = str(op)
        named = name in self._named
        arguments = op._schema.arguments if isinstance(op, torch._ops.OpOverload) and not named else ()
        places = (place for place, argument in enumerate(arguments) if argument.name in ("dropout_p", "p_dropout"))
        return Decision(name in self._kept, name in SETS["attention"], named and _may_draw(name), next(places, None))


def _may_draw(name: str) -> bool:
    """Whether an operation may draw: torch's say it of themselves, a library's may forget to."""
    namespace, *rest = name.split(".")
    found: Any = getattr(torch.ops, namespace)
    for part in rest:
        found = getattr(found, part)
    return torch.Tag.nondeterministic_seeded in found.tags or namespace not in ("aten", "prims", "_c10d_functional")


kept_ops = lru_cache(maxsize=64)(KeptOps)
"""(names) to the operations, the same object for the same names."""


class Generator(Protocol):
    """What a block draws from."""

    def snapshot(self) -> Any:
        """Its state."""

    def restore(self, state: Any) -> None:
        """Put a state back."""


class Region:
    """One run of a block, and what is kept of it until its backward."""

    def __init__(self, ops: KeptOps, generator: Generator):
        self.num_attention = 0
        """Attention calls that are kept."""
        self._ops = ops
        states: list[Any] = []
        forward, recompute = ([mode] for mode in create_selective_checkpoint_contexts(self._policy))
        if SEEN_BY_HOOKS:
            # As `checkpoint` does with its argument of this name, if the context that it is given is torch's own: ours holds it.
            forward[0].respect_saved_tensors_hooks = True
        if ops.may_draw:
            forward.append(_Aligned(ops, lambda: states.append(generator.snapshot())))
            recompute.append(_Aligned(ops, lambda: generator.restore(states.pop(0))))
        self.contexts = _Modes(forward), _Modes(recompute)
        """In force in the forward, and in every recompute."""

    def _policy(self, context: Any, op: Any, *args: Any, **given: Any) -> CheckpointPolicy:
        if not self._ops.keeps(op, args, given):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if self._ops.decision(op).is_attention and not context.is_recompute:
            self.num_attention += 1
        return CheckpointPolicy.MUST_SAVE


def _drops(place: int, args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    """Whether an operation of a set draws a mask: it is run again, for what is drawn after it."""
    rate = args[place] if place < len(args) else given.get("dropout_p", given.get("p_dropout", 0.0))
    return rate > 0


class _Aligned(TorchDispatchMode):
    """Notes the generator's state after a kept operation that may have drawn, and puts it there where the operation is not run."""

    supports_higher_order_operators = True

    def __init__(self, ops: KeptOps, after: Callable[[], None]):
        super().__init__()
        self._ops, self._after = ops, after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._ops.decision(func).draws:
            self._after()
        return out


class _Modes(AbstractContextManager[None]):
    """What is in force in a forward, or in a recompute, the first time.

    What was kept is handed out once: a second backward of the same graph finds nothing any more and computes the block whole.
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
    """What torch's selective checkpoint complains of, in one line; None for what is no complaint of its."""
    if "cached during selective activation checkpoint has been mutated" in message:
        return (
            "train.checkpointing: an operation named in ops(...) returned a tensor that the block then overwrote, so that it cannot be "
            "kept; name fewer operations, or use attn_only"
        )
    if "encountered during backward" in message and "not found in storage" in message:
        return "train.checkpointing: under ops(...) a block ran other operations in its recompute than in its forward; use attn_only or full"
    return None
