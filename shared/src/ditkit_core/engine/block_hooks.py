"""Block hooks: called where the carry enters and leaves a block, in forward and backward. Block
swap, offloading and statistics use them."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, autograd, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ditkit_core.engine.ac_policies import Policy
from ditkit_core.io.step_clock import Part, StepClock


class BlockHooks(Protocol):
    """Called by the engine for every block that has parameters, with its index in `blocks()`. By
    default they do nothing.

    Backwards of several devices run at the same time, each on its own thread. So `pre_backward` may
    be called for blocks of different devices at once, but never for two blocks of one device.
    """

    def pre_forward(self, index: int, block: nn.Module) -> None:
        """Called before the block's forward: its weights must be on the device when this
        returns."""
        return

    def post_forward(self, index: int, block: nn.Module, carry: Any) -> None:
        """Called once the block's forward was launched, with the carry that it returned."""
        return

    def pre_backward(self, index: int, block: nn.Module) -> None:
        """Called before the block's backward, when the backward of everything after the block on
        its device is launched."""
        return


class _Marks(BlockHooks):
    """Marks the beginning of a part of a block's forward and of its backward."""

    def __init__(self, clock: StepClock, forward: Part, backward: Part):
        self._clock, self._forward, self._backward = clock, forward, backward

    def pre_forward(self, index: int, block: nn.Module) -> None:
        self._clock.mark(next(block.parameters()).device, self._forward)

    def pre_backward(self, index: int, block: nn.Module) -> None:
        self._clock.mark(next(block.parameters()).device, self._backward)


def timed(clock: StepClock, hooks: Sequence[BlockHooks]) -> tuple[BlockHooks, ...]:
    """Hooks between marks: what they wait for is `copies`, what follows them is the block's forward
    or backward. A clock without devices needs no marks."""
    if not clock.devices:
        return tuple(hooks)
    first = [_Marks(clock, "copies", "copies")] if hooks else []
    return (*first, *hooks, _Marks(clock, "forward", "backward"))


class BlockRunner(Protocol):
    """Runs one block under its policy: carry in, carry out."""

    def __call__(
        self,
        index: int,
        block: nn.Module,
        carry: Any,
        *,
        policy: Policy,
        device: torch.device | None,
    ) -> Any:
        """Run the block.

        Args:
            index: The block's index in `blocks()`.
            block: The block.
            carry: Its input.
            policy: What it keeps for its backward.
            device: The device of its weights; None for a block without any.

        Returns:
            The carry for the next block.
        """
        ...


class HookedRunner:
    """Runs blocks, and calls the hooks for each that has parameters."""

    def __init__(self, hooks: Sequence[BlockHooks], run: BlockRunner):
        """Call hooks, in this order, around `run`."""
        self._hooks, self._run = hooks, run

    def __call__(
        self,
        index: int,
        block: nn.Module,
        carry: Any,
        *,
        policy: Policy,
        device: torch.device | None,
    ) -> Any:
        hooks = self._hooks
        # A block without parameters has no weights to stream and keeps nothing: no hook has
        # anything to do for it.
        if not hooks or device is None:
            return self._run(index, block, carry, policy=policy, device=device)
        for hook in hooks:
            hook.pre_forward(index, block)
        after = self._run(index, block, carry, policy=policy, device=device)
        for hook in hooks:
            hook.post_forward(index, block, after)
        if not torch.is_grad_enabled():
            return after

        # The hooks hang on the carry behind the block, not on the module: a recompute calls the
        # module again, and module hooks with it.
        def backward() -> None:
            for hook in hooks:
                hook.pre_backward(index, block)

        return call_before_backward(carry, after, backward)


def call_before_backward(before: Any, after: Any, callback: Callable[[], None]) -> Any:
    """Have autograd call a function before it enters a block's backward.

    Autograd runs ready nodes in the reverse order of the forward, with one thread per device. So
    when it calls, nothing that was made after the block is left to run there, and nothing of the
    block has run.

    Args:
        before: The block's input carry.
        after: The block's output carry. Tensors that the block passed on unchanged are not marked.
        callback: Called in the backward, once for each forward.

    Returns:
        The output carry, with an identity in the graph of each new tensor.
    """
    # A tensor that was passed on keeps its identity: checkpoints and offloading recognise it by
    # that.
    input_ids = {id(leaf) for leaf in tree_leaves(before)}
    leaves, spec = tree_flatten(after)
    indices = [
        i
        for i, x in enumerate(leaves)
        if isinstance(x, Tensor) and x.requires_grad and id(x) not in input_ids
    ]
    if not indices:
        return after
    # One function of all tensors at once, so that it is reached once, when the last of their
    # gradients has arrived.
    for index, tensor in zip(
        indices, _Mark.apply(callback, *(leaves[i] for i in indices)), strict=True
    ):
        leaves[index] = tensor
    return tree_unflatten(leaves, spec)


class _Mark(autograd.Function):
    """The identity; calls back when its gradient arrives."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.callback = callback
        # A missing gradient stays None: a tensor of zeros would cost memory, and autograd would run
        # branches that nothing needs.
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.callback()
        return None, *gradients
