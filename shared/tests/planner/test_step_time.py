"""The estimate of a step's time: what must hold of it whatever is assumed; and the order of micro-batches on several devices, by hand."""

import heapq
import random
from dataclasses import replace

import pytest
from made_profiles import made_profile

from ditkit_core.planner.gpus import parse_gpus
from ditkit_core.planner.memory import Partition, Workload
from ditkit_core.planner.step_time import (
    LINK_SHARE,
    UTILISATION,
    StageTime,
    assumptions,
    compare_orders,
    compute_time,
    simulate,
    step_seconds,
    streaming_time,
)

ONE, TWO = Partition(devices=(0,) * 12), Partition(devices=(0,) * 6 + (1,) * 6)
(CARD,) = parse_gpus("rtx4090")


def test_a_step_is_its_arithmetic_over_the_assumed_rate():
    profile = made_profile("full")
    flops = sum(stage.flops_forward + stage.flops_backward for stage in (profile.embed, *profile.blocks, profile.head))
    seconds = step_seconds(profile, ONE, [CARD], Workload())
    assert seconds == pytest.approx(flops / (165.2e12 * UTILISATION), rel=0.01)  # the rest is the optimizer's
    assert step_seconds(profile, ONE, [CARD], Workload(micro_batches=3)) == pytest.approx(3 * seconds, rel=0.01)


def test_fp32_takes_the_rate_of_fp32():
    profile = made_profile("full")
    half, full = (step_seconds(profile, ONE, [CARD], Workload(fp32=fp32)) for fp32 in (False, True))
    assert full == pytest.approx(2 * half, rel=0.01)


def test_what_is_streamed_hides_behind_arithmetic_or_is_waited_for():
    profile, every = made_profile("full"), Partition(devices=(0,) * 12, streamed=frozenset(range(12)))
    hidden = step_seconds(profile, every, [CARD], Workload())
    resident = step_seconds(profile, ONE, [CARD], Workload())
    copy = profile.blocks[0].weights / (CARD.host_bandwidth * LINK_SHARE)
    assert 0 < hidden - resident <= copy * 1.01, "only the first block is waited for"
    short = made_profile("full", work=0.02)
    waited = step_seconds(short, every, [CARD], Workload())
    assert waited >= 22 * copy, "12 blocks are copied in the forward, and 10 again in the backward"
    assert waited - step_seconds(short, ONE, [CARD], Workload()) > 0.8 * waited


def test_with_two_buffers_a_copy_waits_for_the_block_before_the_last():
    assert streaming_time([(10, 1)] * 4, ahead=False) == 1 + 40
    assert streaming_time([(1, 10)] * 4, ahead=False) == 40 + 1
    assert streaming_time([(1, 10)] * 4, ahead=True) == 1 + 10 + 10 + 1
    assert streaming_time([(10, 0), (1, 30), (10, 0), (1, 30)], ahead=False) == 30 + 1 + 29 + 1
    # the third copy cannot begin before the first block has run
    assert streaming_time([(100, 1), (1, 1), (1, 50)], ahead=False) == 101 + 50 + 1


def test_divided_devices_work_in_turn_and_send_twice_through_the_host():
    profile = made_profile("full")
    one, two = step_seconds(profile, ONE, [CARD], Workload()), step_seconds(profile, TWO, [CARD, CARD], Workload())
    sent = (profile.crossing[6] + profile.crossing_back[6]) * 2 / (CARD.host_bandwidth * LINK_SHARE)
    assert two == pytest.approx(one + sent, rel=0.01)


def test_pipelined_micro_batches_overlap():
    profile = made_profile("full")
    count = 4
    apart = step_seconds(profile, TWO, [CARD, CARD], Workload(micro_batches=count))
    overlapping = step_seconds(profile, TWO, [CARD, CARD], Workload(micro_batches=count, pipelined=True))
    assert overlapping == pytest.approx(apart * (count + 1) / (2 * count), rel=0.05)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_quantized_weights_cost_their_conversion(kind):
    profile = made_profile("full", kind)
    plain = step_seconds(profile, ONE, [CARD], Workload())
    converted = step_seconds(profile, ONE, [CARD], Workload(quantize=kind))
    assert plain < converted < 1.2 * plain


def test_products_of_codes_take_their_own_rate_and_the_rounding_of_inputs():
    """By hand: int8 at 65 % of four times the rate of bf16, of which a product reaches 80 %."""
    plain = made_profile("full", "int8")
    block = plain.blocks[0]
    computed = replace(block, flops_8_forward=block.flops_forward // 2, bytes_8_forward=10**9)
    work = Workload(quantize="int8", compute="int8")
    seconds = {
        kernels: compute_time(computed, CARD, replace(work, kernels=kernels), backward=False) / 1e9
        for kernels in ("torch", "triton")
    }
    rate, flops = 165.2e12, block.flops_forward
    arithmetic = flops / (rate * UTILISATION) - flops / 2 / (0.8 * rate) + flops / 2 / (0.65 * 4 * rate)
    for kernels, passes in (("torch", 9), ("triton", 2)):
        assert seconds[kernels] == pytest.approx(arithmetic + passes * 1e9 / (0.8 * 1008e9), rel=1e-6)
    assert compute_time(block, CARD, Workload(quantize="int8"), backward=False) == compute_time(
        block, CARD, work, backward=False
    )


def test_a_gpu_that_does_not_multiply_a_format_is_named():
    work = Workload(quantize="fp8", compute="fp8")
    known, unknown = (assumptions(parse_gpus(name), work)[1] for name in ("rtx4090", "rtx3090"))
    assert "fp8 at 65% of 330 TFLOP/s" in known and "train.kernels = triton" in known
    assert unknown == "rtx3090 does not multiply fp8: base.compute = fp8 is refused there"


def test_a_faster_gpu_is_faster():
    profile = made_profile("full")
    names = ("rtx4060ti", "rtx3090", "rtx4090", "a100-80", "h100")
    seconds = [step_seconds(profile, ONE, parse_gpus(name), Workload()) for name in names]
    assert seconds == sorted(seconds, reverse=True)


def test_what_is_assumed_is_said_for_each_gpu_once():
    lines = assumptions(parse_gpus("2x24GiB,rtx4090"), Workload())
    assert len(lines) == 2
    assert "50% of 71 in bf16" in lines[0] and "assumed as of rtx3090" in lines[0] and "25.2 GB/s" in lines[0]
    assert "fp32" in assumptions(parse_gpus("rtx4090"), Workload(fp32=True))[0]


def test_equal_ways_of_dividing_take_equal_times():
    profile = replace(made_profile("full"), embed=made_profile().blocks[0])
    cuts = (3, 6, 9)
    times = {
        step_seconds(profile, Partition(devices=(0,) * cut + (1,) * (12 - cut)), [CARD, CARD], Workload())
        for cut in cuts
    }
    assert max(times) - min(times) < 1e-6


def trained(profile):
    """The same when all of its blocks' weights are trained."""
    blocks = [replace(b, weights=0, adapters=2**30, gradients=0, optimizer=2**31) for b in profile.blocks]
    return replace(profile, blocks=tuple(blocks), trains_all=True)


def test_streamed_trained_weights_are_copied_both_ways_with_what_the_optimizer_keeps():
    profile = trained(made_profile("full", work=0.001))
    every = Partition(devices=(0,) * 12, streamed=frozenset(range(12)))
    seconds = step_seconds(profile, every, [CARD], Workload()) - step_seconds(profile, ONE, [CARD], Workload())
    gib = 2**30 / (CARD.host_bandwidth * LINK_SHARE)
    # 12 forwards of 1 GiB, and 10 backwards (two are there from the forward) of 3 GiB there and 3 back
    assert seconds == pytest.approx((12 + 10 * 6) * gib, rel=0.05)


def stages(*times, copy=0.0):
    """Devices with these (forward, backward) seconds."""
    last = len(times) - 1
    return [
        StageTime(forward=f, backward=b, send=0.0 if i == last else copy, send_back=0.0 if i == last else copy)
        for i, (f, b) in enumerate(times)
    ]


ALIKE = stages((1.0, 2.0), (1.0, 2.0))


@pytest.mark.parametrize(
    ("devices", "num_micro_batches", "one_by_one", "together", "busy"),
    [
        # forwards end at 2 and 3; on the second device backwards run 3-5, 5-7, on the first 5-7, 7-9
        (ALIKE, 2, 12, 9, (6, 6)),
        # forwards end at 2, 3, 4, 5; backwards 5-7 … 11-13 on the second device, 7-9 … 13-15 on the first
        (ALIKE, 4, 24, 15, (12, 12)),
        # the second device works without a pause, 1-5 and 5-13, and the first adds 13-15
        (stages((1.0, 2.0), (2.0, 4.0)), 2, 18, 15, (6, 12)),
        (stages((1.0, 2.0), (2.0, 4.0)), 4, 36, 27, (12, 24)),
        # the first works without a pause until 4, the second 4-5 and 5-7, then the first 7-11 and 11-15
        (stages((2.0, 4.0), (1.0, 2.0)), 2, 18, 15, (12, 6)),
        # copies take both devices: 1-1.5, 2.5-3, then back 6-6.5 and 8.5-9
        (stages((1.0, 2.0), (1.0, 2.0), copy=0.5), 2, 14, 11, (6, 6)),
        # three devices: (2 + 3 - 1) turns forward and back
        (stages((1.0, 2.0), (1.0, 2.0), (1.0, 2.0)), 2, 18, 12, (6, 6, 6)),
    ],
)
def test_schedules_computed_by_hand(devices, num_micro_batches, one_by_one, together, busy):
    without, with_ = (simulate(devices, num_micro_batches, pipelined=pipelined) for pipelined in (False, True))
    assert (without.seconds, with_.seconds) == (one_by_one, together)
    assert without.busy == with_.busy == busy
    assert with_.utilisation == tuple(seconds / together for seconds in busy)


def test_what_cannot_overlap_gains_nothing():
    one_device = compare_orders(stages((1.0, 2.0)), 4)
    one_micro_batch = compare_orders(ALIKE, 1)
    assert one_device.gain == one_micro_batch.gain == 1
    assert one_device.pipelined.utilisation == (1,)


def test_no_schedule_beats_the_busiest_device_or_loses_to_one_after_the_other():
    rough = random.Random(0)
    for _ in range(200):
        times = [(rough.uniform(0.1, 3), rough.uniform(0.1, 6)) for _ in range(rough.randint(2, 4))]
        found = compare_orders(stages(*times, copy=rough.uniform(0, 0.5)), rough.randint(2, 6))
        assert max(found.pipelined.busy) < found.pipelined.seconds < found.accumulated.seconds


def test_the_line_says_where_its_times_are_from():
    line = str(compare_orders(ALIKE, 2))
    assert line == (
        "devices compute 50% and 50% of a step, with train.pipelined 67% and 67%, 1.33 times as fast (from estimated times)"
    )


def test_with_a_queue_for_each_device_no_micro_batch_overtakes_another():
    """Why giving the backwards one after the other gives each device what autograd's queues do: they take what was made last."""
    rough = random.Random(0)
    for _ in range(100):
        num_devices, num = rough.randint(2, 4), rough.randint(2, 6)
        seconds = [rough.uniform(0.1, 3) for _ in range(num_devices)]
        order = _queued(seconds, num)
        assert order == [list(reversed(range(num)))] * num_devices


def _queued(seconds, num):
    """The order in which each device runs backwards, if it takes the last micro-batch that is ready whenever it is free."""
    ready = [[] for _ in seconds]
    ready[-1] = [-micro for micro in range(num)]
    heapq.heapify(ready[-1])
    order, ends = [[] for _ in seconds], []
    running = [None] * len(seconds)

    def start(device, now):
        if running[device] is None and ready[device]:
            running[device] = -heapq.heappop(ready[device])
            order[device].append(running[device])
            heapq.heappush(ends, (now + seconds[device], device))

    start(len(seconds) - 1, 0.0)
    while ends:
        now, device = heapq.heappop(ends)
        micro, running[device] = running[device], None
        if device > 0:
            heapq.heappush(ready[device - 1], -micro)
            start(device - 1, now)
        start(device, now)
    return order


def test_a_share_of_the_steps_takes_another_forward():
    profile = made_profile("full")
    one, two, three = (
        step_seconds(profile, ONE, [CARD], Workload(match_base=share, micro_batches=count))
        for share, count in ((0, 1), (0.5, 1), (0.5, 3))
    )
    forward = sum(stage.flops_forward for stage in (profile.embed, *profile.blocks, profile.head))
    assert two - one == pytest.approx(0.5 * forward / (165.2e12 * UTILISATION), rel=0.01)
    assert three == pytest.approx(3 * two, rel=0.01)
    assert "50% take another forward" in assumptions([CARD], Workload(match_base=0.5))[0]
