"""Cuts chosen by what a step holds: against trying all, and the same for a run as for its plan."""

import functools
import itertools
import operator
import random
from types import SimpleNamespace

import pytest
import torch
from toy_world import World

from ditkit_core.config.resolve import resolve
from ditkit_core.config.sizes import GIB
from ditkit_core.errors import UserError
from ditkit_core.execution import Execution
from ditkit_core.models.spec import build_on_meta
from ditkit_core.planner import partition
from ditkit_core.planner.gpus import default_reserve, keeping_reserves, parse_gpus
from ditkit_core.planner.memory import Budget, Partition, Profile, StageCost, compose
from ditkit_core.planner.partition import (
    choose_split_points,
    divide_blocks,
    streamed_of,
    weights_profile,
)
from ditkit_core.planner.targets import budgets_here, budgets_of
from ditkit_core.planner.workload import Workload
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.plans.plan import make_report
from ditkit_core.run.plans.planned_step import place_run
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch

DEEP = ToyArch(depth=9)


def made(draw, num_blocks):
    """A profile of blocks that are all different, one of them without parameters."""

    def cost(weights):
        kept = draw.randint(0, 60)
        return StageCost(
            weights=weights, adapters=draw.randint(1, 9) if weights else 0,
            gradients=draw.randint(0, 9), kept=kept,
            released=kept, freed_at_cut=draw.randint(0, kept), forward_extra=draw.randint(0, 90),
            backward_extra=draw.randint(0, 90), backward_extra_again=draw.randint(0, 99),
        )  # fmt: skip

    blocks = tuple(cost(0 if i == 3 else draw.randint(1, 80)) for i in range(num_blocks))
    crossing = tuple(draw.randint(0, 60) for _ in range(num_blocks + 1))
    return Profile(
        embed=cost(40),
        blocks=blocks,
        head=cost(20),
        crossing=crossing,
        crossing_back=crossing[::-1],
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_no_other_cuts_leave_the_fullest_device_less_full(seed, num_devices):
    draw = random.Random(seed)
    profile = made(draw, 9)
    budgets = [
        Budget(name="", total=draw.randint(200, 900), reserve=draw.randint(0, 99), workspace=7)
    ] * num_devices
    budgets[-1] = Budget(name="", total=700)
    counts = [draw.randint(0, 2) for _ in range(num_devices)]
    work = Workload(micro_batches=1 + seed % 3, execution=Execution(pipelined=seed % 3 > 1))
    has_weights = [i != 3 for i in range(9)]

    def fullest(cuts):
        bounds = [0, *cuts, 9]
        spans = list(itertools.pairwise(bounds))
        if any(sum(has_weights[a:b]) < count for (a, b), count in zip(spans, counts, strict=True)):
            return float("inf")
        streamed = [
            streamed_of(has_weights, a, b, count)
            for (a, b), count in zip(spans, counts, strict=True)
        ]
        devices = tuple(i for i, (a, b) in enumerate(spans) for _ in range(a, b))
        division = Partition(devices=devices, streamed=frozenset().union(*streamed))
        plans = compose(profile, division, budgets, work)
        return max(plan.peak / (plan.budget.total - plan.budget.reserve) for plan in plans)

    cuts = choose_split_points(profile, budgets, swap_blocks=counts, work=work)
    every = [cuts for cuts in itertools.combinations(range(1, 9), num_devices - 1) if 3 not in cuts]
    assert cuts in every
    assert fullest(cuts) == min(map(fullest, every)) < float("inf")


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
@pytest.mark.parametrize("total", [max, operator.add])
def test_a_division_costs_least_of_all_that_are_possible(num_devices, total):
    """With parts that a device cannot have."""
    draw = random.Random(num_devices)
    for _ in range(20):
        costs = {
            (device, *span): draw.choice((None, *range(9)))
            for device in range(num_devices)
            for span in itertools.combinations(range(8), 2)
        }

        def cost(device, start, end, costs=costs):
            return costs[device, start, end]

        every = []
        for cuts in itertools.combinations((1, 2, 4, 5, 6), num_devices - 1):
            spans = enumerate(itertools.pairwise((0, *cuts, 7)))
            parts = [costs[device, *span] for device, span in spans]
            if None not in parts:
                every.append((functools.reduce(total, parts), cuts))
        starts = [0, 1, 2, 4, 5, 6]
        assert divide_blocks(7, num_devices, starts, cost, total, sorted) == sorted(every)
        least = divide_blocks(7, num_devices, starts, cost, total)
        assert [price for price, _ in least] == [price for price, _ in sorted(every)[:1]]
        assert set(least) <= set(every)


def test_what_is_streamed_makes_room_for_other_blocks():
    block = StageCost(weights=10, adapters=1)
    profile = Profile(
        embed=StageCost(),
        blocks=(block,) * 20,
        head=StageCost(),
        crossing=(0,) * 21,
        crossing_back=(0,) * 21,
    )
    budgets = [Budget(name="", total=100, workspace=0)] * 2
    assert choose_split_points(profile, budgets) == (10,)
    (cut,) = choose_split_points(profile, budgets, swap_blocks=(6, 0))
    assert cut > 11
    (cut,) = choose_split_points(profile, budgets, swap_blocks=(16, 2))
    assert cut >= 16, "a device has as many blocks as it streams"


def test_each_device_has_the_costs_of_its_own_policy():
    def profile(kept):
        block = StageCost(weights=10, adapters=1, kept=kept, released=kept)
        return Profile(
            embed=StageCost(),
            blocks=(block,) * 20,
            head=StageCost(),
            crossing=(0,) * 21,
            crossing_back=(0,) * 21,
        )

    budgets = [Budget(name="", total=1000, workspace=0)] * 2
    dear, cheap = profile(kept=40), profile(kept=5)
    assert choose_split_points(dear, budgets) == choose_split_points(cheap, budgets) == (10,)
    # 51 bytes a block against 16: 5 × 51 is nearly 15 × 16
    assert choose_split_points([dear, cheap], budgets) == (5,)
    assert choose_split_points([cheap, dear], budgets) == (15,)


@pytest.mark.parametrize(
    ("count", "swap", "says"),
    [
        (10, (), "name fewer"),
        (2, (5, 5), "the model has 9 blocks; lower it"),
        (3, (1, 1), "2 numbers for 3 devices"),
        (2, (2, -1), "at least 0"),
    ],
)
def test_what_divides_nothing_is_refused_in_one_line(count, swap, says):
    profile = weights_profile(build_on_meta(TOY, DEEP, run_of().precision), TOY, run_of().precision)
    with pytest.raises(UserError, match=says) as caught:
        choose_split_points(profile, [Budget(name="", total=100)] * count, swap_blocks=swap)
    assert "\n" not in str(caught.value)


@pytest.fixture
def machine(monkeypatch):
    """Pretends GPUs of these sizes in GiB."""

    def pretend(*sizes):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
        properties = [
            SimpleNamespace(name="a card", total_memory=int(size * GIB), major=9, minor=0)
            for size in sizes
        ]
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: properties[device.index]
        )
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device: (int(sizes[device.index] * GIB),) * 2
        )
        return [torch.device("cuda", index) for index in range(len(sizes))]

    return pretend


def test_a_gpu_gives_what_cuda_and_others_leave(machine):
    gpus = machine(24, 16)
    own = [default_reserve(24 * GIB), default_reserve(16 * GIB)]
    assert [budget.reserve for budget in budgets_here(gpus, ())] == own
    assert [budget.reserve for budget in budgets_here(gpus, (1.5,))] == [
        each + 1.5 * GIB for each in own
    ]
    assert [budget.reserve for budget in budgets_here(gpus, (0.0, 2.0))] == [
        own[0],
        own[1] + 2 * GIB,
    ]
    assert [budget.total for budget in budgets_here(gpus, ())] == [24 * GIB, 16 * GIB]


def test_gpus_here_and_gpus_that_are_named_have_one_budget(machine):
    """Where torch reports of the GPUs here what it is said to report of those that are named."""
    gpus = parse_gpus("24GiB,rtx4080")
    here = budgets_here(machine(*(gpu.total / GIB for gpu in gpus)), (1.0, 2.0))
    named = budgets_of(keeping_reserves(gpus, (1.0, 2.0)))
    assert [(each.total, each.reserve, each.workspace) for each in here] == [
        (each.total, each.reserve, each.workspace) for each in named
    ]


def test_reserves_that_leave_nothing_are_refused(machine):
    gpus = machine(24, 16)
    for reserve in (16.0, 15.2):  # with CUDA itself uses
        with pytest.raises(
            UserError, match=r"leaves nothing of a card \(number 1\), which has 16.0 GiB"
        ):
            budgets_here(gpus, (0.0, reserve))


def test_the_host_and_gpus_are_divided_by_hand(machine):
    with pytest.raises(UserError, match=r"train\.split_points"):
        budgets_here([*machine(24), torch.device("cpu")], ())


def run_of(**flags):
    named = {
        "model.preset": "deep", "data.frames": 1, "data.height": 64, "data.width": 64,
        "adapter.rank": 2,
        **{name.replace("__", "."): value for name, value in flags.items()},
    }  # fmt: skip
    return create_run(
        altered(TOY, presets={**TOY.architecture.presets, "deep": DEEP}),
        resolve(RunConfig, flags=named),
    )


def unloaded_of(run):
    model = build_on_meta(run.spec, DEEP, run.precision)
    return SimpleNamespace(
        module=model, origin=SimpleNamespace(arch=DEEP, adapter=run.config.adapter)
    )


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"train__reserve": (0.005, 0.01), "train__swap_blocks": (1, 2)},
        pytest.param(
            {"train__accumulation": 3, "train__pipelined": True, "train__batch_size": 6},
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.usefixtures("equal_steps_are_profiled_once")
def test_a_run_is_cut_where_its_plan_says_and_not_where_weights_alone_would(
    machine, monkeypatch, flags
):
    """With images that weigh more than the weights, and a kind of block in front that keeps
    nothing."""
    named = "2.5GiB,1.9GiB"
    machine(*(gpu.total / GIB for gpu in parse_gpus(named)))
    made, jobs = partition.profile, []

    def once(job, **unused):
        jobs.append(
            {
                **vars(job),
                "batch": [{name: x.shape for name, x in item.items()} for item in job.batch],
            }
        )
        assert jobs[-1] == jobs[0], "the run's step is the plan's"
        return found[0] if found else found.append(made(job)) or found[0]

    found = []
    monkeypatch.setattr(partition, "profile", once)
    devices = ("cuda:0", "cuda:1")
    run = run_of(
        train__devices=devices,
        train__kernels="triton",
        data__width=1024,
        data__height=1024,
        **flags,
    )
    unloaded = unloaded_of(run)
    placed = place_run(run, unloaded, training=True)
    assert placed.split_points != place_run(run, unloaded).split_points
    report = make_report(run)
    assert report.step.partition.devices == tuple(device.index for device in placed.blocks)
    assert report.step.partition.streamed == placed.streamed
    assert make_report(run, named).step.partition == report.step.partition
    assert len(jobs) == 3
    fullness = [plan.peak / (plan.budget.total - plan.budget.reserve) for plan in report.devices]
    assert max(fullness) > 0.1 and 0 < placed.split_points[0] < 9


def test_cuts_by_hand_need_no_plan(machine, monkeypatch):
    machine(24, 24)
    monkeypatch.setattr(partition, "profile", lambda job, **unused: pytest.fail("was planned"))
    run = run_of(train__devices=("cuda:0", "cuda:1"), train__split_points=(2,))
    assert place_run(run, unloaded_of(run), training=True).split_points == (2,)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--train.devices", '["cpu", "cpu:1"]', "--train.split_points", "[2]"), "below 2"),
        (("--train.swap_blocks", "[3]"), "choose 0 to 2"),
        (("--train.devices", '["cpu", "cpu:1"]', "--train.swap_blocks", "[1, 2]"), "lower it"),
        (("--train.devices", '["cpu", "cpu:1", "cpu:2"]'), "name fewer"),
    ],
)
def test_what_does_not_divide_the_model_shows_before_anything_is_encoded(
    tmp_path, capsys, flags, says
):
    world = World(tmp_path)
    assert world.train("run", 1, *flags) == 1
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert (world.media.loads, world.text.loads) == (0, 0)


def test_streamed_trained_weights_are_not_on_the_device():
    precision = run_of().precision
    model = build_on_meta(TOY, DEEP, precision)
    profile = weights_profile(model.requires_grad_(True), TOY, precision)
    assert profile.trains_all
    budgets = [Budget(name="", total=2**30, workspace=0)] * 2
    plain = choose_split_points(profile, budgets)
    assert choose_split_points(profile, budgets, swap_blocks=(5, 0)) > plain
    model.embed.requires_grad_(False)
    assert not weights_profile(model, TOY, precision).trains_all
