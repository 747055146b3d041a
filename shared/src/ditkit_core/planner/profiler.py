"""Memory and arithmetic of each stage in a training step, measured on fake tensors at full width
with a few blocks of each kind.

A step's memory is affine in the number of blocks, so two or three of each kind represent all of
them. It takes seconds and no weights for a model of any size.
"""

import traceback
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ditkit_core.distributed.context_parallel import ContextParallel
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.ac_policies import Policy
from ditkit_core.engine.ac_schedule import ACSchedule
from ditkit_core.engine.block_hooks import call_before_backward
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.models.protocol import Stages
from ditkit_core.nn.context import AttentionCalls, counted_calls
from ditkit_core.planner.equal_updates import step_one_of_each
from ditkit_core.planner.measurement_cache import measured_once, step_key
from ditkit_core.planner.memory import ParameterRows, Profile, StageCost, behind, mixed
from ditkit_core.planner.memory_tracker import Kernel, KernelCounts, Meter, fake_tensors
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.planner.reduced_model import ReducedModel, materialise, reduced_model
from ditkit_core.planner.replicas import RecordedRanks
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.optim.clipping import Clipping, stages_of, total_norm
from ditkit_core.training.optim.fused_backward import OptimizerInBackward
from ditkit_core.training.train_state import TrainState
from ditkit_core.training.train_step import StepContext, accumulate_gradients, update


def profile(
    job: StepJob, *, of_each: int | None = 3, like: Profile | None = None, splits: bool = True
) -> Profile:
    """Run the step of a reduced model on fake tensors, and measure the memory of each stage.

    The step runs twice: with all stages on one device, and with each on its own, which shows what a
    split there costs and frees. If blocks have different policies, there is a step for each policy,
    in which all blocks have it. Policies name no devices. The optimizer's step, which depends on
    neither the batch nor the policy, is run without the others.

    Args:
        of_each: Blocks of a kind that are run, at least 3; None runs all of them.
        like: A profile of the same step, optimizer included, under another policy, or with another
            format of the frozen weights. What depends on neither is taken from it, so that updates,
            and the backward with each stage on its own, need not be run again.
        splits: Whether the profile is asked for splits or mixed with others. Else what they need is
            not measured, and is 0: `crossing`, `crossing_back`, `freed_at_cut` and `targets`.
    """
    return measured_once(
        lambda: (profile, step_key(job), of_each, like, splits),
        lambda: _measured(job, of_each, like, splits),
    )


def _measured(job: StepJob, of_each: int | None, like: Profile | None, splits: bool) -> Profile:
    schedule = job.schedule
    if job.kind == "cpu":
        schedule = schedule.on_the_host()
    if schedule.uniform is None:
        profiles: dict[Policy, Profile] = {}
        for policy in schedule.distinct:
            alone = job.with_execution(checkpointing=ACSchedule.everywhere(policy))
            profiles[policy] = profile(
                alone, of_each=of_each, like=next(iter(profiles.values()), like)
            )
        num_blocks = len(next(iter(profiles.values())).blocks)
        return mixed([profiles[policy] for policy in schedule.policies([None] * num_blocks)])
    model = reduced_model(job, of_each=of_each)
    job = job.with_execution(checkpointing=schedule)
    # An optimizer in the backward takes part in its peaks.
    fused = job.optim.fused_backward
    together = measure(job, model, [0] * len(model.stages()), updates=fused)
    # Each stage on a device of its own; one without parameters runs on the device of its input.
    has_parameters = [next(stage.parameters(), None) is not None for stage in model.stages()]
    devices = list(accumulate(has_parameters[1:], initial=0))
    # The cost of a split does not depend on other micro-batches, so one is enough.
    alone = replace(job, micro_batches=1)
    apart = None
    if like is None and fused:
        apart = measure(alone, model, devices)
    elif splits:
        apart = measure(
            alone, model, devices, updates=False, passes="both" if like is None else "forward"
        )
    updates = None
    if like is None and fused and apart is not None:
        updates = _updates(together, apart)
    elif like is None:
        updates = _measured_updates(job, model, devices, together.updated)
    return replace(
        _profile(model, together, apart, updates, like),
        inputs=sum(
            x.nbytes
            for item in job.batch
            for x in (*item.values(), item["latents"], item["latents"])
        ),
        trains_all=job.adapter.method == "full",
        updates_in_backward=job.optim.fused_backward and job.micro_batches == 1,
    )


Passes = Literal["both", "forward"]


@dataclass
class StageMoment:
    """Bytes by device that were alive when a stage began, and their peak until the next
    boundary."""

    activations: Counter[int]
    total: Counter[int]
    peak: Counter[int] = field(default_factory=Counter)
    kernels: Counter[Kernel] = field(default_factory=Counter)
    """What ran until the next boundary."""
    on_host: int = 0
    """Bytes of activations on the host when the stage began."""
    sent: int = 0
    """Bytes of tokens that were sent to other ranks until the next boundary."""


def counts_of(moments: Sequence[StageMoment]) -> KernelCounts:
    """The kernels of some moments, as costs have them."""
    return frozenset(sum((moment.kernels for moment in moments), Counter[Kernel]()).items())


@dataclass
class MeasuredStep:
    """The boundaries of a step, and its static memory; devices are counted from 0."""

    stage_devices: Sequence[int]
    """Device of each stage."""
    static: list[StageCost] = field(default_factory=list)
    forward: list[StageMoment] = field(default_factory=list)
    """Each stage's, then the loss."""
    backward: dict[int, StageMoment] = field(default_factory=dict)
    """By stage, in the order of the backward; stages without a backward are missing."""
    again: dict[int, StageMoment] = field(default_factory=dict)
    """The same for a second micro-batch, whose gradients are added to the first one's."""
    end: StageMoment | None = None
    """After the backward."""
    update: StageMoment | None = None
    peaks: Counter[int] = field(default_factory=Counter)
    """The peak of the step, by device."""
    updated: frozenset[str] = frozenset()
    """Names of the trained parameters that the backward makes a gradient for."""
    attention: tuple[str, ...] = ()
    """Names of the attention calls in blocks that recompute."""


def measure(
    job: StepJob,
    model: ReducedModel,
    stage_devices: Sequence[int],
    *,
    updates: bool = True,
    passes: Passes | Collection[str] = "both",
) -> MeasuredStep:
    """Run the second step of a training on fake tensors, for a first and a later micro-batch, and
    record every boundary.

    The model is on `meta`; its parameters get new, fake memory on the device of their stage, and
    keep it.

    Args:
        updates: Whether the optimizer steps; else peaks lack its state.
        passes: Whether forward and backward run, or the first forward alone, or, with the names of
            some trained parameters, neither: these have a gradient.
    """
    with fake_tensors(job.kind) as meter:
        measuring = _Measuring(job, model, meter, stage_devices)
        try:
            with suppress(_ForwardDone):
                measuring.run(updates=updates, passes=passes)
        except RuntimeError as error:
            if not mixes_devices(error):
                raise
            raise UserError(
                f"{_line_of_model(error)}: a tensor is on the host; `torch.tensor([...], "
                "device=...)` copies one in each forward, which cannot be replayed: make it with "
                "torch.full, arange or linspace, with device="
            ) from error
        return measuring.measured


def mixes_devices(error: BaseException | None) -> bool:
    """Whether an operation was given tensors of several devices, in the words of torch and of its
    fake tensors."""
    words = ("on the same device", "two different devices")
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in words)


def _line_of_model(error: RuntimeError) -> str:
    """File and line of the operation that failed: the last ones outside of torch and of what counts
    operations."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.name != "__torch_dispatch__"
    ]
    libraries = str(Path(torch.__file__).parent)
    frame = [frame for frame in frames if not frame.filename.startswith(libraries)][-1]
    return f"{frame.filename}:{frame.lineno}"


class _ForwardDone(Exception):
    """Ends a step whose backward is not needed."""


_HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class _Watched(BlockEngine):
    """The engine for the chosen blocks, which reports where each stage begins, in forward and
    backward."""

    model: ReducedModel
    entered: Callable[[int], None]
    entered_backward: Callable[[int], None]

    def __call__(self, model: Stages, inputs: Any) -> Any:
        chosen: Any = self.model
        prediction = super().__call__(chosen, inputs)
        last = len(self.model.indices) + 1
        self.entered(last + 1)
        return self._marked((), prediction, last)

    def _embed(self, model: Stages, inputs: Any) -> Any:
        return self._marked((), super()._embed(model, inputs), 0)

    def _head(self, model: Stages, carry: Any) -> Any:
        self.entered(len(self.model.indices) + 1)
        return super()._head(model, carry)

    def _run(self, index: int, block: nn.Module, carry: Any, settings: Any) -> Any:
        self.entered(index + 1)
        return self._marked(carry, super()._run(index, block, carry, settings), index + 1)

    def _marked(self, before: Any, after: Any, stage: int) -> Any:
        return call_before_backward(before, after, lambda: self.entered_backward(stage))


class _Measuring:
    """The state of one measured step."""

    def __init__(
        self, job: StepJob, model: ReducedModel, meter: Meter, stage_devices: Sequence[int]
    ):
        self.job, self.model, self.meter = job, model, meter
        self.devices = [torch.device("cpu", 1 + index) for index in range(max(stage_devices) + 1)]
        self.ranks = RecordedRanks(
            0, job.execution.ranks.context, context=job.execution.ranks.context
        )
        self.measured = MeasuredStep(stage_devices)
        self.open: StageMoment | None = None
        self.in_backward: OptimizerInBackward | None = None

    def run(self, *, updates: bool, passes: Passes | Collection[str]) -> None:
        job, meter, measured = self.job, self.meter, self.measured
        names = {id(module): name for name, module in self.model.full_model.named_modules()}
        stages = self.model.stages()
        with meter.purpose("weights"):
            where = [self.devices[index] for index in measured.stage_devices]
            for stage, device in zip(stages, where, strict=True):
                materialise(
                    stage, names[id(stage)], job.spec, dtype=job.precision.matmul, device=device
                )
            batch = [
                {
                    name: torch.empty(x.shape, dtype=x.dtype, device="cpu")
                    for name, x in item.items()
                }
                for item in job.batch
            ]
        parameters = self.model.trainable()
        meter.track(list(parameters.values()), "adapters")
        with meter.purpose("average"):
            # Only some of a model's stages are run; TrainState looks at the embedding and the
            # blocks alone.
            staged: Any = self.model
            self.trained = trained = TrainState(
                staged, parameters, job.optim, job.ema, kernels=job.kernels
            )
        if job.optim.kind.one_after_another:
            for part in trained.optimizer.parts:
                vars(part)["step"] = partial(step_one_of_each, part, meter)
        self.gradients = trained.optimizer.parameters.values()
        stage_of = stages_of(self.model.full_model, trained.optimizer.parameters)
        self.clipping = Clipping(
            max_norm=job.clip_norm, by=job.clip_by, last_norm=2 * job.clip_norm, stage_of=stage_of
        )
        if updates:
            # The second step is measured, because the optimizer's state only exists after its first
            # update.
            with meter.purpose("optimizer"):
                for parameter in self.gradients:
                    parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
                self._update()
                trained.optimizer.zero_grad()
                # Sums of gradients are the optimizer's where it applies them in the last backward.
                summed = (
                    trained.optimizer.parameters
                    if job.optim.fused_backward and job.micro_batches > 1
                    else {}
                )
                for name, parameter in summed.items():
                    trained.optimizer.add_gradient(name, torch.empty_like(parameter), first=True)
        measured.static = [self._static(stage) for stage in stages]
        if job.optim.fused_backward:
            options: Any = {
                "readable": False,
                "clipping": self.clipping,
                "micro_batches": min(2, job.micro_batches),
            }
            self.in_backward = OptimizerInBackward(trained.optimizer, job.optim.lr, **options)
        if isinstance(passes, str):
            with self.in_backward or nullcontext():
                measured.end = self._micro_batch(
                    batch, measured.forward, measured.backward, only_forward=passes == "forward"
                )
                if job.micro_batches > 1:
                    self._micro_batch(batch, [], measured.again)
        else:
            for name in passes:
                parameter = trained.optimizer.parameters[name]
                parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
        read = {name for name, p in trained.optimizer.parameters.items() if p.grad is not None}
        read |= {*self.in_backward.updated} if self.in_backward else set()
        measured.updated = frozenset(read)
        if job.uniform:
            measured.static = [self._static(stage, read) for stage in stages]
        if updates:
            measured.update = self._boundary()
            if not job.optim.fused_backward:
                self._update()
            trained.average.update(2)
            self._boundary()

    def _micro_batch(
        self,
        batch: list[Any],
        forward: list[StageMoment],
        backward: dict[int, StageMoment],
        only_forward: bool = False,
    ) -> StageMoment:
        """Run a forward and a backward, and record their boundaries. Returns the last one."""
        job, calls = self.job, AttentionCalls()

        def entered(stage: int) -> None:
            assert stage == len(forward)
            forward.append(self._boundary())
            if only_forward and stage == len(self.model.stages()):
                raise _ForwardDone

        streams = (
            job.spec.architecture.token_streams(job.arch)
            if job.execution.ranks.context > 1
            else None
        )
        engine = _Watched(
            policy=job.schedule,
            kernels=job.kernels,
            context=None if streams is None else ContextParallel(self.ranks, streams),
            router=self.model.router,
            model=self.model,
            entered=entered,
            entered_backward=lambda stage: backward.update({stage: self._boundary()}),
        )
        forward.append(self._boundary())
        # With fused_backward the optimizer runs inside of the backward.
        self.meter.is_updating = job.optim.fused_backward
        batches = [Batch(ids=[str(i) for i in range(len(batch))], items=batch)]
        updates = self.in_backward
        begin = (
            (lambda losses: None) if updates is None else (lambda losses: updates.begin_backward())
        )
        with counted_calls(calls):
            model = Model(self.model.full_model, engine, job.spec)
            context = StepContext(step=1, seed=0, flow=job.flow)
            accumulate_gradients(model, batches, context, before_backward=begin)
        self.measured.attention = tuple(sorted(calls.counts))
        return self._boundary()

    def _update(self) -> None:
        # On GPUs torch's optimizers default to foreach, which works on all parameters at once; fake
        # devices are CPUs.
        if self.job.kind == "cuda":
            for group in (
                group for part in self.trained.optimizer.parts for group in part.param_groups
            ):
                if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                    group["foreach"] = True
        self.meter.is_updating = True
        norm = total_norm(list(self.trained.optimizer.gradients().values()))
        update(self.trained.optimizer, norm, lr=self.job.optim.lr, clipping=self.clipping)
        self.meter.is_updating = False

    def _boundary(self) -> StageMoment:
        """End the open moment, and begin the next."""
        meter = self.meter
        for parameter in self.gradients:
            if parameter.grad is not None:
                meter.track(parameter.grad, "gradients")
        if self.open is not None:
            self.open.peak = Counter(
                {i: meter.peak[device] for i, device in enumerate(self.devices)}
            )
            self.open.kernels = meter.kernels
            self.open.sent, self.ranks.bytes_sent = self.ranks.bytes_sent, 0
            self.measured.peaks |= self.open.peak
        meter.restart_peak()
        meter.kernels = Counter()
        self.open = StageMoment(
            activations=Counter(
                {i: meter.live.get(d, Counter())["activations"] for i, d in enumerate(self.devices)}
            ),
            total=Counter({i: meter.total(device) for i, device in enumerate(self.devices)}),
            on_host=meter.live.get(_HOST, Counter())["activations"],
        )
        return self.open

    def _static(self, stage: nn.Module, read: Collection[str] | None = None) -> StageCost:
        """The static memory of a stage; of gradients and the optimizer for the parameters with
        these names alone, if they are known."""
        size, trained = self.meter.bytes_of, self.trained
        frozen = [p for p in stage.parameters() if not p.requires_grad] + list(stage.buffers())
        parameter_ids = {id(parameter) for parameter in stage.parameters()}
        named = {name: p for name, p in trained.parameters.items() if id(p) in parameter_ids}
        stepped = {name: p for name, p in named.items() if read is None or name in read}
        states = [
            (trained.optimizer.state_of(name), trained.optimizer.sum_of(name)) for name in stepped
        ]
        elements = [(p.numel(), p.grad_dtype or p.dtype) for p in stepped.values()]
        gradients = sum(self.meter.rounded(n * dtype.itemsize) for n, dtype in elements)
        return StageCost(
            weights=size(frozen),
            adapters=size(list(named.values())),
            gradients=0 if self.job.optim.fused_backward else gradients,
            optimizer=size(states),
            sums=size([trained.optimizer.sum_of(name) for name in stepped]),
            average=size(
                [trained.average.values[name] for name in named if name in trained.average.values]
            ),
            rows=tuple(
                ParameterRows(len(p), p.nbytes // max(1, len(p)), p.requires_grad)
                for p in stage.parameters()
                if p.ndim
            ),
        )


class Updates(NamedTuple):
    """What the optimizer's step needs of each stage that is run."""

    optimizer: tuple[int, ...]
    sums: tuple[int, ...]
    extra: tuple[int, ...]
    launches: tuple[int, ...]
    adds_up: bool


def _measured_updates(
    job: StepJob, model: ReducedModel, devices: Sequence[int], updated: frozenset[str]
) -> Updates:
    """Measure the optimizer's step of these parameters, without forward and backward. A page asks
    for it again after changes of the batch, of a policy, or of the format of frozen weights."""
    alone = replace(job, batch=(), stored={}, micro_batches=1, flow=FlowConfig()).with_execution(
        checkpointing="none", quantize="none", compute="dtype"
    )

    def measured() -> Updates:
        one = [0] * len(devices)
        return _updates(*(measure(alone, model, on, passes=updated) for on in (one, devices)))

    return measured_once(
        lambda: (_measured_updates, step_key(alone), model.indices, updated), measured
    )


def _updates(together: MeasuredStep, apart: MeasuredStep) -> Updates:
    """The same from a step on one device and one with each stage on its own."""
    assert together.update is not None
    update, together_extra = _extra(apart.update), _extra(together.update)[0]
    costs, devices = together.static, apart.stage_devices
    # Of the operations that updated all stages, the part of each by its trained tensors; 0 where
    # that is in the backward.
    trained = [sum(rows.is_trained for rows in cost.rows) for cost in costs]
    launched = together.update.kernels.total()
    return Updates(
        optimizer=tuple(cost.optimizer for cost in costs),
        sums=tuple(cost.sums for cost in costs),
        extra=tuple(
            update[device] * (cost.adapters > 0)
            for cost, device in zip(costs, devices, strict=True)
        ),
        launches=tuple(round(launched * number / max(1, sum(trained))) for number in trained),
        adds_up=2 * together_extra > sum(update.values()) + max(update.values()),
    )


def _profile(
    model: ReducedModel,
    together: MeasuredStep,
    apart: MeasuredStep | None,
    updates: Updates | None,
    like: Profile | None,
) -> Profile:
    """The profile of the whole model from the stages that were run; `like` provides the values that
    were not measured, and without `apart` what a split costs is 0."""
    costs = _stage_costs(together)
    nothing = [0] * len(costs)
    sent, freed, sent_back = (nothing,) * 3 if apart is None else _splits(costs, apart)
    costs = [replace(cost, freed_at_cut=freed[stage]) for stage, cost in enumerate(costs)]
    blocks = [1 + index for index in model.stands_for]
    head = len(costs) - 1

    def after(before: int, stage: int) -> StageCost:
        # A block after another one than when it was measured, which may offload more or less.
        more = costs[before].on_host - costs[stage - 1].on_host
        return behind(costs[stage], -more) if more else costs[stage]

    model_profile = Profile(
        embed=costs[0],
        blocks=tuple(after(before, stage) for before, stage in pairwise((0, *blocks))),
        head=costs[head],
        crossing=tuple(sent[stage] for stage in (*blocks, head)),
        crossing_back=tuple(sent_back[stage] for stage in (*blocks, head)),
        targets=apart.forward[1].activations[apart.stage_devices[head]]
        if apart and apart.stage_devices[head]
        else 0,
        attention=together.attention,
    )
    if like is None:
        assert updates is not None
        model_profile = replace(model_profile, update_adds_up=updates.adds_up)
        rows = list(zip(*updates[:4], strict=True))
        of_stages = [rows[stage] for stage in (0, *blocks, head)]
    else:
        model_profile = replace(
            model_profile, crossing_back=like.crossing_back, update_adds_up=like.update_adds_up
        )
        of_stages = [
            (cost.optimizer, cost.sums, cost.update_extra, cost.update_launches)
            for cost in like.stages
        ]
    stages = [
        replace(cost, optimizer=state, sums=sums, update_extra=extra, update_launches=launched)
        for cost, (state, sums, extra, launched) in zip(
            model_profile.stages, of_stages, strict=True
        )
    ]
    return replace(model_profile, embed=stages[0], blocks=tuple(stages[1:-1]), head=stages[-1])


def _extra(moment: StageMoment | None) -> dict[int, int]:
    assert moment is not None
    return {device: peak - moment.total[device] for device, peak in moment.peak.items()}


def _stage_costs(measured: MeasuredStep) -> list[StageCost]:
    """The costs of each stage in the step on one device."""
    assert measured.end is not None
    forward, backward, again = measured.forward, measured.backward, measured.again
    head = len(forward) - 2
    order = list(backward)
    costs = []
    # Each figure is the difference between two boundaries, so that it does not include the other
    # stages.
    for stage, static in enumerate(measured.static):
        entered, following = forward[stage], forward[stage + 1] if stage < head else backward[head]
        moments = forward[stage : stage + (2 if stage == head else 1)]  # the loss is the head's
        highest = max(moment.peak[0] for moment in moments)
        cost = replace(
            static,
            kept=following.activations[0] - entered.activations[0],
            forward_extra=highest - entered.total[0],
            kernels_forward=counts_of(moments),
            on_host=following.on_host - entered.on_host if 0 < stage < head else 0,
            sent_forward=entered.sent,
        )
        if stage in backward:
            position = order.index(stage)
            here = backward[stage]
            then = backward[order[position + 1]] if position + 1 < len(order) else measured.end
            second = again.get(stage, here)
            cost = replace(
                cost,
                released=here.activations[0] - then.activations[0],
                backward_extra=here.peak[0] - here.total[0],
                backward_extra_again=second.peak[0] - second.total[0],
                kernels_backward=counts_of([here]),
                sent_backward=here.sent,
            )
        costs.append(cost)
    return costs


def _splits(
    costs: Sequence[StageCost], apart: MeasuredStep
) -> tuple[list[int], list[int], list[int]]:
    """Bytes by stage: sent to it, freed by its device if the next stage is on another one, and
    gradients sent back from it."""
    stage_devices, after = apart.stage_devices, apart.forward[-1]
    sent, freed, sent_back = ([0] * len(costs) for _ in range(3))
    for stage in range(1, len(costs)):
        before, here = stage_devices[stage - 1], stage_devices[stage]
        if before == here:
            continue
        sent[stage] = apart.forward[stage].activations[here]
        first = stage_devices.index(before)
        # The first block of a device does not offload for its predecessor, which is on another
        # device.
        alone = costs[first - 1].on_host if first else 0
        kept = sent[first] + alone + sum(cost.kept for cost in costs[first:stage])
        freed[stage - 1] = kept - after.activations[before]
        if stage - 1 in apart.backward:
            sent_back[stage] = (
                apart.backward[stage - 1].activations[before] - after.activations[before]
            )
    return sent, freed, sent_back
