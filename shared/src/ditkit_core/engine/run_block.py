"""Runs one block under a policy: carry in, carry out.

A checkpoint gets the carry's tensors one by one, and the carry is rebuilt inside. Checkpoints of
every kind see only top-level tensor arguments: a tensor that they miss loses its gradient or is
freed twice.

`full` is `torch.utils.checkpoint`, which stops recomputing as soon as the last saved tensor is
back. (torch_remat runs the block to its end, which is one more large matmul per block.) `attn_only`
is torch_remat, which keeps the calls of `attend`, whatever ops they are made of.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch_remat as remat
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ditkit_core.engine.ac_policies import AttentionOnly, Full, Policy
from ditkit_core.engine.generator_state import GeneratorHook
from ditkit_core.io.step_clock import StepClock
from ditkit_core.nn.context import BlockSettings, block_settings, calls_in_force, scope_set
from ditkit_core.nn.remat import RecomputeDone, RecomputeScope

Body = Callable[..., tuple[Tensor, ...]]
"""A block as a function of the carry's tensors, which it takes one by one. The backward may call it
again, on another thread."""


def keeping_nothing(
    policy: Policy, body: Body, tensors: list[Tensor], name: str
) -> tuple[Tensor, ...]:
    """Run a body that is recomputed as a whole."""
    # No preserve_rng_state: it would fork the CPU's generator too, which blocks on other devices
    # share. `Replayed` restores the one generator that the block uses.
    replayed = Replayed(body, GeneratorHook(tensors[0].device))
    outputs: tuple[Tensor, ...] = checkpoint(
        replayed, *tensors, use_reentrant=False, preserve_rng_state=False
    )
    return outputs


def keeping_attention(
    policy: Policy, body: Body, tensors: list[Tensor], name: str
) -> tuple[Tensor, ...]:
    """Run a body that is recomputed without its attention."""
    replayed = Replayed(body, GeneratorHook(tensors[0].device))
    # A kept region does not run again, so it consumes no random numbers in the recompute.
    # torch_remat calls the hook's snapshot and restore around it, so that dropout behind the region
    # samples the same mask again.
    outputs: tuple[Tensor, ...] = remat.checkpoint(
        region_name=name, recompute_state_hooks=(replayed,)
    )(replayed)(*tensors)
    return outputs


CHECKPOINTS: dict[type[Policy], Callable[[Policy, Body, list[Tensor], str], tuple[Tensor, ...]]] = {
    Full: keeping_nothing,
    AttentionOnly: keeping_attention,
}
"""How a body is run by the type of a policy that recomputes: (policy, body, the block's inputs, a
name for memory reports) to its results."""


_REPLAY_LOCKS: dict[str, Any] = {}
"""A lock for each generator. A recompute owns its generator until it is done: two backwards in two
threads would otherwise consume each other's random numbers. Locks are re-entrant, because a
recompute may run a checkpoint of its own."""


class Replayed:
    """A block's body that samples the same random numbers in every run, and leaves the generator as
    it was after each recompute.

    It is also torch_remat's hook around a kept region: a recompute skips the region, and what comes
    after it must sample the same.
    """

    def __init__(self, body: Body, hook: GeneratorHook):
        self._body, self._hook = body, hook
        self._at_entry: Any = None
        self._running = False

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self._at_entry is None:
            self._at_entry = self._hook.snapshot()
            return self._run(tensors)
        with _REPLAY_LOCKS.setdefault(self._hook.generator, threading.RLock()):
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

    def snapshot(self) -> Any:
        """The generator's state; None outside of the body, where this object does not own the
        generator."""
        return self._hook.snapshot() if self._running else None

    def restore(self, state: Any) -> None:
        """Put a snapshot back."""
        if state is not None:
            self._hook.restore(state)


@dataclass(frozen=True)
class EagerRunner:
    """Runs a block operation by operation."""

    settings: BlockSettings
    clock: StepClock = field(default_factory=StepClock, compare=False)
    """Times recomputes."""

    def __call__(
        self,
        index: int,
        block: nn.Module,
        carry: Any,
        *,
        policy: Policy,
        device: torch.device | None,
    ) -> Any:
        return run_block(
            block,
            carry,
            policy=policy,
            settings=self.settings,
            name=f"block {index}",
            clock=self.clock,
        )


def run_block(
    block: nn.Module,
    carry: Any,
    *,
    policy: Policy,
    settings: BlockSettings | None = None,
    name: str,
    clock: StepClock | None = None,
) -> Any:
    """Run one block under a policy: carry in, carry out.

    A block without parameters (two streams become one) runs without a checkpoint: it has nothing
    worth recomputing, and a checkpoint would keep its inputs alive, which nothing else does by
    then.

    Args:
        carry: A NamedTuple, or any other pytree with tensors.
        settings: How attention and elementwise work run; None for the defaults.
        name: Names the checkpoint in memory reports; unique among the blocks of a model.
        clock: Times the recompute; None for nobody.

    Returns:
        The block's carry. Tensors that the block passed on unchanged keep their identity.
    """
    settings = settings or BlockSettings()
    if (
        not policy.recomputes
        or not torch.is_grad_enabled()
        or next(block.parameters(), None) is None
    ):
        with block_settings(settings):
            return block(carry)
    calls = calls_in_force()
    if calls is not None and policy.kept_attention is not None:
        calls.want(policy.kept_attention, str(policy))
    leaves, spec = tree_flatten(carry)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    settings = replace(settings, keep=policy.kept_attention, calls=calls)
    body = _BlockBody(
        block, settings, [_static(leaf) for leaf in leaves], spec, clock or StepClock()
    )
    outputs = iter(CHECKPOINTS[type(policy)](policy, body, tensors, name))
    rebuilt = [
        tensors[x.index] if isinstance(x, _Given) else next(outputs) if x is _MADE else x
        for x in body.after
    ]
    return tree_unflatten(rebuilt, body.after_spec)


class _BlockBody:
    """A block as a function of the carry's tensors, called in the forward and again in the
    recompute.

    It outlives the forward, and a tensor that it refers to would stay in memory until the backward,
    next to the one that the checkpoint keeps. So it has the carry without its tensors.

    Attributes:
        after: The leaves of the block's output carry, with markers in place of tensors.
    """

    def __init__(
        self,
        block: nn.Module,
        settings: BlockSettings,
        outline: Sequence[Any],
        spec: TreeSpec,
        clock: StepClock,
    ):
        self._clock = clock
        self._block, self._settings, self._outline, self._spec = block, settings, outline, spec
        # The hooks below the checkpoint's own: they may offload a result, and `RecomputeScope` has
        # to pass results through them itself.
        self._scope = RecomputeScope(torch._C._autograd._top_saved_tensors_default_hooks(True))
        self._results: list[tuple[torch.dtype, bool]] | None = None
        self.after: list[Any] = []

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = iter(tensors)
        inner = tree_unflatten(
            [next(inputs) if leaf is _MADE else leaf for leaf in self._outline], self._spec
        )
        if self._results is None:
            after: list[Any] | None = self._forward(inner, tensors)
        else:
            with self._clock.recompute(tensors[0].device):
                after = self._recompute(inner)
        if after is None:
            # Nobody reads the results: the checkpoint only wants as many as in the forward, with
            # the same dtypes.
            kinds = self._results or ()
            return tuple(
                tensors[0].new_empty(0, dtype=dtype).requires_grad_(grad) for dtype, grad in kinds
            )
        # The same positions as in the forward, whatever keeps its identity now: hooks on the block
        # (FSDP2's) may differ in the recompute.
        return tuple(
            leaf for leaf, static in zip(after, self.after, strict=True) if static is _MADE
        )

    def _forward(self, inner: Any, tensors: Sequence[Tensor]) -> list[Any]:
        # The settings are entered inside the body: autograd recomputes on threads of its own, which
        # do not see a setting that was made around the forward.
        with block_settings(self._settings), scope_set(self._scope), self._scope:
            after, self.after_spec = tree_flatten(self._block(inner))
        # Tensors that the block passed on unchanged keep their identity and do not cross the
        # checkpoint: as results of it they would be new tensors, and offloading could not tell that
        # the carry still has them.
        position = {id(tensor): index for index, tensor in enumerate(tensors)}
        self.after = [_Given(position[id(x)]) if id(x) in position else _static(x) for x in after]
        results = [x for x, static in zip(after, self.after, strict=True) if static is _MADE]
        self._scope.keep_results(results)
        self._results = [(x.dtype, x.requires_grad) for x in results]
        return after

    def _recompute(self, inner: Any) -> list[Any] | None:
        """The leaves again; None where the recompute was left at its declared end."""
        try:
            with block_settings(replace(self._settings, recomputing=True)), scope_set(self._scope):
                return tree_flatten(self._block(inner))[0]
        except RecomputeDone:
            return None


@dataclass(frozen=True)
class _Given:
    """A carry tensor that a block passed on: its position among the block's inputs."""

    index: int


_MADE = object()


def _static(leaf: Any) -> Any:
    """A leaf, or a marker in place of a tensor: what is stored outlives the forward and must keep
    no tensor alive."""
    return _MADE if isinstance(leaf, Tensor) else leaf
