"""The optimizers by name, with everything that the rest of the core must know of them, and the
`[optim]` section.

This module needs no torch until an optimizer is built, because settings are read before torch is
imported.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from ditkit_core.config.field import setting
from ditkit_core.config.layer_patterns import fits, parse_patterns
from ditkit_core.errors import UserError, argument

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """One row of `OPTIMIZERS`: how an optimizer is built, and its properties that other modules
    need."""

    build: "Callable[[list[dict[str, Any]], OptimConfig], torch.optim.Optimizer]"
    progress: tuple[str, ...] = ()
    """Scalars of its parameter groups that change as it steps, and are therefore saved as state."""
    averages: bool = False
    """Whether the weights to use differ from the trained ones, with `train()` and `eval()` to
    switch between them."""
    compiles: bool = False
    """Whether its step uses torch's compiler, which only one thread may enter at a time."""
    one_by_one: bool = False
    """Whether it can update one weight at a time, so that only that weight exists in fp32."""
    one_after_another: bool = False
    """Whether its step needs memory for one weight at a time; others work on all at once."""
    skips_on_device: bool = False
    """Whether its step does nothing where its attribute `found_inf`, a tensor on the device, is 1,
    as torch's GradScaler uses it."""
    waits: bool = False
    """Whether its step waits for the device, to read norms on the host."""
    averages_in_8_bits: bool = False
    """Whether it keeps its averages of the gradient and of its square in 8 bits, not in fp32."""
    streams: bool = False
    """Whether its state can be streamed with the weights of a block."""
    by_element: bool = False
    """Whether it updates each element from that element's gradients alone, so that ranks can divide
    a weight."""
    estimates_rate: bool = False
    """Whether it estimates the learning rate from all gradients together; `optim.lr` multiplies the
    estimate."""
    rest: str = ""
    """The optimizer for parameters other than the blocks' weight matrices; empty if it trains all
    parameters itself."""


def _from_extra(module: str, cls: str) -> Any:
    try:
        return getattr(importlib.import_module(module), cls)
    except ImportError as error:
        raise UserError(
            f"this optimizer needs the package {module}; pip install 'ditkit-core[optimizers]'"
        ) from error


def _adamw(groups: list[dict[str, Any]], config: "OptimConfig") -> "torch.optim.Optimizer":
    import torch

    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _adamw8bit(groups: list[dict[str, Any]], config: "OptimConfig") -> "torch.optim.Optimizer":
    from torchao.optim import AdamW8bit

    on_gpu = any(
        parameter.device.type == "cuda" for group in groups for parameter in group["params"]
    )
    if on_gpu and importlib.util.find_spec("triton") is None:
        raise UserError(
            f"{argument('optim.name')} = adamw8bit compiles its step with triton, which is not "
            f"installed; use adamw"
        )
    return AdamW8bit(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def _muon(groups: list[dict[str, Any]], config: "OptimConfig") -> "torch.optim.Optimizer":
    import torch

    # Scales its updates to the size of AdamW's, so that one learning rate and one weight decay suit
    # both parts.
    return torch.optim.Muon(groups, lr=config.lr, adjust_lr_fn="match_rms_adamw")


def _adafactor(groups: list[dict[str, Any]], config: "OptimConfig") -> "torch.optim.Optimizer":
    import torch

    return torch.optim.Adafactor(groups, lr=config.lr)


def _prodigy(groups: list[dict[str, Any]], config: "OptimConfig") -> "torch.optim.Optimizer":
    cls = _from_extra("prodigyopt", "Prodigy")
    # Its authors advise this for diffusion models; without the safeguard a warm-up spoils the
    # estimated rate.
    return cls(
        groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        use_bias_correction=True,
        safeguard_warmup=True,
    )


def _schedulefree(groups: list[dict[str, Any]], config: "OptimConfig") -> "torch.optim.Optimizer":
    cls = _from_extra("schedulefree", "AdamWScheduleFree")
    # Its foreach path passes all tensors to one operation, which needs a single device; torch's own
    # optimizers group by device.
    at_once = len({parameter.device for group in groups for parameter in group["params"]}) == 1
    return cls(groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=at_once)


_HIGHEST_RATE = 1e-2
"""A higher learning rate is warned of, unless the optimizer estimates the rate."""
OPTIMIZERS = {
    "adamw": OptimizerKind(
        build=_adamw, one_by_one=True, streams=True, by_element=True, skips_on_device=True
    ),
    "adamw8bit": OptimizerKind(
        build=_adamw8bit,
        one_by_one=True,
        one_after_another=True,
        compiles=True,
        averages_in_8_bits=True,
        streams=True,
    ),
    "adafactor": OptimizerKind(build=_adafactor, one_by_one=True, streams=True, waits=True),
    "muon": OptimizerKind(build=_muon, one_by_one=True, streams=True, rest="adamw"),
    "prodigy": OptimizerKind(
        build=_prodigy,
        estimates_rate=True,
        progress=("k", "d", "d_max", "d_numerator", "d_denom", "d_hat"),
    ),
    # eval() and train() convert all weights at once, so none can be streamed
    "schedulefree_adamw": OptimizerKind(
        build=_schedulefree,
        averages=True,
        by_element=True,
        progress=("k", "weight_sum", "lr_max", "scheduled_lr", "train_mode"),
    ),
}
"""All optimizers by `optim.name`. A new one is added here and nowhere else."""

if TYPE_CHECKING:
    OptimizerName = str  # a checker cannot read a table
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]


def optimizers_that(can: Callable[[OptimizerKind], bool]) -> list[str]:
    """The names of the optimizers with some property."""
    return [name for name, kind in OPTIMIZERS.items() if can(kind)]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The `[optim]` section: the optimizer, and its learning rate over the steps."""

    name: OptimizerName = setting("adamw", resume="refused")
    """`adamw` (fused), `adamw8bit` (torchao), `muon` (block matrices by Muon, the rest by AdamW;
    full fine-tune only), `adafactor`, or from the extra ditkit-core[optimizers]: `prodigy` (use lr
    = 1), `schedulefree_adamw`."""
    lr: float = setting(1e-4, resume="stated")
    """Highest learning rate, above 0; with `prodigy` it multiplies the estimated rate."""
    lr_pattern: tuple[str, ...] = setting((), resume="refused")
    """Other learning rates by layer, each as `PATTERN=RATE`: a name's end (`self_attn.q=5e-5`) or a
    glob (`layers.[0-9].*=1e-5`). The first that fits a layer counts; schedule and warm-up are the
    same as for `lr`."""
    loraplus_lr_ratio: float = setting(1.0, resume="refused")
    """LoRA+: learning rate of B over the rate of A, above 0; 16 is usual. As in peft, the
    magnitudes of a DoRA have B's rate."""
    weight_decay: float = setting(0.01, resume="stated")
    """Decoupled weight decay; vectors (biases, norms) have none."""
    betas: tuple[float, float] = setting((0.9, 0.999), resume="stated")
    """Decay of the averages of the gradient and of its square, in [0, 1); Muon and Adafactor use
    their own values."""
    eps: float = setting(1e-8, resume="stated")
    """Added to the denominator, above 0."""
    schedule: Literal["constant", "cosine", "linear"] = setting("constant", resume="stated")
    """Shape of the decay of the learning rate from `lr` to `final_lr_fraction` of it, over all of
    `train.steps`."""
    warmup_steps: int = setting(0, resume="stated")
    """Optimizer steps over which the learning rate rises linearly from 0, before the schedule."""
    final_lr_fraction: float = setting(0.0, resume="stated")
    """Learning rate at the last step of `cosine` and `linear`, as a fraction of `lr`. With 0 the
    last step changes nothing; the schedules of diffusers, transformers and kohya reach 0 one step
    later."""
    fused_backward: bool = setting(False, resume="stated")
    """Update each parameter in the backward as soon as its gradient is complete, so that no full
    set of gradients exists except for the sums that train.accumulation needs. Needs train.clip_by =
    last_step or block, or train.clip_norm = 0."""
    rounding: Literal["nearest", "stochastic", "split"] = setting("nearest", resume="stated")
    """Rounding of updated bf16 weights (full fine-tune with model.dtype = bf16): `stochastic`, or
    `split`, which stores the bits that bf16 drops in 2 more bytes per weight. `nearest` loses most
    updates and is for fp32. The optimizer computes in fp32."""

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.eps <= 0 or self.weight_decay < 0 or self.warmup_steps < 0:
            raise UserError(
                f"{argument('optim.lr')} = {self.lr:g}, {argument('optim.eps')} = {self.eps:g}, "
                f"{argument('optim.weight_decay')} = {self.weight_decay:g}, "
                f"{argument('optim.warmup_steps')} = "
                f"{self.warmup_steps}: set the first two above 0, the others to at least 0"
            )
        if not 0 < self.loraplus_lr_ratio < math.inf:
            raise UserError(
                f"{argument('optim.loraplus_lr_ratio')} = {self.loraplus_lr_ratio} must be above "
                f"0; 16 is usual, 1 is none"
            )
        if self.kind.estimates_rate and (self.lr_pattern or self.loraplus_lr_ratio != 1):
            raise UserError(
                f"{argument('optim.lr_pattern')} and {argument('optim.loraplus_lr_ratio')} do not "
                f"go with {self.name}, which estimates one rate for all parameters; "
                f"leave them out, or use another {argument('optim.name')}"
            )
        # parsed here, so that a wrong entry fails before anything else
        assert self.rates is not None
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"{argument('optim.betas')} = {self.betas} must be in [0, 1)")
        if self.kind.estimates_rate and self.lr < 0.01:
            raise UserError(
                f"{argument('optim.lr')} = {self.lr:g} multiplies the rate that {self.name} "
                f"estimates; set {argument('optim.lr')} = 1"
            )
        if self.kind.averages and self.schedule != "constant":
            raise UserError(
                f"{argument('optim.schedule')} = {self.schedule} does not go with {self.name}; use "
                f"constant"
            )
        if self.rounding != "nearest" and not self.kind.one_by_one:
            raise UserError(
                f"{argument('optim.rounding')} = {self.rounding} does not go with "
                f"{argument('optim.name')} = {self.name}, which updates all weights together or "
                f"computes the weights to use from the trained ones; use "
                f"{', '.join(optimizers_that(lambda kind: kind.one_by_one))}"
            )
        if self.kind.estimates_rate and self.fused_backward:
            *others, last = optimizers_that(lambda kind: not kind.estimates_rate)
            raise UserError(
                f"{argument('optim.fused_backward')} does not go with {self.name}, which estimates "
                f"one rate from all gradients together; use {', '.join(others)} or {last}"
            )

    @property
    def advice(self) -> str:
        """One line to warn with if a learning rate is far above what the optimizer trains with;
        empty for no warning."""
        key, rate = max({"optim.lr": self.lr, **self.rates}.items(), key=lambda pair: pair[1])
        if self.kind.estimates_rate or rate <= _HIGHEST_RATE:
            return ""
        name = (
            argument("optim.lr") if key == "optim.lr" else f"{argument('optim.lr_pattern')} {key}"
        )
        return (
            f"{name} = {rate:g} is far above the learning rates of {self.name}, usually 1e-5 to "
            f"1e-3: the loss will probably rise; lower it (1 is for {argument('optim.name')} = "
            "prodigy, which estimates the rate)"
        )

    @property
    def kind(self) -> OptimizerKind:
        """The row of `OPTIMIZERS`."""
        return OPTIMIZERS[self.name]

    @cached_property
    def rates(self) -> dict[str, float]:
        """`lr_pattern`: the learning rate by pattern."""
        return parse_patterns("optim.lr_pattern", self.lr_pattern, "RATE")

    def rate_of(self, layer: str, *, is_up: bool) -> tuple[str, float]:
        """The learning rate of a layer's parameter over `lr`, and a name for it in metrics; empty
        for `lr` itself.

        Args:
            layer: The layer's name.
            is_up: Whether the parameter has the rate of B in LoRA+.
        """
        pattern = next((pattern for pattern in self.rates if fits(layer, pattern)), "")
        is_other = is_up and self.loraplus_lr_ratio != 1
        factor = (
            self.rates.get(pattern, self.lr) / self.lr * (self.loraplus_lr_ratio if is_other else 1)
        )
        return " ".join(filter(None, [pattern, "B" * is_other])), factor
