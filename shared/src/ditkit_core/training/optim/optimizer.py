"""The optimizer of a run over named parameters, its step in the backward, and the learning-rate
schedule."""

import math
import threading
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core.adapters.inject import is_adapter_name, module_of
from ditkit_core.config.layer_patterns import check_used
from ditkit_core.errors import UserError, argument
from ditkit_core.io.rng import seed_of
from ditkit_core.nn.kernels.launch import kernels_on
from ditkit_core.nn.parameters import swapped
from ditkit_core.nn.stochastic_rounding import joined, write_split, write_stochastic
from ditkit_core.training.optim.optimizer_state import export_state, import_state
from ditkit_core.training.optim.optimizers import OPTIMIZERS, OptimConfig, OptimizerKind

_REST = "rounding_rest"
"""Entry of a parameter's state: the bits that `split` keeps."""
_SUM = "gradient_sum"
"""Entry of the sum of a parameter's gradients."""


def learning_rate(step: int, config: OptimConfig, total_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0: a function of the step, with no state
    to save."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(
        1.0, (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps)
    )
    remaining = (
        (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    )
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * remaining)


@dataclass(frozen=True)
class _Single:
    """The optimizer of one parameter alone."""

    optimizer: torch.optim.Optimizer
    part: torch.optim.Optimizer
    """The optimizer that has this parameter among others; its state is saved."""
    group: int
    """Index of its parameter group in `part`."""
    kind: OptimizerKind
    guard: AbstractContextManager[Any]
    """Entered around each update."""


def check_rates(config: OptimConfig, layers: Collection[str]) -> None:
    """Refuse patterns of learning rates that fit none of the trained layers."""
    check_used("optim.lr_pattern", config.rates, layers)


def _set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        rate = lr * group["lr_factor"]
        # torchao compiles its step and takes the rate as a tensor
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class NamedOptimizer:
    """The optimizer of a run: one torch optimizer, or Muon together with AdamW, over named
    parameters."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimConfig,
        *,
        matrices: Collection[str] = (),
        accumulation: torch.dtype | None = None,
        elements: Mapping[str, tuple[int, int]] | None = None,
        kernels: str = "torch",
    ):
        """Build it.

        Args:
            parameters: The trained parameters by name; the saved state uses these names.
            matrices: Names of the weight matrices in the blocks, for Muon.
            accumulation: Dtype in which gradients are summed over micro-batches; None: the
                parameters' dtype, or fp32 if wider.
            elements: Of parameters that are parts of others: the place of their first element, and
                the number of elements of the whole.
            kernels: Implementation of the rounding of bf16 weights, as `train.kernels` has it.
        """
        self.parameters = dict(parameters)
        self.fused_backward = config.fused_backward
        self._kernels = kernels
        self._rounding = config.rounding
        self._rounding_at: tuple[int, int] = (0, 0)
        self._elements = elements or {}
        self._proxies = {
            name: self._stand_in(parameter, config) for name, parameter in self.parameters.items()
        }
        # With `fused_backward` torch sums nothing: each gradient is applied, or added to `sum_of`,
        # as soon as it is complete.
        self._accumulation = None if config.fused_backward else accumulation
        self._sum_dtype = accumulation
        self.streamed: Collection[str] = ()
        """Names of the parameters whose state and sums of gradients are streamed with their
        weights, which keeps them between steps."""
        self.backwards: tuple[int, int] = (0, 1)
        """With `fused_backward`: backwards of the step that have begun, and that have not; the last
        one updates."""
        self._sums: dict[str, dict[str, Tensor]] = {name: {} for name in self.parameters}
        self._expect_gradients()
        self._rounds = any(
            self._proxies[name] is not parameter for name, parameter in self.parameters.items()
        )
        self._kinds: list[OptimizerKind] = []
        self.parts: list[torch.optim.Optimizer] = []
        self._singles: dict[str, _Single] = {}
        self._counted_on_host: set[str] = set()
        self._factors: dict[str, float] = {}
        rest = self.parameters
        if config.kind.rest:
            if not matrices:
                raise UserError(
                    f"{argument('optim.name')} = {config.name} is for a full fine-tune; with an "
                    f"adapter use adamw or adamw8bit"
                )
            self._add(config.name, {name: self.parameters[name] for name in matrices}, config)
            rest = {
                name: parameter
                for name, parameter in self.parameters.items()
                if name not in set(matrices)
            }
        if rest:
            self._add(config.kind.rest or config.name, rest, config)

    @staticmethod
    def _stand_in(parameter: nn.Parameter, config: OptimConfig) -> nn.Parameter:
        """The parameter that torch's optimizers see: the parameter itself, or for bf16 a stand-in
        with its values in fp32 during its update.

        Gradients of bf16 parameters are also summed over micro-batches, and clipped, in fp32.
        """
        if parameter.dtype != torch.bfloat16 or not config.kind.one_by_one:
            return parameter
        if not config.fused_backward:
            parameter.grad_dtype = torch.float32
        return nn.Parameter(
            torch.empty((0,) * parameter.ndim, dtype=torch.float32, device=parameter.device)
        )

    def _add(self, name: str, parameters: Mapping[str, nn.Parameter], config: OptimConfig) -> None:
        parameters = {one: self._proxies[one] for one in parameters}
        chosen: dict[tuple[bool, float], list[nn.Parameter]] = {}
        for one, parameter in parameters.items():
            # As peft's `create_loraplus_optimizer`: B, and vectors, which in an adapter are DoRA's
            # magnitudes.
            is_up = is_adapter_name(one) and (".lora_B." in one or parameter.ndim == 1)
            label, factor = config.rate_of(module_of(one), is_up=is_up)
            chosen.setdefault((parameter.ndim <= 1, factor), []).append(parameter)
            if label:
                self._factors[label] = factor
        groups = [
            {
                "params": params,
                "weight_decay": 0.0 if is_flat else config.weight_decay,
                "lr_factor": factor,
            }
            for (is_flat, factor), params in sorted(chosen.items(), key=lambda item: item[0][0])
        ]
        kind = OPTIMIZERS[name]
        self._kinds.append(kind)
        self.parts.append(kind.build(groups, config))
        if kind.averages:
            self.parts[-1].train()  # type: ignore[attr-defined]
        names = {parameter: one for one, parameter in parameters.items()}
        for group in self.parts[-1].param_groups:
            # torch's rule, when it loads a state too
            if not (group.get("fused") or group.get("capturable")):
                self._counted_on_host |= {names[parameter] for parameter in group["params"]}
        if config.fused_backward or self._rounds:
            guard: AbstractContextManager[Any] = (
                threading.Lock() if kind.compiles else nullcontext()
            )
            for group_index, group in enumerate(self.parts[-1].param_groups):
                for parameter in group["params"]:
                    settings = {key: group[key] for key in ("weight_decay", "lr_factor")}
                    alone = kind.build([{"params": [parameter], **settings}], config)
                    if kind.averages:
                        alone.train()  # type: ignore[attr-defined]
                    self._singles[names[parameter]] = _Single(
                        alone, self.parts[-1], group_index, kind, guard
                    )
            self._share_state()

    def _share_state(self) -> None:
        """Share the state of each part with its single-parameter optimizers, so that a save is the
        same however parameters are updated."""
        for single in self._singles.values():
            single.optimizer.state = single.part.state
            group = single.part.param_groups[single.group]
            single.optimizer.param_groups[0].update(
                {key: group[key] for key in single.kind.progress if key in group}
            )

    def rates(self, lr: float) -> dict[str, float]:
        """The learning rates other than `lr`, by the names that metrics have for them."""
        return {f"lr {label}": lr * factor for label, factor in self._factors.items()}

    @property
    def averages(self) -> bool:
        """Whether the weights to use differ from the trained ones."""
        return any(kind.averages for kind in self._kinds)

    def begin(self, seed: int, step: int) -> None:
        """Set seed and step: the random numbers of stochastic rounding are a function of them and
        the parameter's name."""
        self._rounding_at = seed, step

    @property
    def skips_on_device(self) -> bool:
        """Whether `step` takes a `found_inf`."""
        return all(kind.skips_on_device for kind in self._kinds)

    def step(self, lr: float, found_inf: Tensor | None = None) -> None:
        """Update the parameters from their gradients, at this learning rate.

        Args:
            lr: The learning rate.
            found_inf: A float32 scalar on the parameters' device: where it is 1, parameters and
                state stay as they are. For optimizers that skip on the device.
        """
        for name, parameter in self.parameters.items():
            is_direct = self._proxies[name] is parameter  # a stand-in takes its gradient in fp32
            if (
                is_direct
                and (gradient := parameter.grad) is not None
                and gradient.dtype != parameter.dtype
            ):
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype  # torch refuses a gradient of another dtype
                parameter.grad = gradient.to(parameter.dtype)
        if self._rounds:  # one by one, so that only one exists in fp32 at a time
            names = list(self.gradients())
            for name in names:
                self.step_one(name, lr, found_inf)
            self.end_step(lr, names)
            return
        for part in self.parts:
            _set_rate(part, lr)
            part.found_inf = found_inf  # type: ignore[attr-defined]
            part.step()

    def add_gradient(self, name: str, gradient: Tensor, *, first: bool) -> Tensor:
        """Add a micro-batch's gradient to the sum of the step's, in the dtype and order in which
        torch accumulates them. Returns the sum.

        Args:
            name: The parameter's.
            gradient: Of one micro-batch.
            first: Whether it is the first of its step; what the sum was before is then forgotten.
        """
        sums = self._sums[name]
        if _SUM not in sums:
            narrow = self._proxies[name] is not self.parameters[name]
            dtype = self._sum_dtype or (torch.float32 if narrow else gradient.dtype)
            sums[_SUM] = torch.empty_like(gradient, dtype=dtype)
        return sums[_SUM].copy_(gradient) if first else sums[_SUM].add_(gradient)

    def sum_of(self, name: str) -> MutableMapping[str, Any]:
        """The sum of a parameter's gradients over micro-batches, as an entry that can be streamed
        as the entries of `state_of`; not saved, because a step begins with a new one."""
        return self._sums[name]

    def step_one(
        self,
        name: str,
        lr: float,
        found_inf: Tensor | None = None,
        *,
        gradient: Tensor | None = None,
        factor: Tensor | float | None = None,
    ) -> None:
        """Update one parameter from its gradient, as `step` would; for `optim.fused_backward`.

        Several threads may call it at once, each with parameters of its own: their torch optimizers
        share only the state dictionary, in which each has an entry of its own.

        Args:
            name: The parameter's.
            lr: The learning rate.
            found_inf: A float32 scalar on the parameter's device: the parameter stays as it is
                where it is 1. Of the optimizer's state that is only true if
                `OptimizerKind.skips_on_device` says so.
            gradient: The gradient to apply; None: the parameter's own.
            factor: What the gradient is multiplied by, in fp32 if the update is computed in fp32;
                None: 1.
        """
        single, parameter = self._singles[name], self.parameters[name]
        if self._proxies[name] is parameter and gradient is not None:
            parameter.grad = gradient.to(parameter.dtype)
        if self._proxies[name] is parameter and factor is not None and parameter.grad is not None:
            parameter.grad.mul_(factor)
        skips = single.kind.skips_on_device
        with (
            single.guard,
            self._in_fp32(name, gradient, factor),
            self._undone(name, None if skips else found_inf),
        ):
            _set_rate(single.optimizer, lr)
            single.optimizer.found_inf = found_inf if skips else None  # type: ignore[attr-defined]
            single.optimizer.step()

    def waits(self, name: str) -> bool:
        """Whether the update of a parameter waits for the device anyway."""
        return self._singles[name].kind.waits

    @contextmanager
    def _undone(self, name: str, found_inf: Tensor | None) -> Iterator[None]:
        """Give the parameter its old values back after the block where `found_inf` is 1. The host
        waits for nothing."""
        parameter, wide = self.parameters[name], self._proxies[name]
        old = parameter.detach().clone() if found_inf is not None and wide is parameter else None
        yield
        if found_inf is not None:
            with torch.no_grad():
                if old is None:  # not yet rounded back
                    wide.grad = None
                    old = joined(parameter.detach(), self.state_of(name).get(_REST))
                torch.where(found_inf > 0, old, wide.data, out=wide.data)

    @contextmanager
    def _in_fp32(
        self, name: str, gradient: Tensor | None = None, factor: Tensor | float | None = None
    ) -> Iterator[None]:
        """Inside the block the stand-in of a bf16 parameter has its values and gradient in fp32;
        afterwards they are rounded back."""
        parameter, wide = self.parameters[name], self._proxies[name]
        gradient = parameter.grad if gradient is None else gradient
        if wide is parameter or gradient is None:
            yield
            return
        with torch.no_grad():
            fused = kernels_on(self._kernels, parameter)
            wide.data = joined(
                parameter.detach(), rest := self.state_of(name).get(_REST), fused=fused
            )
            wide.grad = gradient.float()
            # in place: of a sum of micro-batches nothing is needed after this
            if factor is not None:
                wide.grad.mul_(factor)
            yield
            wide.grad = None
            if self._rounding == "stochastic":
                seed, step = self._rounding_at
                start, count = self._elements.get(name, (0, parameter.numel()))
                key = seed_of(seed, "rounding", step, name)
                write_stochastic(parameter, wide.data, key, start=start, of=count, fused=fused)
            elif self._rounding == "split":
                state = self.state_of(name)
                # only now: an optimizer treats a state that is not empty as initialised
                if rest is None:
                    rest = state[_REST] = torch.empty(
                        parameter.shape, dtype=torch.int16, device=parameter.device
                    )
                write_split(parameter, wide.data, rest, fused=fused)
            else:
                parameter.copy_(wide)
            wide.data = torch.empty(
                (0,) * parameter.ndim, dtype=torch.float32, device=parameter.device
            )

    def end_step(self, lr: float, updated: Collection[str]) -> None:
        """Finish a step after `step_one` of these parameters: update the groups' progress, also for
        parameters without a gradient."""
        for name in self._singles.keys() - set(updated):
            assert self.parameters[name].grad is None, name
            # updates nothing, but counts the step in optimizers that count per group
            self.step_one(name, lr)
        for single in self._singles.values():
            group = single.part.param_groups[single.group]
            single_group = single.optimizer.param_groups[0]
            group.update(
                {key: single_group[key] for key in single.kind.progress if key in single_group}
            )

    def state_of(self, name: str) -> MutableMapping[str, Any]:
        """The optimizer's state of one parameter, by entry: empty before its first update.

        It may be changed between two updates of the parameter: a tensor may be replaced, also by
        one on another device, as long as it is back on the parameter's device for the update.
        """
        for part in self.parts:
            if (state := part.state.get(self._proxies[name])) is not None:
                entries: MutableMapping[str, Any] = state
                return entries
        return {}

    def is_kept_on_host(self, name: str, entry: str) -> bool:
        """Whether an entry of a parameter's state is always on the host: torch's optimizers count
        steps there."""
        return entry == "step" and name in self._counted_on_host

    def gradients(self) -> dict[str, Tensor]:
        """The existing gradients by name, in the parameters' order."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def zero_grad(self) -> None:
        """Free all gradients, and the sums of gradients that are not streamed."""
        for name, parameter in self.parameters.items():
            parameter.grad = None
            if name not in self.streamed:
                self._sums[name].clear()
        self._expect_gradients()

    def _expect_gradients(self) -> None:
        """Have torch sum gradients in the configured dtype."""
        for parameter in self.parameters.values():
            if self._accumulation is not None and parameter.grad_dtype != self._accumulation:
                parameter.grad_dtype = self._accumulation

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside the block the parameters have the values to use; for most optimizers, those are
        the trained ones.

        Switching with the optimizer's own `eval()` and `train()` rounds, so the trained values are
        copied back.
        """
        averaging = [
            part for part, kind in zip(self.parts, self._kinds, strict=True) if kind.averages
        ]
        with swapped(self.parameters, self.parameters if averaging else {}):
            try:
                for part in averaging:
                    part.eval()  # type: ignore[attr-defined]
                yield
            finally:
                for part in averaging:
                    part.train()  # type: ignore[attr-defined]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that `load_state` needs to resume bitwise identically: tensors by name, and
        values for JSON."""
        return export_state(self.parts, self._progress(), self._proxies)

    def load_state(
        self,
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Any],
        *,
        on_host: Collection[str] = (),
    ) -> None:
        """Load what `state` returned. The state of the parameters named in `on_host` stays on the
        host for now."""
        import_state(
            self.parts, self._progress(), self._proxies, tensors, values, untouched=on_host
        )
        for name, parameter in self.parameters.items():
            state = self.state_of(name)
            if _REST in state:  # torch casts state to the dtype of its parameter
                rest = state.pop(_REST)
                if self._rounding == "split" and self._proxies[name] is not parameter:
                    state[_REST] = rest.to(torch.int16)
        self._share_state()  # loading gives the parts new dictionaries

    def _progress(self) -> list[tuple[str, ...]]:
        return [kind.progress for kind in self._kinds]
