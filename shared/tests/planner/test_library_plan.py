"""Two programs of a person with a loop of their own: a plan without a run, and a split or streamed model by memory."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.config.sizes import GIB
from ditkit_core.errors import UserError
from ditkit_core.execution import Execution
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import build_on_meta
from ditkit_core.planner.gpus import parse_gpus
from ditkit_core.planner.partition import budgets_of, placement_of
from ditkit_core.planner.plan import StepPlan, plan, plan_step, targets_of
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.planner.search.fit import fitted
from ditkit_core.planner.step_time import step_seconds
from ditkit_core.testing.toy import TOY, ToyArch

ARCH = ToyArch(dim=256, depth=5)


def batch() -> list[dict[str, torch.Tensor]]:
    with torch.device("meta"):
        return [TOY.training.empty_item(ARCH, (9, 64, 64), ())]


def planned(execution: Execution, gpus: str, **others: Any) -> StepPlan:
    return plan(TOY, ARCH, execution, batch(), gpus, adapter=AdapterConfig(rank=4), **others)


# begin: plan my step on that GPU
def plan_my_step() -> StepPlan:
    with torch.device("meta"):
        item = TOY.training.empty_item(ARCH, (9, 64, 64), ())
    execution = Execution(checkpointing="attn_only")
    step = plan(TOY, ARCH, execution, [item], "rtx4090", adapter=AdapterConfig(rank=4))
    print(f"{step.devices[0].peak / GIB:.2f} GiB, {step.seconds:.3f} s, {'fits' if step.fits else 'does not fit'}")
    return step


# begin: split or stream my model by memory
def split_or_stream(gpus: str) -> Execution:
    step = plan(TOY, ARCH, Execution(checkpointing="full"), batch(), gpus, adapter=AdapterConfig(rank=4))
    return step.job.execution if step.fits else fitted(step)


# end


@pytest.mark.usefixtures("equal_steps_are_profiled_once")
def test_a_step_is_planned_for_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    step = plan_my_step()
    assert capsys.readouterr().out.endswith(" s, fits\n")
    assert step.devices[0].budget.total == parse_gpus("rtx4090")[0].total
    assert step.seconds == step_seconds(step.profile, step.partition, parse_gpus("rtx4090"), step.work)
    assert step.job.execution.kernels == "triton", "what `auto` is on such a GPU"
    assert step.flops > 0 and step.placement.split_points == ()


@pytest.mark.usefixtures("equal_steps_are_profiled_once")
def test_full_checkpointing_needs_less_memory_and_more_time() -> None:
    none, full = (planned(Execution(checkpointing=policy), "24GiB") for policy in ("none", "full"))
    assert full.devices[0].peak < none.devices[0].peak
    assert (
        full.seconds is not None
        and none.seconds is not None
        and full.seconds > none.seconds
        and full.flops > none.flops
    )


@pytest.mark.usefixtures("equal_steps_are_profiled_once")
def test_a_plan_splits_and_streams_as_it_is_asked_to() -> None:
    execution = Execution(
        devices=("cuda:0", "cuda:1"), split_points=(3,), swap_blocks=(1, 2), checkpointing="none, cuda:1=full"
    )
    step = planned(execution, "24GiB,16GiB")
    assert step.placement.split_points == (3,) and len(step.placement.streamed) == 3
    assert step.host == step.streamed > 0
    assert str(step.placement.checkpointing) == "0-2=none, 3-4=full", "by blocks, as the engine takes it"


def on_a_gpu_of(step: StepPlan, num_bytes: int) -> StepPlan:
    """The same step on a GPU with so many bytes for it."""
    (gpu,) = step.targets.gpus
    gpus = (replace(gpu, total=gpu.reserve + num_bytes),)
    return plan_step(step.job, replace(step.targets, gpus=gpus, budgets=budgets_of(gpus)))


@pytest.mark.usefixtures("equal_steps_are_profiled_once")
def test_a_model_that_does_not_fit_is_streamed_until_it_does() -> None:
    step = planned(Execution(checkpointing="full"), "24GiB")
    assert step.fits and split_or_stream("24GiB") == step.job.execution
    workspace = step.devices[0].budget.workspace
    small = on_a_gpu_of(step, workspace + int(0.85 * (step.devices[0].peak - workspace)))
    assert not small.fits
    execution = fitted(small)
    assert execution.swap_blocks or execution.quantize != "none"
    assert plan_step(replace(step.job, execution=execution), small.targets).fits


@pytest.mark.slow
@pytest.mark.usefixtures("equal_steps_are_profiled_once")
def test_where_nothing_fits_the_bytes_that_lack_are_named() -> None:
    step = planned(Execution(checkpointing="full"), "24GiB")
    with pytest.raises(UserError, match="nothing fits: the fullest GPU, or the host, still lacks"):
        fitted(on_a_gpu_of(step, step.devices[0].budget.workspace))


@pytest.mark.usefixtures("equal_steps_are_profiled_once")
def test_a_placement_on_this_machine_is_the_one_of_its_plan() -> None:
    """Two devices of the host, which are split by weights."""
    execution = Execution(devices=("cpu", "cpu:1"), checkpointing="full", precision=Precision(matmul=torch.float32))
    step = planned(execution, "")
    assert step.seconds is None and step.rates == () and step.targets.kind == "cpu"
    job = StepJob(spec=TOY, arch=ARCH, batch=batch(), execution=execution, adapter=AdapterConfig(rank=4), kind="cpu")
    model = build_on_meta(TOY, ARCH, execution.precision)
    placement = placement_of(model, job)
    assert (
        placement.checkpointing == execution.schedule and placement_of(model, job, training=False).checkpointing is None
    )
    assert len(placement.split_points) == 1 and [
        plan.peak for plan in plan_step(job, targets_of(execution)).devices
    ] == [plan.peak for plan in step.devices]
    with pytest.raises(UserError, match="this plan is for a CPU"):
        fitted(step)
