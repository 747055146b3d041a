"""Where the carry enters and leaves a block, in forward and in backward: what streams weights, or watches memory, is told of it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, autograd, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ditkit_core.engine.ac_policies import BlockRunner, Policy


@runtime_checkable
class BlockHooks(Protocol):
    """Told by the engine of every block that has parameters, by its index in `blocks()`.

    Devices run backwards side by side, each on a thread of its own, so `pre_backward` may be called for blocks of different devices at
    once; never for two of one device.
    """

    def pre_forward(self, index: int, block: nn.Module) -> None:
        """The block runs next: its weights have to be there."""
        ...

    def post_forward(self, index: int, block: nn.Module, carry: Any) -> None:
        """The block's forward was called, and made this carry."""
        ...

    def pre_backward(self, index: int, block: nn.Module) -> None:
        """The block's backward runs next, and everything that comes after the block on its device has finished its own."""
        ...


class HookedRunner:
    """Runs blocks, and tells hooks of each that has parameters."""

    def __init__(self, hooks: Sequence[BlockHooks], run: BlockRunner):
        """Take hooks for a forward.

        Args:
            hooks: Told in this order.
            run: Runs a block.
        """
        self._hooks, self._run = hooks, run

    def __call__(self, index: int, block: nn.Module, carry: Any, *, policy: Policy, device: torch.device | None) -> Any:
        hooks = self._hooks
        if not hooks or device is None:
            return self._run(index, block, carry, policy=policy, device=device)
        for hook in hooks:
            hook.pre_forward(index, block)
        after = self._run(index, block, carry, policy=policy, device=device)
        for hook in hooks:
            hook.post_forward(index, block, after)
        if not torch.is_grad_enabled():
            return after

        def backward() -> None:
            for hook in hooks:
                hook.pre_backward(index, block)

        return call_before_backward(carry, after, backward)


def call_before_backward(before: Any, after: Any, callback: Callable[[], None]) -> Any:
    """The carry that a block made, with a mark that the backward passes before it enters the block.

    Autograd runs what is ready in the reverse order of the forward, one thread to a device: when the mark is reached, nothing
    that was made after it is left to run there, and nothing of the block has run.

    Args:
        before: The carry that the block took. What it passed on unchanged is not marked.
        after: The carry that it made.
        callback: Called in the backward, once for each forward.
    """
    known = {id(leaf) for leaf in tree_leaves(before)}
    leaves, spec = tree_flatten(after)
    made = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad and id(x) not in known]
    if not made:
        return after
    for place, tensor in zip(made, _Mark.apply(callback, *(leaves[i] for i in made)), strict=True):
        leaves[place] = tensor
    return tree_unflatten(leaves, spec)


class _Mark(autograd.Function):
    """The identity, which says when its gradient comes."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.callback = callback
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.callback()
        return None, *gradients
