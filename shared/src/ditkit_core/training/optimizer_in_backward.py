"""The optimizer's step in the backward: each parameter is updated as soon as its gradient is complete, and the gradient is freed at once.

So no full set of gradients exists. The price is that nothing can look at all gradients before the first update: no clipping by
their norm, no accumulation over micro-batches, and a non-finite gradient is found after others were applied.

The mechanism is torch's own, `Tensor.register_post_accumulate_grad_hook`, which torch documents for this purpose. The engine's hooks
cannot replace it: they are called block by block, in the order of the carry, while a gradient is complete when the parameter's last use
is done, in whichever blocks, embed or head that is. The hook changes no gradient, and exists only while a step runs. Recomputation does
not call it again: gradients arrive through the graph of the forward.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ditkit_core.training.optimizer import NamedOptimizer


class OptimizerInBackward:
    """Updates the parameters of one step inside its `with` block, while the backward runs there.

    If the model is on several devices, torch calls the hooks from one thread per device, at the same time.

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
        """Prepare the updates of a step, by an optimizer created with `optim.fused_backward`.

        Args:
            readable: Whether the gradients have values; fake tensors have none.
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

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for handle in self._handles:
            handle.remove()
        if error is None and self._sound:
            self._optimizer.end_step(self._lr, self.updated)

    def _arrived(self, name: str, parameter: Tensor) -> None:
        """A gradient is complete: apply it, unless it or one before it is not finite."""
        gradient = parameter.grad
        assert gradient is not None and name not in self._norms, name
        # The norm that `total_norm` computes. Before the update, because some optimizers write into the gradient.
        wide = torch.promote_types(gradient.dtype, torch.float32)
        norm = self._norms[name] = torch._foreach_norm([gradient], dtype=wide)[0]
        if self._watch is not None:
            self._watch(name, gradient)
        # Waits for the device once per parameter, because an update cannot be undone.
        if self._readable and not math.isfinite(float(norm)):
            self._sound = False
            if not gradient.isfinite().all():
                self._broken.add(name)
        if self._sound:
            self._optimizer.step_one(name, self._lr)
            self.updated.append(name)
        parameter.grad = None

    def norms(self) -> list[Tensor]:
        """Norm of each gradient, in the parameters' order, each on its own device."""
        return [self._norms[name] for name in self._optimizer.parameters if name in self._norms]

    def broken(self) -> list[str]:
        """Names of the parameters whose gradients were not finite, in the parameters' order."""
        return [name for name in self._optimizer.parameters if name in self._broken]
