"""The optimizer's step in the backward, `optim.fused_backward`: each gradient is applied as soon as
it is complete."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ditkit_core.errors import UserError, argument
from ditkit_core.training.optim.clipping import Clipping, norm_of
from ditkit_core.training.optim.optimizer import NamedOptimizer


class OptimizerInBackward:
    """Updates each parameter of a step as soon as its gradient is complete, and frees the gradient
    at once.

    The backwards run inside its `with` block. No full set of gradients exists, except for the sums
    of several micro-batches, which the optimizer keeps (`NamedOptimizer.sum_of`); the last backward
    applies them. The price is that nothing can look at all gradients before the first update. So
    they are clipped by the norm of the last step, or each block's by its own norm, for which a
    block's gradients wait for each other. And a non-finite gradient is found after others were
    applied. It is not applied itself, nor is any that its device completes after it. The device
    decides that: AdamW has a switch for it, and updates of others are undone. The host reads the
    norms when the backward is over. Only with Adafactor it waits for each gradient, because torch's
    implementation reads norms of each parameter.

    The mechanism is torch's own, `Tensor.register_post_accumulate_grad_hook`, which torch documents
    for this purpose. The engine's hooks cannot replace it: they are called block by block, in the
    order of the carry, while a gradient is complete when the parameter's last use is done, in
    whichever blocks, embed or head that is. The hook changes no gradient, and exists only while a
    step runs. Recomputation does not call it again: gradients arrive through the graph of the
    forward. If the model is on several devices, torch calls the hooks from one thread per device,
    at the same time.

    Attributes:
        updated: Names of the parameters that were updated, in that order; if a gradient was not
            finite, `applied` says which of them.
    """

    def __init__(
        self,
        optimizer: NamedOptimizer,
        lr: float,
        *,
        readable: bool = True,
        watch: Callable[[str, Tensor], None] | None = None,
        clipping: Clipping | None = None,
        micro_batches: int = 1,
    ):
        """Prepare the updates of a step, by an optimizer created with `optim.fused_backward`.

        Args:
            readable: Whether the gradients have values; fake tensors have none.
            watch: Called with each parameter's name and gradient, before it is clipped and applied.
            clipping: How gradients are clipped; None clips nothing.
            micro_batches: Backwards of the step; with several, `begin_backward` is called before
                each.
        """
        self._optimizer, self._lr, self._readable = optimizer, lr, readable
        self._watch, self._clipping = watch, clipping or Clipping()
        self._count, self._begun = micro_batches, 0
        self._sums: dict[str, Tensor] = {}
        """Gradients of the micro-batches so far, if there are several."""
        self._norms: dict[str, Tensor] = {}
        self._found_inf: dict[torch.device, tuple[Tensor, Tensor]] = {}
        """For each device whether a gradient was not finite, as 0 or 1, and a 1."""
        self._sound = True
        self._handles: list[RemovableHandle] = []
        self._events: list[tuple[str, bool]] = []
        """Names in the order in which gradients arrived (False) and were applied (True)."""
        self._waiting: dict[int, dict[str, Tensor]] = {}
        """Gradients of a stage that wait for its other ones."""
        stages = self._clipping.stage_of.values() if self._clipping.by_stage else ()
        self._missing = {stage: sum(other == stage for other in stages) for stage in set(stages)}
        self.updated: list[str] = []

    def __enter__(self) -> Self:
        self._optimizer.backwards = (0, self._count)
        for name, parameter in self._optimizer.parameters.items():
            handle = parameter.register_post_accumulate_grad_hook(partial(self._arrived, name))
            self._handles.append(handle)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._optimizer.backwards = (0, 1)
        if error is None:
            self._apply_late()
        if error is None and self._sound:
            self._optimizer.end_step(self._lr, self.updated)

    def begin_backward(self) -> None:
        """Called before each backward; the last one of the step updates the parameters."""
        self._begun += 1
        self._optimizer.backwards = (self._begun, self._count - self._begun)

    def _arrived(self, name: str, parameter: Tensor) -> None:
        """A gradient is complete: add it to the gradients of other micro-batches, or apply it,
        unless it or one before it is not finite."""
        gradient = parameter.grad
        if gradient is None:  # autograd also comes to layers whose result nothing reads
            return
        assert name not in self._norms, name
        if self._count > 1:
            parameter.grad = None
            gradient = self._sums[name] = self._optimizer.add_gradient(
                name, gradient, first=name not in self._sums
            )
        if self._count == max(1, self._begun):
            self._complete(name, gradient)

    def _apply_late(self) -> None:
        """Apply what the last backward did not complete: it used no weight of a stage, or fewer
        than those before it."""
        late = {name: gradient for name, gradient in self._sums.items() if name not in self._norms}
        away = [
            name
            for name in (*late, *itertools.chain(*self._waiting.values()))
            if name in self._optimizer.streamed
        ]
        if away:
            raise UserError(
                f"{away[0]} is streamed ({argument('train.swap_blocks')}), and the last "
                f"micro-batch of this step used only some weights of its block; leave "
                f"{argument('train.swap_blocks')} out, or set {argument('train.accumulation')} = 1 "
                f"and {argument('train.clip_by')} = last_step"
            )
        for name, gradient in late.items():
            self._complete(name, gradient)
        for stage in list(self._waiting):
            self._apply_stage(stage)

    def _complete(self, name: str, gradient: Tensor) -> None:
        # The norm that `total_norm` computes. Before the update, because some optimizers write into
        # the gradient.
        norm = self._norms[name] = norm_of(gradient)
        device = gradient.device
        if device not in self._found_inf:
            self._found_inf.setdefault(
                device, (torch.zeros((), device=device), torch.ones((), device=device))
            )
        found_inf, one = self._found_inf[device]
        # Sets `found_inf` in one launch, if the norm is not finite; the norm times 1 is the norm.
        torch._amp_foreach_non_finite_check_and_unscale_([norm], found_inf, one)
        self._events.append((name, False))
        if self._watch is not None:
            self._watch(name, gradient)
        if not self._clipping.by_stage:
            self._apply(name, gradient, self._clipping.known_factor)
            return
        stage = self._clipping.stage_of[name]
        self._waiting.setdefault(stage, {})[name] = gradient
        self._missing[stage] -= 1
        if not self._missing[stage]:
            self._apply_stage(stage)

    def _apply_stage(self, stage: int) -> None:
        """Apply the gradients of a stage, clipped by their own norm."""
        waiting = self._waiting.pop(stage)
        names = [name for name in self._optimizer.parameters if name in waiting]
        factor = self._clipping.factor([self._norms[name] for name in names])
        for name in names:
            self._apply(name, waiting.pop(name), factor.to(self._norms[name].device))

    def _apply(self, name: str, gradient: Tensor, factor: Tensor | float | None) -> None:
        parameter = self._optimizer.parameters[name]
        found_inf = self._found_inf[gradient.device][0]
        waits = self._optimizer.waits(name)
        if waits and self._readable and float(found_inf):
            self._sound = False
        if self._sound:
            gradient_argument = None if gradient is parameter.grad else gradient
            self._optimizer.step_one(
                name,
                self._lr,
                None if waits else found_inf,
                gradient=gradient_argument,
                factor=factor,
            )
            self.updated.append(name)
            self._events.append((name, True))
        parameter.grad = None

    def norms(self) -> list[Tensor]:
        """Norm of each gradient, in the parameters' order, each on its own device."""
        return [self._norms[name] for name in self._optimizer.parameters if name in self._norms]

    def broken(self) -> list[str]:
        """Names of the parameters whose gradients have no finite norm, in the parameters' order.
        Waits for the devices."""
        return [
            name
            for name in self._optimizer.parameters
            if name in self._norms and not self._norms[name].isfinite()
        ]

    def applied(self) -> list[str]:
        """Names of the parameters that were updated although a gradient was not finite: those
        before it on its device."""
        broken, stopped, names = set(self.broken()), set[torch.device](), []
        for name, is_update in self._events:
            device = self._norms[name].device
            if is_update and device not in stopped:
                names.append(name)
            elif not is_update and name in broken:
                stopped.add(device)
        return names
