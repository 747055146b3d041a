"""Optimizers by name, the learning-rate schedule, and optimizer state as plain named tensors."""

import importlib
import importlib.util
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ditkit_core.ema import swapped
from ditkit_core.errors import UserError
from ditkit_core.optim_state import export_state, import_state
from ditkit_core.settings import setting


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The `[optim]` section."""

    name: Literal["adamw", "adamw8bit", "muon", "adafactor", "prodigy", "schedulefree_adamw"] = setting(
        "adamw", resume="refused"
    )
    """`adamw` (fused), `adamw8bit` (torchao), `muon` (block matrices by Muon, the rest by AdamW; full fine-tune only),
    `adafactor`, or from the extra ditkit-core[optimizers]: `prodigy` (use lr = 1), `schedulefree_adamw`."""
    lr: float = setting(1e-4, resume="stated")
    """Highest learning rate, above 0; with `prodigy` a factor of the rate that it estimates."""
    weight_decay: float = setting(0.01, resume="stated")
    """Decoupled weight decay; vectors (biases, norms) have none."""
    betas: tuple[float, float] = setting((0.9, 0.999), resume="stated")
    """Decay of the averages of the gradient and of its square, in [0, 1); Muon and Adafactor have their own."""
    eps: float = setting(1e-8, resume="stated")
    """Added to the denominator, above 0."""
    schedule: Literal["constant", "cosine", "linear"] = setting("constant", resume="stated")
    """How the learning rate goes from its highest value to `final_lr_fraction` of it, over all of `train.steps`."""
    warmup_steps: int = setting(0, resume="stated")
    """Optimizer steps over which the learning rate rises linearly from 0, before the schedule."""
    final_lr_fraction: float = setting(0.0, resume="stated")
    """Learning rate at the last step of `cosine` and `linear`, as a fraction of `lr`."""

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.eps <= 0 or self.weight_decay < 0 or self.warmup_steps < 0:
            raise UserError("optim.lr and optim.eps must be above 0, weight_decay and warmup_steps at least 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optim.betas = {self.betas} must lie in [0, 1)")
        if self.name == "prodigy" and self.lr < 0.01:
            raise UserError(f"optim.lr = {self.lr:g} is a factor of the rate that prodigy estimates; set optim.lr = 1")
        if self.name == "schedulefree_adamw" and self.schedule != "constant":
            raise UserError(f"optim.schedule = {self.schedule} does not go with schedulefree_adamw; use constant")


def learning_rate(step: int, config: OptimConfig, total_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0: a function of the step, with no state to save."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps))
    remaining = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * remaining)


@dataclass(frozen=True)
class _Kind:
    """How one optimizer is built, and what else it needs."""

    build: Callable[[list[dict[str, Any]], OptimConfig], torch.optim.Optimizer]
    progress: tuple[str, ...] = ()
    """Scalars of its parameter groups that change as it steps, and are therefore state."""
    averages: bool = False
    """Whether it trains weights beside those to be used, and has `train()` and `eval()` to go between them."""


def _from_extra(module: str, cls: str) -> Any:
    try:
        return getattr(importlib.import_module(module), cls)
    except ImportError as error:
        raise UserError(f"this optimizer needs the package {module}; pip install 'ditkit-core[optimizers]'") from error


def _adamw(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _adamw8bit(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    on_gpu = any(parameter.device.type == "cuda" for group in groups for parameter in group["params"])
    if on_gpu and importlib.util.find_spec("triton") is None:
        raise UserError("optim.name = adamw8bit compiles its step with triton, which is not installed; use adamw")
    return AdamW8bit(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def _muon(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    # updates of AdamW's size, so that one learning rate and one weight decay serve both parts
    return torch.optim.Muon(groups, lr=config.lr, adjust_lr_fn="match_rms_adamw")


def _adafactor(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=config.lr)


def _prodigy(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    cls = _from_extra("prodigyopt", "Prodigy")
    # what its authors advise for diffusion models; without the safeguard a warm-up spoils the estimate of the rate
    return cls(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, use_bias_correction=True, safeguard_warmup=True
    )


def _schedulefree(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    cls = _from_extra("schedulefree", "AdamWScheduleFree")
    return cls(groups, lr=config.lr, betas=config.betas, eps=config.eps)


_KINDS = {
    "adamw": _Kind(_adamw),
    "adamw8bit": _Kind(_adamw8bit),
    "muon": _Kind(_muon),
    "adafactor": _Kind(_adafactor),
    "prodigy": _Kind(_prodigy, ("k", "d", "d_max", "d_numerator", "d_denom", "d_hat")),
    "schedulefree_adamw": _Kind(_schedulefree, ("k", "weight_sum", "lr_max", "scheduled_lr", "train_mode"), True),
}


class NamedOptimizer:
    """The optimizer of a run: one torch optimizer, or Muon and AdamW side by side, over parameters known by name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimConfig, *, matrices: Collection[str] = ()):
        """Build it.

        Args:
            parameters: What is trained, by name; the names are those of the saved state.
            config: The optimizer and its settings.
            matrices: Names of the weight matrices in the blocks, for Muon.

        Raises:
            UserError: If the optimizer's package is missing, or Muon has no matrices to train.
        """
        self.parameters = dict(parameters)
        self._kinds: list[_Kind] = []
        self.parts: list[torch.optim.Optimizer] = []
        rest = self.parameters
        if config.name == "muon":
            if not matrices:
                raise UserError("optim.name = muon is for a full fine-tune; with an adapter use adamw or adamw8bit")
            self._add("muon", {name: self.parameters[name] for name in matrices}, config)
            rest = {name: parameter for name, parameter in self.parameters.items() if name not in set(matrices)}
        if rest:
            self._add("adamw" if config.name == "muon" else config.name, rest, config)

    def _add(self, name: str, parameters: Mapping[str, nn.Parameter], config: OptimConfig) -> None:
        wide = [parameter for parameter in parameters.values() if parameter.ndim > 1]
        flat = [parameter for parameter in parameters.values() if parameter.ndim <= 1]
        groups = [
            {"params": params, "weight_decay": decay}
            for params, decay in ((wide, config.weight_decay), (flat, 0.0))
            if params
        ]
        kind = _KINDS[name]
        self._kinds.append(kind)
        self.parts.append(kind.build(groups, config))
        if kind.averages:
            self.parts[-1].train()  # type: ignore[attr-defined]

    @property
    def averages(self) -> bool:
        """Whether the parameters to be used are others than those trained."""
        return any(kind.averages for kind in self._kinds)

    def step(self, lr: float) -> None:
        """Update the parameters from their gradients, at this learning rate."""
        for part in self.parts:
            for group in part.param_groups:
                if isinstance(group["lr"], Tensor):  # torchao compiles its step and takes the rate as a tensor
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr
            part.step()

    def zero_grad(self) -> None:
        """Free all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside the block the parameters are those to be used; for most optimizers, the trained ones as they are.

        Going there and back by the optimizer's own `eval()` and `train()` rounds, so the trained values are put back.
        """
        averaging = [part for part, kind in zip(self.parts, self._kinds, strict=True) if kind.averages]
        with swapped(self.parameters, self.parameters if averaging else {}):
            try:
                for part in averaging:
                    part.eval()  # type: ignore[attr-defined]
                yield
            finally:
                for part in averaging:
                    part.train()  # type: ignore[attr-defined]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that `load_state` needs to go on to the bit: tensors by name, and values for JSON."""
        return export_state(self.parts, self._progress(), self.parameters)

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take over a saved state.

        Raises:
            UserError: If it is the state of other parameters or another optimizer.
        """
        import_state(self.parts, self._progress(), self.parameters, tensors, values)

    def _progress(self) -> list[tuple[str, ...]]:
        return [kind.progress for kind in self._kinds]
