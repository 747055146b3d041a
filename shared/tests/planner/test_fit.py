"""The search for settings that fit: on profiles made by hand, against looking at every one of
them."""

import functools
import itertools
import random
from dataclasses import replace

import pytest
import torch
from made_profiles import made_profile

from ditkit_core.config.sizes import GIB
from ditkit_core.data.config import DataConfig
from ditkit_core.engine.block_swap import choose_streamed
from ditkit_core.engine.placement import Placement
from ditkit_core.execution import Execution
from ditkit_core.models.precision import Precision
from ditkit_core.planner.fit import (
    HARDLY_LONGER,
    POLICIES,
    ROOM,
    SMALLEST,
    fit,
    least_missing,
    shortest_seconds,
)
from ditkit_core.planner.gpus import of_size, parse_gpus
from ditkit_core.planner.memory import Partition, compose
from ditkit_core.planner.search import PRICE, FitTask
from ditkit_core.planner.step_time import step_seconds
from ditkit_core.planner.workload import Workload
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.plans.changes import levers
from ditkit_core.testing.toy import TOY


def task_of(gpus, **settings):
    shape = {
        name: settings.pop(name) for name in ("num_blocks", "block_gib", "work") if name in settings
    }
    profiles = functools.cache(lambda policy, quantize: made_profile(policy, quantize, **shape))
    settings["work"] = Workload(micro_batches=settings.pop("micro_batches", 1))
    return FitTask(
        gpus=parse_gpus(gpus) if isinstance(gpus, str) else tuple(gpus),
        profile_of=profiles,
        **settings,
    )


def every_way(task):
    """(score, seconds, exact) of all settings that fit, by trying all."""
    for policy, quantize in itertools.product(POLICIES, task.quantizations):
        profile = task.profile_of(policy, quantize)
        count = len(profile.blocks)
        for used in range(1, len(task.gpus) + 1):
            for chosen in itertools.combinations(task.gpus, used):
                for cuts in itertools.combinations(range(1, count), used - 1):
                    bounds = [0, *cuts, count]
                    devices = tuple(i for i in range(used) for _ in range(bounds[i], bounds[i + 1]))
                    named = tuple(torch.device("cuda", i) for i in devices)
                    placement = Placement(embed=named[0], blocks=named, head=named[-1])
                    sizes = [range(b - a + 1) for a, b in itertools.pairwise(bounds)]
                    overlap = (
                        (False, True) if task.work.micro_batches > 1 and used > 1 else (False,)
                    )
                    for swap, pipelined in itertools.product(itertools.product(*sizes), overlap):
                        streamed = choose_streamed(placement, swap, [True] * count)
                        division = Partition(devices=devices, streamed=streamed)
                        work = replace(task.work, execution=Execution(pipelined=pipelined))
                        plans = compose(profile, division, [card.budget for card in chosen], work)
                        on_host = sum(profile.blocks[i].weights for i in streamed)
                        if all(plan.fits for plan in plans) and (
                            task.host is None or on_host <= task.host
                        ):
                            seconds = step_seconds(profile, division, chosen, work)
                            yield seconds * PRICE[quantize], seconds, quantize == "none"


SMALL = {"num_blocks": 3, "block_gib": 3.0}


@pytest.mark.parametrize(
    ("gpus", "shape", "micro_batches"),
    [
        ("24GiB", {}, 1),
        ("10GiB", {}, 3),
        ("6GiB", {}, 1),
        ("8GiB,12GiB", {}, 1),
        ("12GiB,8GiB", {"work": 0.1}, 3),
        ("rtx4090,8GiB", {"work": 2.0}, 1),
        ("2x5GiB", {"work": 0.05}, 3),
        ("8GiB,12GiB", {"host": 3 * GIB}, 1),
        ("2x5GiB", {"work": 0.05, "host": 4 * GIB}, 3),
        ("6GiB", {"host": 2 * GIB}, 1),
        pytest.param("3x6GiB", {"work": 0.3, "num_blocks": 4}, 3, marks=pytest.mark.slow),
    ],
)
def test_no_other_settings_that_fit_are_faster(gpus, shape, micro_batches):
    task = task_of(gpus, micro_batches=micro_batches, **{**SMALL, **shape})
    ways = list(every_way(task))
    found = fit(task)
    if not ways:
        assert found.chosen is None and least_missing(task) > 0
        return
    assert all(plan.fits for plan in found.chosen.plan)
    assert found.chosen.score <= min(score for score, _, _ in ways) * (1 + HARDLY_LONGER + 1e-9)
    if "fastest with exact weights" in found.others:
        best = min(seconds for _, seconds, exact in ways if exact)
        assert found.others["fastest with exact weights"].seconds == pytest.approx(best)
    assert shortest_seconds(task) <= min(seconds for _, seconds, _ in ways)


def test_where_all_fits_nothing_is_done_to_it():
    chosen = fit(task_of("80GiB")).chosen
    assert (chosen.execution.checkpointing, chosen.execution.quantize, chosen.swap_blocks) == (
        "none",
        "none",
        (0,),
    )
    assert fit(task_of("2x80GiB")).chosen.gpus == (0,), (
        "a second card that works in turn is no help"
    )


def test_of_equal_choices_the_one_without_streaming_is_taken():
    chosen = fit(task_of("2x25GiB")).chosen
    assert (chosen.gpus, chosen.swap_blocks) == ((0, 1), (0, 0))
    assert fit(task_of("25GiB")).chosen.swap_blocks[0] > 0, "which one card would have to"


def test_gpus_are_filled_evenly_for_their_size_and_keep_room_where_that_costs_nothing():
    (card,) = parse_gpus("rtx3090")
    gpus = [card, replace(card, total=16 * GIB)]
    chosen = fit(task_of(gpus, num_blocks=28, work=0.1)).chosen
    first, second = (plan.peak / (plan.budget.total - plan.budget.reserve) for plan in chosen.plan)
    assert max(first, second) <= 1 - ROOM
    assert abs(first - second) < 1.5 / 15, "a block and a half of the smaller card"


def test_exact_weights_are_given_up_for_speed_only_beyond_the_price():
    # little arithmetic: the exact weights are waited for, the quantized ones are there
    slow = fit(task_of("rtx4090", num_blocks=36, work=0.02))
    assert slow.chosen.execution.quantize == "int8" and slow.chosen.swap_blocks == (0,)
    exact = slow.others["fastest with exact weights"]
    assert exact.seconds > PRICE["int8"] * slow.chosen.seconds
    # much arithmetic hides the streaming
    task, asked = task_of("rtx4090", num_blocks=24, work=0.5), set()

    def profile_of(policy, quantize):
        asked.add(quantize)
        return task.profile_of(policy, quantize)

    hidden = fit(replace(task, profile_of=profile_of))
    assert hidden.chosen.execution.quantize == "none" and hidden.chosen.swap_blocks[0] > 0
    assert "nf4" not in asked


def test_micro_batches_overlap_where_memory_allows_it():
    settings = {"num_blocks": 12, "work": 0.5, "micro_batches": 4}
    chosen = fit(task_of("2x24GiB", **settings)).chosen
    assert chosen.execution.pipelined and len(chosen.gpus) == 2
    alone = fit(task_of("24GiB", **settings)).chosen
    assert not alone.execution.pipelined and chosen.seconds < 0.7 * alone.seconds
    assert not fit(
        task_of("2x24GiB", **{**settings, "micro_batches": 1})
    ).chosen.execution.pipelined


def test_a_small_host_has_another_gpu_used_and_says_what_it_lacks():
    """A slow second GPU is left alone where the host can hold what is streamed to the first."""
    settings = {"num_blocks": 24, "work": 1.0, "quantizations": ("none",)}
    free = fit(task_of("rtx3090,rtx4060ti", **settings)).chosen
    assert free.gpus == (0,) and free.host > 8 * GIB
    bound = fit(task_of("rtx3090,rtx4060ti", host=free.host // 2, **settings)).chosen
    assert bound.gpus == (0, 1) and bound.host <= free.host // 2
    none = task_of("rtx3090", host=free.host // 2, **settings)
    assert fit(none).chosen is None
    lacking = least_missing(none)
    assert 0 < lacking <= free.host // 2
    assert fit(replace(none, host=none.host + lacking)).chosen is not None
    assert fit(replace(none, host=none.host + lacking - 1)).chosen is None


def test_less_on_the_host_is_preferred_where_it_hardly_takes_longer():
    """Two like GPUs that work in turn are as fast as one whose streaming is hidden."""
    settings = {"num_blocks": 24, "work": 0.3}
    one = fit(task_of("24GiB", **settings)).chosen
    two = fit(task_of("2x24GiB", **settings)).chosen
    assert one.host > 0 == two.host and two.gpus == (0, 1)
    assert two.seconds <= one.seconds * (1 + HARDLY_LONGER)


def test_a_fast_gpu_alone_beats_it_with_a_slow_one():
    assert fit(task_of("rtx4090,rtx4060ti", num_blocks=24, work=0.5)).chosen.gpus == (0,)


def test_least_memory_is_less_than_what_is_chosen():
    found = fit(task_of("80GiB"))
    assert found.others["least memory"].fullness < found.chosen.fullness / 3


def test_activations_wait_on_the_host_where_that_alone_makes_it_fit():
    """Full checkpointing keeps 6 blocks of 600 MiB besides; sent to the host they do not make the
    GPUs fit a slower way otherwise."""
    shape = {"num_blocks": 6, "work": 6.0, "quantizations": ("none",)}
    first = fit(task_of("24GiB", **shape)).chosen
    assert first.execution.checkpointing in POLICIES
    (card,) = parse_gpus("24GiB")
    small = replace(card, total=13 * GIB)
    chosen = fit(task_of((small,), **shape)).chosen
    assert chosen.execution.checkpointing == SMALLEST and all(plan.fits for plan in chosen.plan)
    sent = sum(block.on_host for block in made_profile(SMALLEST, work=6.0, num_blocks=6).blocks)
    assert chosen.host - chosen.weights_on_host == sent > 0
    assert chosen.seconds >= first.seconds
    assert fit(task_of((small,), host=chosen.weights_on_host + sent - 1, **shape)).chosen is None


def test_what_does_not_fit_says_what_is_missing():
    task = task_of("4GiB", num_blocks=12, work=2.0)
    assert fit(task).chosen is None
    missing = least_missing(task)
    (card,) = task.gpus
    enough = replace(card, total=card.total + missing)
    assert fit(replace(task, gpus=(enough,))).chosen is not None
    assert fit(replace(task, gpus=(replace(enough, total=enough.total - 1),))).chosen is None


def test_profiles_are_asked_for_only_where_they_can_matter():
    asked = []

    def profile_of(policy, quantize):
        asked.append((policy, quantize))
        return made_profile(policy, quantize)

    fit(FitTask(gpus=parse_gpus("80GiB"), profile_of=profile_of))
    assert {quantize for _, quantize in asked} == {"none"}
    asked.clear()
    fit(FitTask(gpus=parse_gpus("2GiB"), profile_of=profile_of))
    assert {policy for policy, _ in asked} == {"full", SMALLEST}, (
        "what holds more than full is not looked at"
    )


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]
)
def test_a_larger_gpu_never_makes_the_step_slower(seed):
    draw = random.Random(seed)
    count = (2, 1, 2, 3)[seed % 4]
    names = [draw.choice(("rtx3090", "rtx4060ti", "rtx4090")) for _ in range(count)]
    gpus = [replace(parse_gpus(name)[0], total=draw.randint(4, 20) * GIB) for name in names]
    settings = {
        "num_blocks": draw.randint(6, 10),
        "work": draw.choice((0.05, 0.3, 1.0)),
        "micro_batches": (1, 3)[seed % 2],
    }
    before = None
    for _ in range(4):
        chosen = fit(task_of(gpus, **settings)).chosen
        if chosen is None:
            assert before is None, "what fitted a smaller card fits a larger one"
        else:
            assert all(plan.fits for plan in chosen.plan)
            assert before is None or chosen.score <= before * (1 + HARDLY_LONGER)
            before = chosen.score
        grown = draw.randrange(count)
        gpus[grown] = replace(gpus[grown], total=gpus[grown].total + draw.randint(1, 12) * GIB)


def trained_profile(policy, quantize, gradients=2 * GIB):
    profile = made_profile(policy, quantize)
    trained = replace(
        profile.blocks[0], weights=0, adapters=2 * GIB, gradients=gradients, optimizer=4 * GIB
    )
    return replace(profile, blocks=(trained,) * 12, trains_all=True)


def test_a_full_fine_tune_streams_where_each_block_is_updated_in_its_backward():
    task = FitTask(
        gpus=parse_gpus("48GiB"),
        profile_of=lambda *how: trained_profile(*how, gradients=0),
        quantizations=("none",),
    )
    assert fit(task).chosen is None and least_missing(task) > 0
    task = replace(task, streams_trained=True)
    chosen = fit(task).chosen
    (count,) = chosen.swap_blocks
    assert count > 0 and chosen.host == count * 6 * GIB, (
        "weights with what the optimizer keeps of them"
    )
    assert all(plan.fits for plan in chosen.plan) and least_missing(task) == 0
    assert fit(replace(task, host=chosen.host // 2)).chosen is None


def test_a_full_fine_tune_has_nothing_to_stream_or_to_quantize():
    profile_of = trained_profile
    task = FitTask(
        gpus=(of_size(140 * GIB, "140GiB"),),
        profile_of=profile_of,
        work=Workload(execution=Execution(precision=Precision(matmul=torch.float32))),
        quantizations=("none",),
    )
    chosen = fit(task).chosen
    assert (chosen.execution.quantize, chosen.swap_blocks) == ("none", (0,))


def test_of_resolutions_the_largest_are_left_out():
    config = create_run(TOY, RunConfig(data=DataConfig(resolutions=(16, 8, 32)))).config
    (ladder,) = (
        each
        for each in levers(TOY, config, ())
        if any("resolution" in change.words for change in each)
    )
    assert [change.words for change in ladder] == [
        "data.resolutions = [8, 16] (now [8, 16, 32])",
        "data.resolutions = [8] (now [8, 16, 32])",
    ]
    assert [change.lost_share for change in ladder] == [0.75, 0.9375]
    assert [create_run(TOY, change.config).config.data.height for change in ladder] == [16, 8]


def test_of_frame_buckets_the_longest_are_left_out():
    config = create_run(TOY, RunConfig(data=DataConfig(frame_buckets=(81, 1, 33)))).config
    (ladder,) = (
        each for each in levers(TOY, config, ()) if any("frame" in change.words for change in each)
    )
    assert [change.words for change in ladder] == [
        "data.frame_buckets = [1, 33] (now [1, 33, 81])",
        "data.frame_buckets = [1] (now [1, 33, 81])",
    ]
    assert [create_run(TOY, change.config).config.data.frames for change in ladder] == [33, 1]
