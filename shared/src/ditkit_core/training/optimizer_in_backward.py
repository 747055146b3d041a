"""The optimizer's step in the backward: each parameter is updated as soon as its gradient is complete, and the gradient is freed at once.

So no full set of gradients exists. The price is that nothing can look at all gradients before the first update: no clipping by
their norm, no accumulation over micro-batches, and a gradient that is not finite is found after others were applied.

The mechanism is torch's own, `Tensor.register_post_accumulate_grad_hook`, which it documents for this. It is a second way beside the
engine's passage because it answers another question: a passage is told of blocks, in the order of the carry, while a gradient is complete
when the last of the parameter's uses is done, in whatever blocks those are, in embed and head too. The hook changes no gradient, and it
exists only while a step runs. In a recompute it is not called again: the graph that the gradients arrive through is the forward's.
"""

import math
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ditkit_core.training.optimizer import NamedOptimizer


class OptimizerInBackward:
    """The updates of one step, which happen inside the `with` block, while the backward in it runs.

    With a model on several devices torch calls from a thread for each, at the same time, each for its own device's parameters.

    Attributes:
        updated: Names of the parameters that were updated, in that order.
    """

    def __init__(
        self,
        optimizer: NamedOptimizer,
        lr: float,
        *,
        readable: bool = True,
        watch: Callable[[str, Tensor], None] | None = None,
    ):
        """Prepare the updates of a step.

        Args:
            optimizer: OptimizerInBackward the parameters; made for `optim.fused_backward`.
            lr: Learning rate of this step.
            readable: Whether the gradients' values can be looked at; those of fake tensors cannot.
            watch: Called with each parameter's name and gradient, before the update.
        """
        self._optimizer, self._lr, self._readable = optimizer, lr, readable
        self._watch = watch
        self._norms: dict[str, Tensor] = {}
        self._broken: set[str] = set()
        self._sound = True
        self._handles: list[RemovableHandle] = []
        self.updated: list[str] = []

    def __enter__(self) -> Self:
        for name, parameter in self._optimizer.parameters.items():
            handle = parameter.register_post_accumulate_grad_hook(partial(self._arrived, name))
            self._handles.append(handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if error is None and self._sound:
            self._optimizer.end_step(self._lr, self.updated)

    def _arrived(self, name: str, parameter: Tensor) -> None:
        """A gradient is complete: apply it, unless it or one before it is not finite."""
        gradient = parameter.grad
        assert gradient is not None and name not in self._norms, name
        # what `total_norm` takes of it; some optimizers write into the gradient, so before the update
        wide = torch.promote_types(gradient.dtype, torch.float32)
        norm = self._norms[name] = torch._foreach_norm([gradient], dtype=wide)[0]
        if self._watch is not None:
            self._watch(name, gradient)
        # Waits for the device once for each parameter: an update that is done cannot be taken back.
        if self._readable and not math.isfinite(float(norm)):
            self._sound = False
            if not gradient.isfinite().all():
                self._broken.add(name)
        if self._sound:
            self._optimizer.step_one(name, self._lr)
            self.updated.append(name)
        parameter.grad = None

    def norms(self) -> list[Tensor]:
        """Norm of each gradient that there was, in the parameters' order, each on its own device."""
        return [self._norms[name] for name in self._optimizer.parameters if name in self._norms]

    def broken(self) -> list[str]:
        """Names of the parameters whose gradients were not finite, in the parameters' order."""
        return [name for name in self._optimizer.parameters if name in self._broken]
