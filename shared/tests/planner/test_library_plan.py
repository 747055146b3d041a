"""Plans without a run, of the core's own model. `tests/test_library.py` has the programs, and
`api/test_plan.py` what is changed until it fits."""

from typing import Any

import pytest
import torch

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.errors import UserError
from ditkit_core.execution import Execution
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import build_on_meta
from ditkit_core.planner.fit import fitted
from ditkit_core.planner.partition import placement_of
from ditkit_core.planner.plan import StepPlan, plan, plan_step
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.planner.targets import targets_of
from ditkit_core.testing.toy import TOY, ToyArch

ARCH = ToyArch(dim=256, depth=5)
ADAPTER = AdapterConfig(rank=4, targets=("qkv",))


def batch() -> list[dict[str, torch.Tensor]]:
    with torch.device("meta"):
        return [TOY.training.empty_item(ARCH, (9, 64, 64), ())]


def planned(execution: Execution, gpus: str, **others: Any) -> StepPlan:
    return plan(TOY, ARCH, execution, batch(), gpus, adapter=ADAPTER, **others)


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
        devices=("cuda:0", "cuda:1"),
        split_points=(3,),
        swap_blocks=(1, 2),
        checkpointing="none, cuda:1=full",
    )
    step = planned(execution, "24GiB,16GiB")
    assert step.placement.split_points == (3,) and len(step.placement.streamed) == 3
    assert step.host == step.streamed > 0
    assert str(step.placement.checkpointing) == "0-2=none, 3-4=full", (
        "by blocks, as the engine takes it"
    )


@pytest.mark.usefixtures("equal_steps_are_profiled_once")
def test_a_placement_on_this_machine_is_the_one_of_its_plan() -> None:
    """Two devices of the host, which are split by weights."""
    execution = Execution(
        devices=("cpu", "cpu:1"), checkpointing="full", precision=Precision(matmul=torch.float32)
    )
    step = planned(execution, "")
    assert step.seconds is None and step.rates == () and step.targets.kind == "cpu"
    job = StepJob(
        spec=TOY,
        arch=ARCH,
        batch=batch(),
        execution=execution,
        adapter=ADAPTER,
        kind="cpu",
    )
    model = build_on_meta(TOY, ARCH, execution.precision)
    placement = placement_of(model, job)
    assert (
        placement.checkpointing == execution.schedule
        and placement_of(model, job, training=False).checkpointing is None
    )
    assert len(placement.split_points) == 1 and [
        plan.peak for plan in plan_step(job, targets_of(execution)).devices
    ] == [plan.peak for plan in step.devices]
    with pytest.raises(UserError, match="this plan is for a CPU"):
        fitted(step)
