"""A budget for checkpointing: against looking at every way, and as a run and its plan resolve
it."""

import functools
import itertools
import random
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from made_profiles import products
from toy_world import World, equal

from ditkit_core.config.resolve import resolve
from ditkit_core.config.sizes import GIB
from ditkit_core.engine.ac_policies import AttentionOnly, Full, Policy
from ditkit_core.engine.ac_schedule import parse_schedule
from ditkit_core.errors import UserError
from ditkit_core.execution import Execution
from ditkit_core.models.spec import build_on_meta
from ditkit_core.planner import targets
from ditkit_core.planner.ac_budget import BudgetTask, choose, limited
from ditkit_core.planner.memory import Budget, ParameterRows, Profile, StageCost
from ditkit_core.planner.report import plan_json
from ditkit_core.planner.workload import Workload
from ditkit_core.run.checks import check_training
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run
from ditkit_core.run.plans.plan import make_report, planned_step
from ditkit_core.run.plans.planned_step import place_run
from ditkit_core.testing.plans import divided, full_step
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch

MIB = 2**20
NONE, ATTENTION, FULL, OFFLOADED = Policy(), AttentionOnly(), Full(), Full(offload=True)


def made(policy: Policy, seed: int, num_blocks: int) -> Profile:
    """Blocks of two kinds, with figures sampled at random that keep to what policies do: what is
    not kept is made again in the backward."""
    draw = random.Random(seed)
    whole = [draw.randint(200, 900) for _ in range(2)]
    carry, attention = draw.randint(10, 60), [draw.randint(5, 60) for _ in range(2)]
    scratch, extra = draw.randint(0, 200), draw.randint(0, 300)
    flops = [draw.randint(5, 20) for _ in range(2)]
    border = draw.randint(0, num_blocks)
    gradients = draw.choice((0, draw.randint(0, 80)))
    blocks = []
    for kind in range(2):
        kept = {"none": whole[kind], "attn_only": carry + attention[kind], "full": carry}[
            policy.kind
        ]
        again = {"none": 0, "attn_only": flops[kind] // 2, "full": flops[kind]}[policy.kind]
        sent = carry if policy.offload else 0
        blocks.append(
            StageCost(
                weights=100 * MIB,
                rows=(ParameterRows(1, 100 * MIB, False),),  # a block without any has no policy
                adapters=gradients * MIB,
                gradients=gradients * MIB,
                optimizer=2 * gradients * MIB,
                kept=(kept - sent) * MIB,
                released=(kept - sent) * MIB,
                freed_at_cut=0 if policy.kind == "attn_only" and seed % 2 else carry * MIB,
                on_host=sent * MIB,
                forward_extra=(max(kept, scratch) + 20) * MIB,
                backward_extra=(whole[kind] - kept + sent + extra) * MIB,
                backward_extra_again=(whole[kind] - kept + sent + extra + 2) * MIB,
                kernels_forward=products(flops[kind] * 10**12),
                kernels_backward=products((2 * flops[kind] + again) * 10**12),
            )
        )
    end = StageCost(
        weights=50 * MIB,
        kept=30 * MIB,
        released=30 * MIB,
        forward_extra=160 * MIB,
        backward_extra=90 * MIB,
    )
    stages = [blocks[i >= border] for i in range(num_blocks)]
    # What a block passes on is freed by its own backward if it holds that itself, else by the
    # backward of what comes behind it.
    holds = blocks[0].freed_at_cut == 0
    if holds:
        stages[0] = replace(stages[0], released=stages[0].released + carry * MIB)
    return Profile(
        embed=replace(end, kept=(30 + carry) * MIB),
        blocks=tuple(stages),
        head=end if holds else replace(end, released=(30 + carry) * MIB),
        crossing=(carry * MIB,) * (num_blocks + 1),
        crossing_back=(carry * MIB,) * (num_blocks + 1),
        attention=("self",),
    )


def task_of(seed: int, num_blocks: int, cuts: tuple[int, ...], **settings) -> BudgetTask:
    profiles = functools.cache(lambda policy: made(policy, seed, num_blocks))
    budgets = tuple(Budget(name=str(i), total=2**62, workspace=0) for i in range(len(cuts) + 1))
    return BudgetTask(
        profile_of=profiles,
        division=divided(num_blocks, cuts),
        budgets=budgets,
        work=Workload(**settings),
    )


def recomputed(task: BudgetTask, policies) -> int:
    return sum(
        task.profile_of(policy).blocks[i].flops_backward for i, policy in enumerate(policies)
    )


def every_way(task: BudgetTask, menu) -> list[tuple[int, int]]:
    """(bytes on the host, recomputed) of all ways that fit."""
    found = []
    for policies in itertools.product(menu, repeat=len(task.division.devices)):
        plans = task.plan(policies)
        if all(plan.fits for plan in plans):
            found.append((sum(plan.host for plan in plans), recomputed(task, policies)))
    return found


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))]
)
def test_no_other_policies_that_fit_recompute_less(seed):
    draw = random.Random(100 + seed)
    num_blocks = draw.randint(4, 6)
    cuts = () if seed % 3 else (draw.randint(1, num_blocks - 1),)
    several = {"micro_batches": 3, "execution": Execution(pipelined=True)}
    settings = ({}, {"micro_batches": 2}, several)[seed % 4 % 3]
    task = task_of(seed, num_blocks, cuts, **settings)
    most, least = (task.plan((policy,) * num_blocks) for policy in (NONE, FULL))
    for share in (0.0, 0.3, 0.6, 0.9):
        budgets = tuple(
            replace(budget, total=int(min(a.peak, b.peak) + share * abs(a.peak - b.peak)))
            for budget, a, b in zip(task.budgets, most, least, strict=True)
        )
        bound = replace(task, budgets=budgets)
        ways = every_way(bound, (NONE, ATTENTION, FULL))
        assert ways, "full itself fits"
        chosen = choose(bound)
        assert all(plan.fits for plan in chosen.plans)
        assert not any(policy.offload for policy in chosen.policies)
        assert recomputed(bound, chosen.policies) == min(flops for _, flops in ways)


def test_a_block_that_keeps_is_at_the_end():
    """Where it is, is no matter of arithmetic: with it in front the same budget is not kept."""
    task = task_of(1, 6, ())
    front, end = task.plan((NONE, *(FULL,) * 5)), task.plan((*(FULL,) * 5, NONE))
    assert end[0].peak < front[0].peak
    chosen = choose(replace(task, budgets=(replace(task.budgets[0], total=end[0].peak),))).policies
    weights = [{"none": 2, "attn_only": 1, "full": 0}[policy.kind] for policy in chosen]
    assert weights == sorted(weights) and weights[-1] > 0


def test_activations_go_to_the_host_only_where_full_does_not_fit_and_no_more_than_need_be():
    task = task_of(2, 4, ())
    full, offloaded = (task.plan((policy,) * 4)[0].peak for policy in (FULL, OFFLOADED))
    for share in (0.0, 0.5, 0.99):
        budget = replace(task.budgets[0], total=int(offloaded + share * (full - offloaded)))
        bound = replace(task, budgets=(budget,))
        chosen = choose(bound)
        host = sum(plan.host for plan in chosen.plans)
        assert 0 < host == min(every_way(bound, (NONE, ATTENTION, FULL, OFFLOADED)))[0]
        with pytest.raises(UserError, match="the host lacks"):
            choose(replace(bound, host=host - 1, budgets=(replace(budget, total=offloaded),)))
    with pytest.raises(UserError, match="nothing fits.*full for all blocks 0 lacks") as refusal:
        choose(
            replace(task, can_offload=False, budgets=(replace(task.budgets[0], total=full - 1),))
        )
    assert "\n" not in str(refusal.value)


def test_profiles_are_made_only_where_they_can_matter():
    asked = []
    task = task_of(3, 4, ())
    profile_of = task.profile_of
    choose(replace(task, profile_of=lambda policy: asked.append(policy) or profile_of(policy)))
    assert set(asked) == {NONE}


def test_forty_blocks_are_chosen_for_in_no_time():
    task = task_of(4, 40, ())
    most, least = (task.plan((policy,) * 40)[0].peak for policy in (NONE, FULL))
    task = replace(task, budgets=(replace(task.budgets[0], total=(most + least) // 2),))
    began = time.process_time()
    chosen = choose(task)
    assert time.process_time() - began < 20
    assert chosen.plans[0].fits and 1 < len(set(chosen.policies))
    assert chosen == choose(task)


def test_sizes_are_of_each_device_or_of_all():
    budgets = (Budget(name="a", total=30 * GIB, reserve=2 * GIB), Budget(name="b", total=10 * GIB))
    assert [budget.total for budget in limited(budgets, ("20GiB",))] == [20 * GIB, 10 * GIB]
    assert [budget.total for budget in limited(budgets, ("29GiB", "1GiB"))] == [28 * GIB, GIB]
    assert limited(budgets, ()) == budgets
    for sizes in (("1GiB",) * 3, ("much",)):
        with pytest.raises(UserError, match=r"train\.checkpointing = budget"):
            limited(budgets, sizes)


DEEP = altered(TOY, presets={**TOY.architecture.presets, "deep": ToyArch(dim=64, depth=8)})


def run_of(policy: str, **flags) -> RunContext:
    named = {
        "model.preset": "deep", "data.frames": 5, "data.height": 64, "data.width": 64,
        "adapter.rank": 2, "adapter.targets": ("qkv",), "train.device": "cpu",
        "train.checkpointing": policy, "sample.captions": 0, **flags,
    }  # fmt: skip
    return create_run(DEEP, resolve(RunConfig, flags=named))


def resolved(run: RunContext):
    arch = ToyArch(dim=64, depth=8)
    model = build_on_meta(run.spec, arch, run.precision)
    unloaded = SimpleNamespace(
        module=model, origin=SimpleNamespace(arch=arch, adapter=run.config.adapter)
    )
    return place_run(run, unloaded, training=True)


@pytest.mark.usefixtures("equal_steps_are_profiled_once")
@pytest.mark.slow
def test_a_run_has_the_policies_of_its_plan_and_holds_no_more_than_the_budget(monkeypatch, capsys):
    peaks = [make_report(run_of(policy)).devices[0].peak for policy in ("full", "none")]
    free = sum(peaks) // 2
    monkeypatch.setattr(targets, "free_memory_bytes", lambda device: free)
    report = make_report(run_of("budget"))
    capsys.readouterr()
    placed = resolved(run_of("budget"))
    assert report.policy == str(placed.checkpointing) == plan_json(report)["checkpointing"]
    said = capsys.readouterr().out
    assert (
        report.step.chosen in said
        and f"train.checkpointing = budget chose {report.policy}: " in said
    )
    assert len(set(parse_schedule(report.policy).policies([None] * 8))) > 1
    assert report.fits and peaks[0] < report.devices[0].peak <= free
    job = planned_step(run_of("budget"), "cpu").job.with_execution(checkpointing=report.policy)
    assert full_step(job, ()).peaks[0] == report.devices[0].peak


COMPUTED = {"train.kernels": "triton", "base.quantize": "fp8", "base.compute": "fp8"}


def test_a_plan_has_the_kernels_of_its_run_and_the_format_that_its_base_is_multiplied_in():
    """Its step, for the memory; and the amount of work, for the time."""
    run = run_of("full", **COMPUTED)
    job = planned_step(run, "cuda").job
    assert (job.kernels, job.quantize, job.execution.compute) == ("triton", "fp8", "fp8")
    assert job.work.execution == job.execution and job.work.kernels == "triton"


def test_a_plan_says_what_products_in_8_bits_gain():
    """Of the toy nothing, whose matmuls are smaller than the passes around them."""
    (note,) = (
        note
        for note in make_report(run_of("full", **COMPUTED), "rtx4090").notes
        if "base.compute" in note
    )
    gain = re.fullmatch(
        r"base\.compute = fp8 makes a step ([\d.]+) times as fast by this estimate: too little .*",
        note,
    )
    assert gain is not None and 0 < float(gain[1]) < 1.05
    assert not any("base.compute" in note for note in make_report(run_of("full"), "rtx4090").notes)


def test_a_plan_for_a_gpu_that_does_not_multiply_a_format_is_refused():
    with pytest.raises(
        UserError, match=r"^base\.compute = fp8: rtx3090 has no products of this format"
    ):
        make_report(run_of("full", **COMPUTED), "rtx4090,rtx3090")


@pytest.mark.slow
@pytest.mark.usefixtures("equal_steps_are_profiled_once")
def test_nothing_that_fits_is_refused_in_a_line(monkeypatch):
    monkeypatch.setattr(targets, "free_memory_bytes", lambda device: 2**16)
    for decide in (make_report, resolved):
        with pytest.raises(
            UserError, match="budget: nothing fits; with full for all blocks cpu lacks"
        ):
            decide(run_of("budget"))
    with pytest.raises(UserError, match="2 numbers for 1 devices"):
        check_training(run_of("budget(1GiB, 2GiB)"))


@pytest.mark.slow
@pytest.mark.usefixtures("equal_steps_are_profiled_once")
def test_gpus_with_names_have_policies_of_their_own():
    run = run_of("cuda:0=full, cuda:1=none")
    report = make_report(run, "2x24GiB")
    last = report.step.partition.devices.count(0) - 1
    assert report.policy == f"0-{last}=full, {last + 1}-7=none"
    assert (
        make_report(run_of(report.policy, **{"train.split_points": (last + 1,)}), "2x24GiB").devices
        == report.devices
    )
    again = make_report(run_of("budget(1GiB)"), "2x24GiB")
    assert again.policy == "none" and "1.00 GiB, " in again.step.chosen


@pytest.mark.slow
def test_a_run_on_a_budget_learns_what_it_would_without(tmp_path, capsys):
    world = World(tmp_path)
    assert world.train("plain", 2) == 0
    capsys.readouterr()
    assert world.train("budget", 2, "--train.checkpointing", "budget") == 0
    assert "train.checkpointing = budget chose none: " in capsys.readouterr().out
    assert equal(world.adapter("plain"), world.adapter("budget"))
