"""Memory and time of one training step on given devices, before anything is loaded: your own
loop's, or a run's.

step = plan(WAN, WAN.architecture.presets["ti2v-5b"], Execution(checkpointing="attn_only"), batch,
"rtx4090") step.fits, step.devices[0].peak, step.seconds, step.placement
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from torch import Tensor

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.engine.placement import Placement
from ditkit_core.execution import Execution
from ditkit_core.models.spec import ModelSpec, build_on_meta
from ditkit_core.planner.gpus import GPU
from ditkit_core.planner.memory import DevicePlan, Partition, Profile, compose, on_host, work_as_run
from ditkit_core.planner.partition import profiles_of, solve
from ditkit_core.planner.planned_step import StepJob, with_planned_kernels
from ditkit_core.planner.profiler import profile
from ditkit_core.planner.rank_layout import RankLayout
from ditkit_core.planner.rank_step import profile_of_rank, work_of_rank
from ditkit_core.planner.reduced_model import reduced_model
from ditkit_core.planner.step_time import Comparison, assumptions, both_orders, step_seconds
from ditkit_core.planner.targets import Targets, targets_of
from ditkit_core.planner.workload import Workload
from ditkit_core.training.optim.optimizers import OptimConfig

WORTH_CODES = 1.05
"""How many times as fast a step has to be with products in 8 bits, so that a plan does not advise
against them."""
_LORA, _ADAMW = AdapterConfig(), OptimConfig()


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """A training step on its devices; of several ranks, the step of one of them."""

    job: StepJob
    targets: Targets
    placement: Placement
    """Device and policy of each block, and the streamed blocks; a loader takes it."""
    profile: Profile
    """Costs of each stage; on one device, splits have none."""
    chosen: str
    """One line on the policies that a checkpointing budget chose; empty without one."""
    work: Workload
    devices: tuple[DevicePlan, ...]
    """Memory of each device: its peak, by purpose, next to its budget."""

    @cached_property
    def partition(self) -> Partition:
        """The placement by the index of each device."""
        return Partition.of(self.placement)

    @property
    def fits(self) -> bool:
        """Whether the step fits its devices and the host."""
        limit = self.targets.host
        return all(device.fits for device in self.devices) and (limit is None or self.host <= limit)

    @property
    def streamed(self) -> int:
        """Bytes of streamed weights in page-locked host memory."""
        return on_host(self.profile, self.partition.streamed)

    @property
    def host(self) -> int:
        """Bytes in page-locked host memory: streamed weights and offloaded activations."""
        return self.streamed + sum(device.host for device in self.devices)

    @property
    def flops(self) -> int:
        """Floating-point operations of the step, recomputes included."""
        stages = self.profile.stages
        return self.work.micro_batches * sum(
            stage.flops_forward + stage.flops_backward for stage in stages
        )

    @cached_property
    def seconds(self) -> float | None:
        """Estimated time of the step, without exchanges between ranks; None on a CPU, whose rates
        are unknown."""
        gpus = self.targets.gpus
        return step_seconds(self.profile, self.partition, gpus, self.work) if gpus else None

    @property
    def orders(self) -> Comparison | None:
        """Utilisation of the devices with and without `pipelined`; None where nothing can overlap,
        or no rate is known."""
        overlaps = self.targets.gpus and not self.job.optim.fused_backward
        return (
            both_orders(self.profile, self.partition, self.targets.gpus, self.work)
            if overlaps
            else None
        )

    @property
    def rates(self) -> tuple[str, ...]:
        """The rates that the time is estimated from, a line for each GPU."""
        return tuple(assumptions(self.targets.gpus, self.work)) if self.targets.gpus else ()


def plan(
    spec: ModelSpec,
    arch: Any,
    execution: Execution,
    batch: Sequence[Mapping[str, Tensor]],
    gpus: str = "",
    *,
    adapter: AdapterConfig = _LORA,
    optim: OptimConfig = _ADAMW,
    micro_batches: int = 1,
) -> StepPlan:
    """Plan a training step: seconds, no weights, and no GPU.

    Args:
        spec: The family.
        arch: An architecture of it, such as `spec.architecture.presets[NAME]`.
        execution: How the step runs. `checkpointing="budget"` is resolved, and split points are
            chosen where none are set.
        batch: One micro-batch: training items, whose shapes alone count; `spec.training.empty_item`
            makes one.
        gpus: The GPUs to plan for, as `rtx4090,rtx3090` or `2x24GiB`; empty for the devices of
            `execution` on this machine.
        adapter: What is trained.
        optim: The optimizer.
        micro_batches: Number accumulated in a step, at least 1.

    Raises:
        UserError: If a GPU is unknown, the execution does not fit the model, or a budget is too
            small.
    """
    targets = targets_of(execution, gpus)
    job = StepJob(
        spec=spec,
        arch=arch,
        batch=[{name: tensor.to("meta") for name, tensor in item.items()} for item in batch],
        execution=with_planned_kernels(execution, targets.kind, targets.gpus),
        adapter=adapter,
        optim=optim,
        micro_batches=micro_batches,
        kind=targets.kind,
    )
    return plan_step(job, targets)


def plan_step(job: StepJob, targets: Targets, layout: RankLayout | None = None) -> StepPlan:
    """Plan a step, with all its micro-batches, on the devices of one process; with a layout, of one
    of the ranks that divide it."""
    splits = len(targets.devices) > 1 or job.schedule.uniform is None
    profiles, work = profiles_of(job, splits=splits), job.work
    profile_of = profiles
    if layout is not None:
        work = work_of_rank(job.work, layout, adapts=not job.trains_all)
        profile_of = cache(
            lambda policy: profile_of_rank(profiles(policy), layout, job.precision.reduction)
        )
    if targets.kind == "cuda" or len(targets.budgets) == 1:
        model = build_on_meta(job.spec, job.arch, job.precision)
    else:  # with its adapters, because the split by weights counts trained parameters
        model = reduced_model(job, of_each=None).full_model
    placement, costs, chosen = solve(job, model, targets, work, profile_of)
    division = Partition.of(placement)
    work = work_as_run(costs, division, targets.gpus, work)
    return StepPlan(
        job=job,
        targets=targets,
        placement=placement,
        profile=costs,
        chosen=chosen,
        work=work,
        devices=compose(costs, division, targets.budgets, work),
    )


def notes_on_codes(
    job: StepJob, costs: Profile, division: Partition, gpus: Sequence[GPU], work: Workload
) -> Iterator[str]:
    """What `base.compute` gains of a step's time, which it pays for with accuracy; nothing without
    it, or without rates."""
    if job.execution.compute == "dtype" or not gpus:
        return
    splits = len(division.blocks) > 1
    exact = profile(job.with_execution(compute="dtype"), like=costs, splits=splits)
    gain = step_seconds(exact, division, gpus, work) / step_seconds(costs, division, gpus, work)
    advice = (
        ""
        if gain >= WORTH_CODES
        else ": too little for the accuracy that it costs, so leave it out here"
    )
    yield f"base.compute = {job.execution.compute} makes a step {gain:.2f} times as fast by this estimate{advice}"
