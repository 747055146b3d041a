"""Activation checkpointing policies: what one block keeps for its backward, and what it computes again.

A policy is a small object with one method: run a function of tensors, so that its backward finds what it needs. It is never a wrapper
around a module: `run_block` calls the block's body through it. The carry's tensors are handed to a checkpoint one by one and the carry is
rebuilt inside: checkpoints of every kind see only top-level tensor arguments, and one that they miss loses its gradient or is freed twice.

`full` is `torch.utils.checkpoint`, which stops recomputing as soon as the last saved tensor is back (torch_remat runs the block to its end:
one more large matmul per block). `attn_only` is torch_remat, which keeps what is marked where attention is called, whatever ops it is made of.
`ops` is torch's selective checkpoint, which keeps operations by their names.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
import torch_remat as remat
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ditkit_core.engine.selective_ac import SEEN_BY_HOOKS, Region, kept_ops
from ditkit_core.errors import UserError
from ditkit_core.nn.context import AttentionSettings, attention_settings, calls_in_force, scope_set
from ditkit_core.nn.remat import RecomputeDone, RecomputeScope

Body = Callable[..., tuple[Tensor, ...]]
"""A block as a function of the carry's tensors, which it takes one by one."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a block keeps; the base of all, which keeps everything."""

    offload: bool = False
    """Whether what is kept waits in host memory."""
    kind: ClassVar[str] = "none"
    recomputes: ClassVar[bool] = False
    """Whether the backward runs any of the block's forward again."""
    argument: ClassVar[str] = ""
    """What may stand in parentheses behind the kind, for help texts."""

    @property
    def kept_attention(self) -> tuple[str, ...] | None:
        """Names of the `attend` calls that an enclosing checkpoint keeps, empty for all; None keeps no region."""
        return None

    @property
    def arguments(self) -> tuple[str, ...]:
        """What stands in parentheses."""
        return ()

    def checkpoint(self, body: Body, tensors: list[Tensor], name: str) -> tuple[Tensor, ...]:
        """Run the body under the policy.

        Args:
            body: The block; may be called again in the backward, on another thread.
            tensors: What it takes.
            name: Unique among the blocks of a model, for memory reports.
        """
        return body(*tensors)

    def __str__(self) -> str:
        """As it is written in a configuration."""
        inside = f"({', '.join(self.arguments)})" if self.arguments else ""
        return f"{self.kind}{inside}{'+offload' if self.offload else ''}"


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keeps what enters the block, and computes the rest again."""

    kind: ClassVar[str] = "full"
    recomputes: ClassVar[bool] = True

    def checkpoint(self, body: Body, tensors: list[Tensor], name: str) -> tuple[Tensor, ...]:
        # preserve_rng_state would fork the CPU's generator too, which blocks on other devices share
        replayed = Replayed(body, GeneratorHook(tensors[0].device))
        made: tuple[Tensor, ...] = checkpoint(replayed, *tensors, use_reentrant=False, preserve_rng_state=False)
        return made


@dataclass(frozen=True, kw_only=True)
class AttentionOnly(Policy):
    """Keeps what attention returned besides what enters the block; nothing of attention runs again."""

    kind: ClassVar[str] = "attn_only"
    recomputes: ClassVar[bool] = True
    argument: ClassVar[str] = "names of attention, such as self"
    names: tuple[str, ...] = ()
    """Only the calls of `attend` with these names; empty keeps all."""

    @property
    def kept_attention(self) -> tuple[str, ...] | None:
        return self.names

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.names

    def checkpoint(self, body: Body, tensors: list[Tensor], name: str) -> tuple[Tensor, ...]:
        replayed = Replayed(body, GeneratorHook(tensors[0].device))
        made: tuple[Tensor, ...] = remat.checkpoint(region_name=name, recompute_state_hooks=(replayed,))(replayed)(
            *tensors
        )
        return made


@dataclass(frozen=True, kw_only=True)
class Ops(Policy):
    """Keeps what named operations returned besides what enters the block; the others run again."""

    kind: ClassVar[str] = "ops"
    recomputes: ClassVar[bool] = True
    argument: ClassVar[str] = "matmul, attention, collectives, or names such as aten.mm.default"
    names: tuple[str, ...]
    """Of `kept_ops.SETS`, or of operations."""

    def __post_init__(self) -> None:
        if self.offload and not SEEN_BY_HOOKS:
            raise ValueError(
                f"this torch, {torch.__version__}, cannot move what named operations return; update it, write attn_only+offload, or "
                "leave +offload out"
            )

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.names

    def checkpoint(self, body: Body, tensors: list[Tensor], name: str) -> tuple[Tensor, ...]:
        hook = GeneratorHook(tensors[0].device)
        replayed, region = Replayed(body, hook), Region(kept_ops(self.names), hook)
        calls = calls_in_force()
        before = 0 if calls is None else calls.made.total()
        made: tuple[Tensor, ...] = checkpoint(
            replayed, *tensors, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: region.contexts
        )
        if calls is not None and "attention" in self.names:
            self._check(calls.made.total() - before, region.num_attention, name)
        return made

    def _check(self, made: int, kept: int, name: str) -> None:
        if made > kept:
            raise UserError(
                f"train.checkpointing: {self} keeps {kept} of the {made} attention calls of {name}: the others are not one operation "
                "(dropout, the math kernel, flex, kernels in Python); use attn_only, which keeps every one"
            )


@dataclass(frozen=True)
class GeneratorHook:
    """The generator that a block draws from: that of its own device and no other, for devices run backwards side by side."""

    device: torch.device

    def snapshot(self) -> Tensor:
        """The generator's state."""
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def restore(self, state: Tensor) -> None:
        """Put a snapshot back."""
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)


_REPLAYS: dict[str, Any] = {}
"""One for each generator. A recompute owns its generator until it is done: two backwards at once, from two threads, would draw
from each other's."""


class Replayed:
    """A block's body that draws, whenever it is run again, what it drew the first time, and then leaves the generator as it was.

    It is also torch_remat's hook: asked around a region that is kept, so that what comes after a region that is skipped draws the same.
    """

    def __init__(self, body: Body, hook: GeneratorHook):
        self._body, self._hook = body, hook
        self._at_entry: Tensor | None = None
        self._running = False

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self._at_entry is None:
            self._at_entry = self._hook.snapshot()
            return self._run(tensors)
        with _REPLAYS.setdefault(generator_of(self._hook.device), threading.RLock()):
            outside = self._hook.snapshot()
            self._hook.restore(self._at_entry)
            try:
                return self._run(tensors)
            finally:
                self._hook.restore(outside)

    def _run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self._running = True
        try:
            return self._body(*tensors)
        finally:
            self._running = False

    def snapshot(self) -> Tensor | None:
        """The generator's state; None outside of the body, where nobody owns the generator."""
        return self._hook.snapshot() if self._running else None

    def restore(self, state: Tensor | None) -> None:
        """Put a snapshot back."""
        if state is not None:
            self._hook.restore(state)


def generator_of(device: torch.device) -> str:
    """Name of the generator that a device draws from."""
    return str(device) if device.type == "cuda" else "cpu"


class BlockRunner(Protocol):
    """Runs one block under its policy: carry in, carry out."""

    def __call__(self, index: int, block: nn.Module, carry: Any, *, policy: Policy, device: torch.device | None) -> Any:
        """Run the block.

        Args:
            index: Its place in `blocks()`.
            block: The block.
            carry: What it takes.
            policy: What it keeps for its backward.
            device: Where its weights are; None for a block without any.
        """
        ...


@dataclass(frozen=True)
class EagerRunner:
    """Runs a block operation by operation."""

    attention: str
    """The attention backend."""

    def __call__(self, index: int, block: nn.Module, carry: Any, *, policy: Policy, device: torch.device | None) -> Any:
        return run_block(block, carry, policy=policy, backend=self.attention, name=f"block {index}")


def run_block(block: nn.Module, carry: Any, *, policy: Policy, backend: str = "sdpa", name: str) -> Any:
    """Run one block under a policy: carry in, carry out.

    A block without parameters (two streams become one) is run as it is: it has nothing worth repeating, and a checkpoint would hold its
    inputs, which by then nobody else does.

    Args:
        name: Names the checkpoint in memory reports; unique among the blocks of a model.
    """
    if not policy.recomputes or not torch.is_grad_enabled() or next(block.parameters(), None) is None:
        with attention_settings(AttentionSettings(backend=backend)):
            return block(carry)
    calls = calls_in_force()
    if calls is not None and policy.kept_attention is not None:
        calls.want(policy.kept_attention, str(policy))
    settings = AttentionSettings(backend=backend, keep=policy.kept_attention, calls=calls)
    again = replace(settings, recomputing=True)
    leaves, spec = tree_flatten(carry)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    outline = [_static(leaf) for leaf in leaves]  # the body outlives the forward
    scope = RecomputeScope(torch._C._autograd._top_saved_tensors_default_hooks(True))
    outcome: Any = None

    def body(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal outcome
        given = iter(tensors)
        inner = tree_unflatten([next(given) if leaf is _MADE else leaf for leaf in outline], spec)
        # Settings are made inside the body: autograd recomputes on threads of its own, which do not see what was set around
        # the forward.
        if outcome is None:
            with attention_settings(settings), scope_set(scope), scope:
                after, after_spec = tree_flatten(block(inner))
            # What the block passed on unchanged keeps its identity and does not cross the checkpoint.
            position = {id(tensor): index for index, tensor in enumerate(tensors)}
            statics = [_Given(position[id(x)]) if id(x) in position else _static(x) for x in after]
            results = [x for x, static in zip(after, statics, strict=True) if static is _MADE]
            scope.hold(results)
            outcome = after_spec, statics, [(x.dtype, x.requires_grad) for x in results]
        else:
            try:
                with attention_settings(again), scope_set(scope):
                    after, _ = tree_flatten(block(inner))
            except RecomputeDone:
                # Nobody reads them: the checkpoint asks for results of the same kinds as in the forward.
                return tuple(
                    tensors[0].new_empty(0, dtype=dtype).requires_grad_(requires_grad)
                    for dtype, requires_grad in outcome[2]
                )
        # As in the forward, whatever has its identity now: hooks on the block (FSDP2's) may differ in the recompute.
        return tuple(leaf for leaf, static in zip(after, outcome[1], strict=True) if static is _MADE)

    made = iter(policy.checkpoint(body, tensors, name))
    after_spec, after, _ = outcome
    rebuilt = [tensors[x.index] if isinstance(x, _Given) else next(made) if x is _MADE else x for x in after]
    return tree_unflatten(rebuilt, after_spec)


@dataclass(frozen=True)
class _Given:
    """A carry tensor that a block passed on: its position among the block's inputs."""

    index: int


_MADE = object()


def _static(leaf: Any) -> Any:
    """A leaf without its tensor: the outcome outlives the forward and must hold no memory."""
    return _MADE if isinstance(leaf, Tensor) else leaf
