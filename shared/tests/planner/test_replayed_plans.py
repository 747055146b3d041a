"""Plans of steps that are replayed as CUDA graphs: their gradients exist all the time, and graphs
keep the memory of their activations."""

import functools
from dataclasses import replace

import pytest
from made_profiles import MIB, made_profile
from toy_jobs import toy_job

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.data.config import DataConfig
from ditkit_core.execution import Execution
from ditkit_core.models.paths import ModelPaths
from ditkit_core.planner.ac_budget import BudgetTask, choose
from ditkit_core.planner.fit import fit, shortest_seconds
from ditkit_core.planner.gpus import GPU, parse_gpus
from ditkit_core.planner.memory import (
    Budget,
    DevicePlan,
    Partition,
    Profile,
    StageCost,
    compose,
    work_as_run,
)
from ditkit_core.planner.memory_tracker import Kernel, KernelCounts
from ditkit_core.planner.profiler import profile
from ditkit_core.planner.search import Candidate, FitTask
from ditkit_core.planner.step_time import step_seconds
from ditkit_core.planner.workload import CudaGraphs, RankGradients, Round, Workload
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.plans.planned_step import Bucket, job_of, num_kinds
from ditkit_core.testing.plans import divided
from ditkit_core.testing.toy import TOY
from ditkit_core.training.replay import MOST

pytestmark = pytest.mark.usefixtures("equal_steps_are_profiled_once")

(H100,) = parse_gpus("h100")
WHOLE = divided(4, ())
QUICK: KernelCounts = frozenset({(Kernel("matmul_16", 10**6, 10**4), 20)})
"""Kernels for which an H100 needs a twentieth of the time that its host takes to launch them."""
LONG: KernelCounts = frozenset({(Kernel("matmul_16", 10**12, 10**4), 20)})


def blocks_of(kernels: KernelCounts = QUICK, **costs: int) -> Profile:
    block = StageCost(
        kept=10, released=10, forward_extra=15, backward_extra=9, backward_extra_again=9,
        gradients=7, kernels_forward=kernels,
        kernels_backward=kernels,
    )  # fmt: skip
    end = StageCost(kept=2, released=2)
    return Profile(
        embed=end,
        blocks=(replace(block, **costs),) * 4,
        head=end,
        crossing=(0,) * 5,
        crossing_back=(0,) * 5,
        inputs=3,
    )


def planned(
    found: Profile,
    division: Partition = WHOLE,
    rates: GPU | None = H100,
    cuda_graphs: CudaGraphs = "on",
    **work,
) -> DevicePlan:
    budgets = [Budget(name="", total=10**9, workspace=0, rates=rates)] * len(division.blocks)
    return compose(found, division, budgets, Workload(cuda_graphs=cuda_graphs, **work))[0]


def bytes_of(plan: DevicePlan) -> tuple[int, int]:
    return plan.purposes["activations"], plan.purposes["gradients"]


def test_gradients_of_a_replayed_step_exist_at_its_peak():
    found = blocks_of()
    assert bytes_of(planned(found, cuda_graphs="off")) == (51, 0), (
        "the last block's backward, before any gradient"
    )
    assert bytes_of(planned(found)) == (51 + 3, 28)


def test_each_kind_of_micro_batch_has_its_inputs():
    assert planned(blocks_of(), kinds=5).peak - planned(blocks_of()).peak == 4 * 3
    assert planned(blocks_of(), kinds=5, cuda_graphs="off") == planned(
        blocks_of(), cuda_graphs="off"
    )


def test_what_runs_between_replays_finds_no_room_in_the_memory_of_graphs():
    """An update, the exchange of gradients, and the forward of a validation."""
    updated = blocks_of(update_extra=6)
    assert bytes_of(planned(updated, cuda_graphs="off")) == (51, 0)
    assert bytes_of(planned(updated)) == (51 + 6 + 3, 28)
    assert bytes_of(planned(blocks_of(), validates=True)) == (51 + 2 + 15 + 3, 28)
    assert planned(blocks_of(), validates=True, cuda_graphs="off").peak == 51
    ranks = RankGradients(rounds=(Round(again=False),), exchanged=3)
    assert planned(blocks_of(), ranks=ranks, cuda_graphs="off").peak == 3 * 28
    assert planned(blocks_of(), ranks=ranks).peak == 51 + 3 + 3 * 28


def test_sums_of_several_micro_batches_are_next_to_the_gradients_that_stay():
    found = blocks_of()
    for micro_batches, sets in ((1, 1), (2, 1), (4, 2), (8, 3)):
        assert bytes_of(planned(found, micro_batches=micro_batches)) == (51 + 3, sets * 28), (
            micro_batches
        )


def test_what_a_run_does_not_replay_is_planned_eagerly():
    streamed, two = divided(4, (), (1,)), divided(4, (2,))
    offloaded = blocks_of(on_host=1)
    for found, division, rates in (
        (blocks_of(), two, H100),
        (blocks_of(), streamed, H100),
        (offloaded, WHOLE, H100),
        (blocks_of(), WHOLE, None),
    ):
        assert planned(found, division, rates) == planned(found, division, rates, cuda_graphs="off")
        gpus = [H100] * len(division.blocks) if rates else []
        assert work_as_run(found, division, gpus, Workload(cuda_graphs="on")).cuda_graphs == "off"


def test_auto_replays_where_the_host_takes_longer_than_the_gpu():
    for kernels, others in ((QUICK, "on"), (LONG, "off")):
        found = blocks_of(kernels)
        assert planned(found, cuda_graphs="auto") == planned(found, cuda_graphs=others)
        times = [
            step_seconds(found, WHOLE, [H100], Workload(cuda_graphs=each))
            for each in ("auto", "on", "off")
        ]
        assert times[0] == times[1 if others == "on" else 2]
        assert (times[2] > 5 * times[1]) == (kernels is QUICK)
    slow = replace(
        H100, bf16_flops=H100.bf16_flops / 1e5, memory_bandwidth=H100.memory_bandwidth / 1e5
    )
    assert planned(blocks_of(), rates=slow, cuda_graphs="auto") == planned(
        blocks_of(), rates=slow, cuda_graphs="off"
    )


def fitted(
    cuda_graphs: CudaGraphs,
    room: float,
    *,
    policy: str = "",
    kernels: KernelCounts | None = QUICK,
    **settings,
) -> Candidate:
    """What fits a GPU with so much room over an eager step, whose gradients are large.

    Args:
        room: GPU's bytes as a share of the eager step's.
        policy: Whose memory blocks have under any policy; empty for the policy's own.
        kernels: Of blocks; None for the matmuls of `made_profile`, which take longer than their
            launches.
    """

    @functools.cache
    def profile_of(asked: str, quantize: str) -> Profile:
        made = made_profile(policy or asked, quantize)
        block = replace(made.blocks[0], gradients=512 * MIB)
        if kernels is not None:
            block = replace(block, kernels_forward=kernels, kernels_backward=kernels)
        return replace(made, blocks=(block,) * len(made.blocks))

    eager = compose(profile_of("none", "none"), divided(12, ()), [H100.budget])[0].peak
    gpu, work = replace(H100, total=int(eager * room), reserve=0), Workload(cuda_graphs=cuda_graphs)
    task = FitTask(
        gpus=(gpu,), profile_of=profile_of, execution=Execution(cuda_graphs=cuda_graphs), work=work,
        quantizations=("none",), **settings,
    )  # fmt: skip
    chosen = fit(task).chosen
    assert chosen is not None and chosen.plan[0].fits and shortest_seconds(task) <= chosen.seconds
    profile, as_chosen = (
        profile_of(str(chosen.execution.checkpointing), "none"),
        task.work_of(chosen.execution),
    )
    assert chosen.plan == compose(profile, chosen.division, [gpu.budget], as_chosen)
    return chosen


def test_fit_leaves_room_for_the_gradients_of_a_replayed_step():
    for cuda_graphs, dropped in (("off", False), ("auto", False), ("on", True)):
        chosen = fitted(cuda_graphs, 1.1, kernels=None)
        assert (chosen.execution.checkpointing, chosen.drops_cuda_graphs) == ("none", dropped)
    chosen = fitted("on", 1.1)
    assert (chosen.execution.checkpointing, chosen.drops_cuda_graphs) == ("full", False), (
        "so that replays fit"
    )


@pytest.mark.parametrize("cuda_graphs", ["auto", "on"])
@pytest.mark.parametrize("streams", [False, True])
def test_fit_leaves_out_replays_where_their_memory_is_what_does_not_fit(cuda_graphs, streams):
    """All blocks of an eager step are in the GPU. Replays would have some streamed, or have nothing
    fit."""
    chosen = fitted(cuda_graphs, 1.02, policy="full", streams=streams)
    assert chosen.drops_cuda_graphs and not any(chosen.swap_blocks)
    assert not fitted(cuda_graphs, 2.0, policy="full", streams=streams).drops_cuda_graphs
    assert not fitted(cuda_graphs, 0.9, policy="full").drops_cuda_graphs, (
        "streamed blocks are never replayed"
    )


def test_a_budget_of_checkpointing_leaves_room_for_them_too():
    made = {
        policy: made_profile(policy) for policy in ("none", "attn_only", "full", "full+offload")
    }
    profiles = {
        policy: replace(found, blocks=(replace(found.blocks[0], gradients=512 * MIB),) * 12)
        for policy, found in made.items()
    }
    eager = compose(profiles["none"], divided(12, ()), [H100.budget])[0].peak
    limit = replace(H100.budget, total=eager, reserve=0)
    for cuda_graphs, recomputed in (("off", 0), ("on", 6)):
        task = BudgetTask(
            profile_of=lambda policy: profiles[str(policy)], division=divided(12, ()),
            budgets=(limit,), gpus=(H100,),
            work=Workload(cuda_graphs=cuda_graphs),
        )  # fmt: skip
        choice = choose(task)
        assert all(plan.fits for plan in choice.plans)
        assert len(
            [policy for policy in choice.policies if str(policy) != "none"]
        ) == pytest.approx(recomputed, abs=1)


def test_a_profile_says_how_large_a_micro_batch_is():
    job = toy_job(adapter=AdapterConfig(rank=4, targets=("qkv",)))
    (item,) = job.batch
    assert (
        profile(job, splits=False).inputs
        == sum(x.nbytes for x in item.values()) + 2 * item["latents"].nbytes
    )


def test_each_shape_of_data_that_are_here_is_a_kind_of_micro_batch(tmp_path):
    sizes = [((1, 8 * side, 64), ()) for side in range(1, 40)]
    run = create_run(
        TOY,
        RunConfig(model=ModelPaths(preset="tiny"), data=DataConfig(folder=str(tmp_path / "data"))),
    )

    def kinds(shapes, class_shapes=()) -> int:
        bucket = Bucket(
            size=(1, 64, 64),
            references=(),
            items=[],
            shapes=tuple(shapes),
            class_shapes=tuple(class_shapes),
            source="",
        )
        assert job_of(run, run.arch, run.config.adapter, bucket, "cuda").work.kinds == num_kinds(
            run.config.data, bucket
        )
        return num_kinds(run.config.data, bucket)

    assert (
        kinds(sizes) == 1 == job_of(run, run.arch, run.config.adapter, None, "cuda").work.kinds
    ), "what a configuration may have at most is not what data have"
    (tmp_path / "data").mkdir()
    assert kinds(sizes[:3], sizes[2:4]) == 4 and kinds(sizes) == MOST
