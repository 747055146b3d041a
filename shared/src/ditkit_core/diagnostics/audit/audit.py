"""Measures which operation's precision matters: one batch is compared with fp64, with one place
lowered at a time, and with all but one.

The reference is the run's own weights (quantized matrices dequantized) and data, computed in fp64
throughout. Weights are cast where they are used, blocks are checkpointed, and the run's block hooks
stay active: a model that is split or streamed is audited without moving its weights.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core.adapters.inject import is_adapter_name, trainable_parameters
from ditkit_core.diagnostics.audit.dtype_view import DtypeOf, DtypeView, as_stored, by_op_group
from ditkit_core.diagnostics.audit.findings import (
    AuditFindings,
    Case,
    Cost,
    Errors,
    OpGroupFindings,
)
from ditkit_core.engine.block_swap import BlockSwap
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.io.rng import generator
from ditkit_core.models.precision import (
    PLACES,
    Precision,
    autocast_disabled,
    dtype_name,
    set_precision,
)
from ditkit_core.models.protocol import StagedModel
from ditkit_core.models.spec import ModelSpec
from ditkit_core.nn.attention.backends import BACKENDS
from ditkit_core.nn.quantized_linear import products_in_dtype, quantized_weights
from ditkit_core.planner.memory_tracker import MemoryTracker
from ditkit_core.training.flow_matching import LossMask, NoisedBatch

NOT_IN_A_BATCH: Mapping[str, str] = {
    "accumulation": "acts where gradients of several micro-batches are added",
    "optimizer": "acts in the update",
    "reduction": "acts where gradients of several ranks are added",
}
ACTING = tuple(group for group in PLACES if group not in NOT_IN_A_BATCH)
"""Places of `Precision` that matter in one forward and backward."""

BASE = "base.compute"
"""A place next to those: products with the frozen base, where a run has them in 8 bits. It is
lowered to that format."""

EDGES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Bounds of the ranges of noise levels; each sample gets a random level in each range."""

ROUNDS = 5
"""Number of timed passes for each choice of dtypes; their median is reported."""

_TRUTH = torch.float64
_IN_FP64 = {group: _TRUTH for group in PLACES if group not in NOT_IN_A_BATCH}
_HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model, data and settings to audit."""

    model: StagedModel
    """The staged model with its weights, on its devices."""
    spec: ModelSpec
    precision: Precision
    """The dtypes that the model is set to."""
    run: BlockEngine
    """The engine of the run."""
    ids: Sequence[str]
    items: Sequence[Mapping[str, Tensor]]
    """Training items, on the host."""
    guidance: float
    seed: int

    @property
    def lowered(self) -> torch.dtype:
        """The dtype that places are lowered to: the dtype of the run's matmuls, or bf16 if that is
        32 bits or wider."""
        matmul = self.precision.matmul
        return matmul if matmul.itemsize < 4 else torch.bfloat16

    @property
    def in_8_bits(self) -> str:
        """The format of products with the frozen base; empty if none are in 8 bits."""
        return next(
            (layer.kind for layer in quantized_weights(self.model).values() if layer.in_8_bits), ""
        )


def num_passes(subject: Subject) -> int:
    """Number of forward and backward passes of an audit, for a progress bar."""
    return (len(EDGES) - 1) * (3 + 2 * len(_op_groups(subject))) + (1 + ROUNDS) * (
        1 + len(_priced(subject))
    )


def _op_groups(subject: Subject) -> tuple[str, ...]:
    return (*ACTING, BASE) if subject.in_8_bits else ACTING


def audit(
    subject: Subject, *, advance: Callable[[], None], notes: Sequence[str] = ()
) -> AuditFindings:
    """Measure the errors and the cost of each place's precision.

    Afterwards the model, its parameters, their `.grad` and torch's generators are unchanged.

    Args:
        advance: Called after each forward and backward.
        notes: Copied into the findings.

    Returns:
        The findings, with the place first that has the largest error.
    """
    # Not of ACTING, which a short audit replaces by fewer places: the reference is in fp64
    # everywhere.
    low = subject.lowered
    lowered = dict.fromkeys([*_IN_FP64, BASE] if subject.in_8_bits else _IN_FP64, low)
    # Alone shows the error that a place adds; all but one shows what raising only this place would
    # gain.
    cases: dict[str, Mapping[str, torch.dtype] | None] = {"own": None, "all lowered": lowered}
    cases |= {f"alone {group}": {**_IN_FP64, group: low} for group in _op_groups(subject)}
    cases |= {f"all but {group}": {**lowered, group: _TRUTH} for group in _op_groups(subject)}
    squares_by_case: dict[str, list[_Squares]] = {name: [] for name in cases}
    with eval_mode(subject.model, subject.precision):
        for index in range(len(EDGES) - 1):
            batch = _Batch.sampled(subject, index)
            truth = _measure(subject, batch, _IN_FP64, None)
            advance()
            for name, dtypes in cases.items():
                squares_by_case[name].append(_measure(subject, batch, dtypes, truth).squares)
                advance()
        costs, seconds, peak = _costs(subject, advance)
    case = {name: _case(squares) for name, squares in squares_by_case.items()}
    entries = [
        OpGroupFindings(
            op_group=group,
            dtype=subject.in_8_bits
            if group == BASE
            else dtype_name(getattr(subject.precision, group)),
            alone=case[f"alone {group}"],
            all_but=case[f"all but {group}"],
            cost=costs.get(group),
        )
        for group in _op_groups(subject)
    ]
    return AuditFindings(
        lowered=dtype_name(low),
        edges=EDGES,
        samples=tuple(subject.ids),
        as_run=case["own"],
        all_lowered=case["all lowered"],
        op_groups=tuple(sorted(entries, key=lambda entry: -entry.alone.overall.gradient)),
        seconds=seconds,
        peak_bytes=peak,
        not_measured={**NOT_IN_A_BATCH},
        notes=tuple(notes),
    )


@contextmanager
def eval_mode(model: StagedModel, precision: Precision) -> Iterator[None]:
    """Switch dropout off inside the context, which would add differences of its own; restore mode
    and precision afterwards."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with autocast_disabled(next(model.parameters()).device.type):
            yield
    finally:
        set_precision(model, precision)
        for module, was in training.items():
            module.training = was


@contextmanager
def with_adapters_at_work(model: nn.Module | StagedModel, seed: int) -> Iterator[bool]:
    """Give adapter matrices that are zero small random values inside the context: while B is zero,
    no gradient reaches A.

    The values are normal with standard deviation 0.01, a function of seed and name; afterwards the
    matrices are zero again.

    Yields:
        Whether any matrix was changed.
    """
    before: dict[str, Tensor] = {}
    trained = trainable_parameters(model)
    with torch.no_grad():
        for name, parameter in trained.items():
            if is_adapter_name(name) and not parameter.any():
                before[name] = parameter.detach().clone()
                noise = torch.randn(parameter.shape, generator=generator(seed, "audit", name))
                parameter.copy_(0.01 * noise)
    try:
        yield bool(before)
    finally:
        with torch.no_grad():
            for name, value in before.items():
                trained[name].copy_(value)


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """The samples at one noise level each, on the devices of the first and last stage."""

    inputs: Any
    targets: Sequence[Tensor]
    masks: Sequence[LossMask]
    """Loss mask of each sample; None if all of it is learnt."""

    @classmethod
    def sampled(cls, subject: Subject, index: int) -> "_Batch":
        """Sample a level for each sample in one range, evenly spread over it. A sample's noise is
        the same in all ranges."""
        first, last = (
            next(stage.parameters()).device for stage in (subject.model.embed, subject.model.head)
        )
        low, high, count = EDGES[index], EDGES[index + 1], len(subject.items)
        random = [generator(subject.seed, "audit", index, name) for name in subject.ids]
        shares = [
            (i + float(torch.rand((), generator=sample_generator))) / count
            for i, sample_generator in enumerate(random)
        ]
        sigma = torch.full((count,), low).add_((high - low) * torch.tensor(shares, device=_HOST))
        # Seeded by sample name without the range: levels are then compared on the same noise.
        noise = [
            torch.randn(
                item["latents"].shape, generator=generator(subject.seed, "audit noise", name)
            )
            for name, item in zip(subject.ids, subject.items, strict=True)
        ]
        noised = NoisedBatch.of(subject.spec, subject.items, sigma, noise).to(first, last)
        assert noised.targets is not None and noised.masks is not None
        return cls(
            inputs=noised.inputs(subject.spec, subject.guidance),
            targets=noised.targets,
            masks=noised.masks,
        )


_Squares = Mapping[str, tuple[float, float]]
"""For each field of `Errors` two sums of squares: of the differences, and of the reference
values."""


@dataclass(kw_only=True)
class _Measured:
    """The results of one forward and backward, on the host in fp64."""

    truth: "_Measured | None"
    velocities: list[Tensor] = field(default_factory=list)
    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the reference only; other passes keep the squares of their differences, which
    need no memory."""
    differences: dict[str, float] = field(default_factory=dict)

    def take(self, name: str, gradient: Tensor) -> None:
        """Record a parameter's gradient; called during the backward."""
        if self.truth is None:
            self.gradients[name] = gradient.detach().to(_HOST, _TRUTH, copy=True)
        else:
            self.differences[name] = _square(
                gradient.detach().to(_HOST, _TRUTH) - self.truth.gradients[name]
            )

    @property
    def squares(self) -> _Squares:
        """The squared differences from the reference."""
        assert self.truth is not None
        pairs = list(zip(self.velocities, self.truth.velocities, strict=True))
        sizes = {name: _square(gradient) for name, gradient in self.truth.gradients.items()}
        # A parameter that got no gradient differs by the whole reference gradient.
        differences = [self.differences.get(name, size) for name, size in sizes.items()]
        return {
            "velocity": (sum(_square(a - b) for a, b in pairs), sum(_square(b) for _, b in pairs)),
            "loss": ((self.loss - self.truth.loss) ** 2, self.truth.loss**2),
            "gradient": (sum(differences), sum(sizes.values())),
        }


def _square(x: Tensor) -> float:
    return float(x.square().sum())


def _measure(
    subject: Subject,
    batch: _Batch,
    dtypes: Mapping[str, torch.dtype] | None,
    truth: _Measured | None,
) -> _Measured:
    """Run forward and backward in these dtypes; None takes the run's own dtypes and leaves the
    weights uncast.

    Products with the base are in 8 bits where the run has them so and `BASE` is lowered.
    """
    measured, dtype_by_group = _Measured(truth=truth), dict(dtypes or {})
    wide = dtypes is not None and dtype_by_group.pop(BASE, _TRUTH) == _TRUTH
    precision = replace(subject.precision, **dtype_by_group)
    dtype_of = (
        as_stored if dtypes is None else by_op_group(precision, subject.spec.precision.op_group_of)
    )
    # Full checkpointing: only one block's fp64 casts are in memory at a time.
    engine = replace(subject.run, policy="full", backend=backend_of(subject, precision))
    with products_in_dtype(subject.model) if wide else nullcontext():
        velocities, loss = _forward(subject, batch, precision, dtype_of, engine, measured.take)
        loss.backward()
    measured.velocities = [velocity.detach().to(_HOST, _TRUTH) for velocity in velocities]
    measured.loss = float(loss.detach())
    if truth is None and not all(
        x.isfinite().all() for x in (loss.detach(), *measured.gradients.values())
    ):
        raise UserError(
            "the loss or a gradient is not finite in fp64, so there is no reference to compare "
            f"with; check the weights and the samples {', '.join(subject.ids)}"
        )
    return measured


def _forward(
    subject: Subject,
    batch: _Batch,
    precision: Precision,
    dtype_of: DtypeOf,
    engine: BlockEngine,
    take: Callable[[str, Tensor], None],
) -> tuple[list[Tensor], Tensor]:
    """The velocities, and the mean squared error over the samples in fp64."""
    set_precision(subject.model, precision)
    velocities = DtypeView(subject.model, dtype_of, take)(batch.inputs, engine=engine)
    triples = zip(velocities, batch.targets, batch.masks, strict=True)
    return velocities, torch.stack(
        [mask.mean((v.to(_TRUTH) - t).square()) for v, t, mask in triples]
    ).mean()


def backend_of(subject: Subject, precision: Precision) -> str:
    """The run's attention backend if it supports the dtype; else one that supports any and does not
    keep all scores in memory."""
    on_gpu = any(parameter.device.type != "cpu" for parameter in subject.model.parameters())
    if precision.attention == _TRUTH:
        return "exact" if on_gpu else "sdpa"
    is_too_wide = BACKENDS[subject.run.backend].half_only and precision.attention.itemsize > 2
    return "sdpa" if is_too_wide else subject.run.backend


def _case(bins: Sequence[_Squares]) -> Case:
    def errors(squares: Sequence[_Squares]) -> Errors:
        ratios = {}
        for name in ("velocity", "loss", "gradient"):
            differences, sizes = zip(*(bin_squares[name] for bin_squares in squares), strict=True)
            ratios[name] = (sum(differences) / sum(sizes)) ** 0.5 if sum(sizes) else 0.0
        return Errors(**ratios)

    return Case(overall=errors(bins), bins=tuple(errors([bin_squares]) for bin_squares in bins))


def _costs(subject: Subject, advance: Callable[[], None]) -> tuple[dict[str, Cost], float, int]:
    """Time and memory with each place in another dtype: lowered, or raised to fp32 if the run has
    it low already.

    Returns:
        The costs; and of the run's own dtypes the seconds and the peak bytes of the fullest device.
    """
    low, run_precision = subject.lowered, subject.precision
    batch = _Batch.sampled(subject, (len(EDGES) - 1) // 2)
    tried_dtypes = {
        group: low
        if group != BASE and getattr(run_precision, group).itemsize > low.itemsize
        else torch.float32
        for group in _priced(subject)
    }
    choices = {
        "own": run_precision,
        **{
            group: replace(run_precision, **{group: dtype})
            for group, dtype in tried_dtypes.items()
            if group != BASE
        },
    }
    if BASE in tried_dtypes:
        choices[BASE], tried_dtypes[BASE] = run_precision, run_precision.matmul
    peaks: dict[str, Mapping[torch.device, int]] = {}
    for name, precision in choices.items():
        with products_in_dtype(subject.model) if name == BASE else nullcontext():
            peaks[name] = _peaks(subject, batch, precision)
        advance()
    seconds: dict[str, list[float]] = {name: [] for name in choices}
    for round_index in range(ROUNDS):
        # The order alternates, so that a device that warms up or throttles favours no choice.
        for name in list(choices)[:: 1 if round_index % 2 else -1]:
            with products_in_dtype(subject.model) if name == BASE else nullcontext():
                seconds[name].append(_seconds(subject, batch, choices[name]))
            advance()
    fullest = max(peaks["own"], key=lambda device: peaks["own"][device])
    costs = {
        group: Cost(
            dtype=dtype_name(dtype),
            time_ratio=median(a / b for a, b in zip(seconds[group], seconds["own"], strict=True)),
            num_bytes=peaks[group][fullest] - peaks["own"][fullest],
        )
        for group, dtype in tried_dtypes.items()
    }
    return costs, median(seconds["own"]), peaks["own"][fullest]


def _priced(subject: Subject) -> list[str]:
    # Not matmul: it also decides the stored dtype of matrices, and casting them where they are used
    # would not show that cost.
    return [group for group in _op_groups(subject) if group != "matmul"]


def _step(subject: Subject, batch: _Batch, precision: Precision) -> None:
    """One forward and backward with the run's engine."""
    engine = replace(subject.run, backend=backend_of(subject, precision))
    # The velocities stay alive in the backward, as a run's do: the peak counts them.
    _velocities, loss = _forward(
        subject, batch, precision, as_stored, engine, lambda name, gradient: None
    )
    loss.backward()


def _peaks(subject: Subject, batch: _Batch, precision: Precision) -> Mapping[torch.device, int]:
    """Peak bytes of live tensors, by device."""
    # Tracked and not read from the allocator, so that the CPU has a number too and rounding of
    # blocks does not show.
    with MemoryTracker() as tracker:
        tracker.track(subject.model, "weights")
        for hook in subject.run.hooks:
            for buffer in hook.buffers if isinstance(hook, BlockSwap) else ():
                tracker.watch(buffer)
        _step(subject, batch, precision)
    return tracker.peak


def _seconds(subject: Subject, batch: _Batch, precision: Precision) -> float:
    devices = {parameter.device for parameter in subject.model.parameters()}
    _wait(devices)
    began = time.perf_counter()
    _step(subject, batch, precision)
    _wait(devices)
    return time.perf_counter() - began


def _wait(devices: Iterable[torch.device]) -> None:
    """Wait for the GPUs among these devices: kernels run asynchronously, and only their launch
    would be timed.

    Not for every GPU of the machine: that would take some hundred MiB of each, and fail where
    another program has filled one.
    """
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def estimated_seconds(subject: Subject) -> float:
    """An upper estimate of an audit's duration: the time of a pass in fp64, which is the slowest
    kind, for all passes."""
    devices = {parameter.device for parameter in subject.model.parameters()}
    began = time.perf_counter()
    with eval_mode(subject.model, subject.precision):
        _measure(subject, _Batch.sampled(subject, 0), _IN_FP64, None)
    _wait(devices)
    return num_passes(subject) * (time.perf_counter() - began)
