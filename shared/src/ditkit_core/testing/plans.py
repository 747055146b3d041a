"""Checks at full size for any package: a plan from a few blocks, against the step of all blocks on
fake tensors."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.execution import Execution
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.memory import Budget, DevicePlan, Partition, Profile, compose
from ditkit_core.planner.memory_tracker import MemoryTracker
from ditkit_core.planner.planned_step import StepJob as Job
from ditkit_core.planner.profiler import MeasuredStep, measure, profile
from ditkit_core.planner.reduced_model import reduced_model
from ditkit_core.planner.workload import PLAIN, Workload
from ditkit_core.testing.pretend_devices import PretendDevices, divide
from ditkit_core.testing.world import make_model
from ditkit_core.training.train_step import StepContext, accumulate_gradients


def step_of(spec: ModelSpec, arch: Any, size: tuple[int, int, int], adapter: AdapterConfig) -> Job:
    """A step on one item, with the settings that are the default; full fine-tuning in fp32, as a
    run demands.

    Args:
        spec: The family.
        arch: The architecture.
        size: Frames, height and width of the item, in pixels.
        adapter: What is trained.
    """
    with torch.device("meta"):
        item = spec.training.empty_item(arch, size, [])
    precision = Precision(matmul=torch.float32 if adapter.method == "full" else torch.bfloat16)
    execution = Execution(kernels="torch", precision=precision)
    return Job(spec=spec, arch=arch, batch=[item], execution=execution, adapter=adapter)


def divided(num_blocks: int, cuts: Sequence[int], streamed: Collection[int] = ()) -> Partition:
    """Blocks over one device more than there are cuts.

    Args:
        num_blocks: Of the model.
        cuts: Blocks before which the next device begins.
        streamed: Blocks whose weights stay on the host.
    """
    bounds = [0, *cuts, num_blocks]
    devices = tuple(
        device for device in range(len(cuts) + 1) for _ in range(bounds[device], bounds[device + 1])
    )
    return Partition(devices=devices, streamed=frozenset(streamed))


def planned(
    step_profile: Profile, division: Partition, work: Workload = PLAIN
) -> tuple[DevicePlan, ...]:
    """The plan for devices of unlimited memory, without the memory of libraries.

    Args:
        step_profile: Profile of the stages.
        division: Devices of the stages.
        work: Micro-batches of the step.
    """
    budgets = [
        Budget(name=str(index), total=10**12, workspace=0)
        for index in range(1 + max(division.devices))
    ]
    return compose(step_profile, division, budgets, work)


def full_step(job: Job, cuts: Sequence[int]) -> MeasuredStep:
    """The step of all blocks on fake tensors, divided so."""
    model = reduced_model(job, of_each=None)
    return measure(job, model, [0, *divided(len(model.indices), cuts).devices, len(cuts)])


def check_plan(step_profile: Profile, job: Job, cuts: Sequence[int], *, rel: float) -> None:
    """Compare the planned peak of each device with the peak of the step of all blocks.

    Args:
        step_profile: The step's profile.
        job: The step.
        cuts: Blocks before which the next device begins.
        rel: Relative tolerance.
    """
    plans = planned(
        step_profile,
        divided(len(step_profile.blocks), cuts),
        Workload(micro_batches=job.micro_batches),
    )
    peaks, measured = [plan.peak for plan in plans], full_step(job, cuts).peaks
    for device, peak in enumerate(peaks):
        assert peak == pytest.approx(measured[device], rel=rel), (cuts, device, peaks, measured)


class _Watch:
    """Hooks that record the bytes alive before the first block and after the last."""

    def __init__(self, ledger: MemoryTracker):
        self.ledger = ledger
        self.before: int | None = None
        self.after = 0

    def pre_forward(self, index: int, block: nn.Module) -> None:
        if self.before is None:
            self.before = self._alive()

    def post_forward(self, index: int, block: nn.Module, carry: Any) -> None:
        self.after = self._alive()

    def pre_backward(self, index: int, block: nn.Module) -> None:
        pass

    def _alive(self) -> int:
        return self.ledger.live[torch.device("cpu")]["activations"]


KEPT = (
    ("none", "full"), ("full", "full"), ("attn_only", "full"), ("every_n(2)", "full"),
    ("every_n(2)", "lora"), ("attn_only", "lokr"), ("none", "loha"),
)  # fmt: skip
"""Policies and methods for `check_kept`, besides those that a package adds."""
SENT = ("none+offload", "full+offload", "attn_only+offload")
"""Policies for `check_sent`."""


def check_kept(job: Job, *, rel: float = 0.02) -> None:
    """Compare the planned bytes that blocks keep with the bytes of real tensors that stay alive on
    the CPU.

    Args:
        job: The step; small.
        rel: Relative tolerance.
    """
    job = replace(job, kind="cpu")
    model, items = _real(job)
    with MemoryTracker() as ledger:
        # of which an operation may return a view
        ledger.track([*model.parameters(), *model.buffers(), items], "weights")
        watch = _Watch(ledger)
        accumulate_gradients(
            Model(model, BlockEngine(policy=job.schedule, hooks=(watch,)), job.spec),
            [Batch(ids=["a"], items=items)],
            StepContext(step=1, seed=0, flow=job.flow),
        )
    assert watch.before is not None
    planned_bytes = sum(block.kept for block in profile(job).blocks)
    assert watch.after - watch.before == pytest.approx(planned_bytes, rel=rel), str(job.schedule)


def check_sent(job: Job, *, rel: float = 0.001) -> None:
    """Compare the planned bytes that blocks send to the host with the bytes of real tensors on a
    pretended device.

    Args:
        job: The step; small, but with storages above `offload.SMALLEST`.
        rel: Relative tolerance.
    """
    model, items = _real(job)
    divide(model, [torch.device("cpu", 1)] * (len(model.blocks()) + 2))
    engine = BlockEngine(policy=job.schedule)
    with PretendDevices():
        accumulate_gradients(
            Model(model, engine, job.spec),
            [Batch(ids=["a"], items=items)],
            StepContext(step=1, seed=0, flow=job.flow),
        )
    planned_bytes = sum(block.on_host for block in profile(job).blocks)
    assert engine.host.num_bytes > 0
    assert engine.host.num_bytes == pytest.approx(planned_bytes, rel=rel), str(job.schedule)


def _real(job: Job) -> tuple[Any, list[dict[str, Tensor]]]:
    """The step's model, and items of random numbers."""
    model = make_model(job.spec, job.arch, dtype=job.precision.matmul, adapter=job.adapter)
    return model, [
        {
            name: torch.randn(x.shape).to(x.dtype)
            if x.is_floating_point()
            else torch.zeros_like(x, device="cpu")
            for name, x in item.items()
        }
        for item in job.batch
    ]
