"""The estimate of a step's time: what must hold of it whatever is assumed; and the order of
micro-batches on several devices, by hand."""

import heapq
import random
from dataclasses import replace

import pytest
import torch
from made_profiles import made_profile, products

from ditkit_core.execution import Execution
from ditkit_core.models.precision import Precision
from ditkit_core.nn.eight_bit_products import product
from ditkit_core.nn.kernels import ops
from ditkit_core.planner.gpus import parse_gpus
from ditkit_core.planner.kernel_time import LAUNCHED, REACHED, gpu_seconds, host_seconds
from ditkit_core.planner.memory import Partition
from ditkit_core.planner.memory_tracker import Kernel, fake_tensors
from ditkit_core.planner.step_time import (
    EXPOSED,
    LINK_SHARE,
    StageTime,
    assumptions,
    compare_orders,
    compute_time,
    simulate,
    step_seconds,
    streaming_time,
)
from ditkit_core.planner.workload import Workload

ONE, TWO = Partition(devices=(0,) * 12), Partition(devices=(0,) * 6 + (1,) * 6)
(CARD,) = parse_gpus("rtx4090")
SHARE = REACHED["matmul_16"].arithmetic


def test_a_step_of_wide_matmuls_is_their_arithmetic_over_the_share_that_they_reach():
    profile = made_profile("full")
    flops = sum(
        stage.flops_forward + stage.flops_backward
        for stage in (profile.embed, *profile.blocks, profile.head)
    )
    seconds = step_seconds(profile, ONE, [CARD], Workload())
    # the rest is the optimizer's
    assert seconds == pytest.approx(flops / (165.2e12 * SHARE), rel=0.01)
    assert step_seconds(profile, ONE, [CARD], Workload(micro_batches=3)) == pytest.approx(
        3 * seconds, rel=0.01
    )


def with_kernels(*kernels):
    """A stage whose forward runs these, each so many times."""
    return replace(made_profile().blocks[0], kernels_forward=frozenset(kernels))


def nanoseconds(*kernels, **work):
    return compute_time(
        with_kernels(*kernels), CARD, Workload(**{"cuda_graphs": "on"} | work), backward=False
    )


def test_the_order_of_a_set_of_kernels_does_not_change_their_time():
    """Hashes of names differ in each process, and so the order of a set."""
    kernels = [(Kernel("elementwise", 0, 1 + 10**9 // n), n) for n in range(1, 60)]
    for seconds in (lambda counts: gpu_seconds(counts, CARD), host_seconds):
        orders = [random.Random(seed).sample(kernels, len(kernels)) for seed in range(20)]
        assert len({seconds(tuple(order)) for order in orders}) == 1


def test_a_narrow_matmul_takes_the_time_of_its_bytes_and_a_small_one_the_time_to_start():
    """By hand: a published rate of 165.2 TFLOP/s, of which 82 %, and 1,008 GB/s, of which 65 %;
    3.25 µs to start."""
    wide, narrow, small = (
        Kernel("matmul_16", flops, moved)
        for flops, moved in ((10**12, 10**6), (10**9, 10**9), (1, 1))
    )
    assert nanoseconds((wide, 1)) == pytest.approx(1e12 / (0.82 * 165.2e12) * 1e9 + 3250, rel=1e-6)
    assert nanoseconds((narrow, 1)) == pytest.approx(1e9 / (0.65 * 1008e9) * 1e9 + 3250, rel=1e-6)
    assert nanoseconds((small, 1000)) == pytest.approx(1000 * 3250, rel=1e-3)


def test_fp32_takes_the_rate_of_fp32():
    for kind in ("matmul", "attention", "attention_backward"):
        half, full = f"{kind}_16" if kind == "matmul" else kind, f"{kind}_32"
        ratio = nanoseconds((Kernel(full, 10**15, 0), 1)) / nanoseconds(
            (Kernel(half, 10**15, 0), 1)
        )
        assert ratio == pytest.approx(
            2 * REACHED[half].arithmetic / REACHED[full].arithmetic, rel=1e-3
        )


def test_attention_takes_other_shares_forward_and_backward():
    forward, backward = (
        nanoseconds((Kernel(kind, 10**15, 0), 1)) for kind in ("attention", "attention_backward")
    )
    assert backward / forward == pytest.approx(0.59 / 0.525, rel=1e-3)


def test_flash_attention_is_slower_than_torchs_own_choice_on_hopper_alone():
    kernel, flash = (
        Kernel("attention", 10**15, 0),
        Workload(execution=Execution(attention="sdpa_flash"), cuda_graphs="on"),
    )
    for name, ratio in (
        ("h100", 0.59 / 0.353),
        ("h200", 0.59 / 0.353),
        ("rtx4090", 1.0),
        ("a100", 1.0),
    ):
        own, other = (
            compute_time(with_kernels((kernel, 1)), parse_gpus(name)[0], work, backward=False)
            for work in (Workload(cuda_graphs="on"), flash)
        )
        assert other / own == pytest.approx(ratio, rel=1e-3), name


def test_all_else_takes_the_time_of_its_bytes_with_a_kernel_or_without():
    for kind, share in (("elementwise", 0.69), ("fused", 0.8)):
        taken = 2 * (1e9 / (share * 1008e9) * 1e9 + 1500)
        assert nanoseconds((Kernel(kind, 0, 10**9), 2)) == pytest.approx(taken, rel=1e-6)
    assert nanoseconds((Kernel("transfer", 0, 10**9), 5)) == 0, (
        "copies between devices wait for their link"
    )


def test_the_host_launches_what_is_not_replayed():
    small = [(Kernel(kind, 0, 0), 100) for kind in ("matmul_16", "fused", "elementwise")]
    launching = 1e9 * 100 * sum(LAUNCHED.values())
    busy = nanoseconds(*small)
    assert busy < launching / 10
    assert nanoseconds(*small, cuda_graphs="off") == pytest.approx(launching, rel=1e-6)
    large = Kernel("matmul_16", 10**15, 0), 1
    assert nanoseconds(large, cuda_graphs="off") == nanoseconds(large), (
        "the host launches while the GPU runs"
    )


def test_one_host_launches_for_all_devices():
    """Two devices whose work is all launches cannot overlap; those with long kernels can."""
    small, large = frozenset({(Kernel("elementwise", 0, 0), 1000)}), products(10**13)
    for kernels, overlap in ((small, False), (large, True)):
        profile = made_profile("full")
        block = replace(profile.blocks[0], kernels_forward=kernels, kernels_backward=kernels)
        profile = replace(
            profile, blocks=(block,) * 12, crossing=(0,) * 13, crossing_back=(0,) * 13
        )
        apart, together = (
            step_seconds(
                profile,
                TWO,
                [CARD, CARD],
                Workload(micro_batches=4, execution=Execution(pipelined=pipelined)),
            )
            for pipelined in (False, True)
        )
        assert (together < 0.7 * apart) == overlap and (
            overlap or together == pytest.approx(apart, rel=0.05)
        )


def test_what_is_streamed_hides_behind_arithmetic_or_is_waited_for():
    profile, every = (
        made_profile("full"),
        Partition(devices=(0,) * 12, streamed=frozenset(range(12))),
    )
    hidden = step_seconds(profile, every, [CARD], Workload())
    resident = step_seconds(profile, ONE, [CARD], Workload())
    copy = profile.blocks[0].weights / (CARD.host_bandwidth * LINK_SHARE)
    waits = hidden - resident - 24 * EXPOSED * copy
    assert 0 < waits <= copy * 1.01, (
        "but for that share of 24 copies, only the first block is waited for"
    )
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
    one, two = (
        step_seconds(profile, ONE, [CARD], Workload()),
        step_seconds(profile, TWO, [CARD, CARD], Workload()),
    )
    sent = (profile.crossing[6] + profile.crossing_back[6]) * 2 / (CARD.host_bandwidth * LINK_SHARE)
    assert two == pytest.approx(one + sent, rel=0.01)


def test_pipelined_micro_batches_overlap():
    profile = made_profile("full")
    count = 4
    apart = step_seconds(profile, TWO, [CARD, CARD], Workload(micro_batches=count))
    pipelined = Workload(micro_batches=count, execution=Execution(pipelined=True))
    overlapping = step_seconds(profile, TWO, [CARD, CARD], pipelined)
    assert overlapping == pytest.approx(apart * (count + 1) / (2 * count), rel=0.05)


def test_products_of_codes_take_the_rate_of_their_format():
    """An RTX 4090 multiplies int8 four times as fast as bf16, and fp8 twice."""
    for kind, times in (("int8", 4), ("fp8", 2)):
        taken = nanoseconds((Kernel(f"matmul_{kind}", 10**15, 0), 1))
        assert taken == pytest.approx(
            1e24 / (REACHED[f"matmul_{kind}"].arithmetic * times * 165.2e12), rel=1e-3
        )


@pytest.mark.parametrize(("compute", "measured"), [("int8", 999e3), ("fp8", 972e3)])
def test_a_frozen_layer_in_8_bits_takes_what_an_h100_measured(compute, measured):
    """20,280 rows by 5,120 x 5,120: rounding them takes 136 µs, and the product in int8 863, in fp8
    836."""
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[compute]
    taken = {}
    for fused, biased in ((True, False), (True, True), (False, False)):
        with fake_tensors("cuda") as meter:
            x, codes = (
                torch.empty(20_280, 5_120, dtype=torch.bfloat16),
                torch.empty(5_120, 5_120, dtype=dtype),
            )
            product(
                x, torch.empty(5_120) if biased else None, codes, torch.empty(5_120, 1), fused=fused
            )
        kinds = {kernel.kind for kernel in meter.kernels}
        taken[fused, biased] = 1e9 * gpu_seconds(
            frozenset(meter.kernels.items()), parse_gpus("h100")[0]
        )
        is_one = fused and not (biased and compute == "fp8")
        assert ("scales" in kinds) == (f"matmul_{compute}_scaled" in kinds) == is_one, kinds
        assert (f"matmul_{compute}" in kinds) != is_one
    assert taken[True, False] == pytest.approx(measured, rel=0.05)
    assert taken[False, False] > 1.5 * taken[True, False], "torch takes several passes"
    assert (taken[True, True] > 1.05 * taken[True, False]) == (compute == "fp8"), (
        "its scales are a pass where there is a bias"
    )


def test_products_of_our_own_are_counted_as_what_they_are():
    with fake_tensors("cuda") as meter:
        wide, narrow, factor = (
            torch.empty(*size, dtype=torch.bfloat16) for size in ((64, 32), (64, 8), (8, 32))
        )
        ops.add_product(wide, narrow, factor)
        left, right = torch.empty(64, 16, dtype=torch.int8), torch.empty(32, 16, dtype=torch.int8)
        ops.multiply_codes(left, right, torch.empty(64, 1), torch.empty(1, 32), None, out=wide)
    found = {kernel.kind: kernel.flops for kernel in meter.kernels}
    assert found == {"matmul_16": 2 * 64 * 8 * 32, "matmul_int8_scaled": 2 * 64 * 16 * 32}


def test_a_gpu_that_does_not_multiply_a_format_is_named():
    execution = Execution(quantize="fp8", compute="fp8")
    work = Workload(execution=execution)
    known, unknown = (assumptions(parse_gpus(name), work)[1] for name in ("rtx4090", "rtx3090"))
    share = REACHED["matmul_fp8"].arithmetic
    fused = Workload(execution=replace(execution, kernels="triton"))
    assert "fp8 at up to 63%" in assumptions(parse_gpus("h100"), fused)[1], "of its own kernel"
    assert f"fp8 at up to {share:.0%}" in assumptions(parse_gpus("rtx4090"), fused)[1]
    assert f"fp8 at up to {share:.0%} of 330 TFLOP/s" in known and "train.kernels = triton" in known
    assert unknown == "rtx3090 does not multiply fp8: base.compute = fp8 is refused there"


def test_a_faster_gpu_is_faster():
    profile = made_profile("full")
    names = ("rtx4060ti", "rtx3090", "rtx4090", "a100-80", "h100")
    seconds = [step_seconds(profile, ONE, parse_gpus(name), Workload()) for name in names]
    assert seconds == sorted(seconds, reverse=True)


def test_what_is_assumed_is_said_for_each_gpu_once():
    lines = assumptions(parse_gpus("2x24GiB,rtx4090"), Workload())
    assert len(lines) == 3
    assert (
        "82% of 71 TFLOP/s in bf16" in lines[0]
        and "assumed as of rtx3090" in lines[0]
        and "86% of 31.5 GB/s" in lines[0]
    )
    fp32 = Workload(execution=Execution(precision=Precision(matmul=torch.float32)))
    assert "67% of 82.6 TFLOP/s in fp32" in assumptions(parse_gpus("rtx4090"), fp32)[0]
    assert "the host launches" in lines[2]
    assert "replayed" in assumptions(parse_gpus("rtx4090"), Workload(cuda_graphs="on"))[-1]


def test_equal_ways_of_dividing_take_equal_times():
    profile = replace(made_profile("full"), embed=made_profile().blocks[0])
    cuts = (3, 6, 9)
    times = {
        step_seconds(
            profile, Partition(devices=(0,) * cut + (1,) * (12 - cut)), [CARD, CARD], Workload()
        )
        for cut in cuts
    }
    assert max(times) - min(times) < 1e-6


def trained(profile):
    """The same when all of its blocks' weights are trained."""
    blocks = [
        replace(b, weights=0, adapters=2**30, gradients=0, optimizer=2**31) for b in profile.blocks
    ]
    return replace(profile, blocks=tuple(blocks), trains_all=True)


def test_streamed_trained_weights_are_copied_both_ways_with_what_the_optimizer_keeps():
    profile = trained(made_profile("full", work=0.001))
    every = Partition(devices=(0,) * 12, streamed=frozenset(range(12)))
    seconds = step_seconds(profile, every, [CARD], Workload()) - step_seconds(
        profile, ONE, [CARD], Workload()
    )
    gib = 2**30 / (CARD.host_bandwidth * LINK_SHARE)
    # 12 forwards of 1 GiB, and 10 backwards (two are there from the forward) of 3 GiB there and 3
    # back
    assert seconds == pytest.approx((12 + 10 * 6) * gib, rel=0.07)


def stages(*times, copy=0.0):
    """Devices with these (forward, backward) seconds."""
    last = len(times) - 1
    return [
        StageTime(
            forward=f,
            backward=b,
            send=0.0 if i == last else copy,
            send_back=0.0 if i == last else copy,
        )
        for i, (f, b) in enumerate(times)
    ]


ALIKE = stages((1.0, 2.0), (1.0, 2.0))


@pytest.mark.parametrize(
    ("devices", "num_micro_batches", "one_by_one", "together", "busy"),
    [
        # forwards end at 2 and 3; on the second device backwards run 3-5, 5-7, on the first 5-7,
        # 7-9
        (ALIKE, 2, 12, 9, (6, 6)),
        # forwards end at 2, 3, 4, 5; backwards 5-7 … 11-13 on the second device, 7-9 … 13-15 on the
        # first
        (ALIKE, 4, 24, 15, (12, 12)),
        # the second device works without a pause, 1-5 and 5-13, and the first adds 13-15
        (stages((1.0, 2.0), (2.0, 4.0)), 2, 18, 15, (6, 12)),
        (stages((1.0, 2.0), (2.0, 4.0)), 4, 36, 27, (12, 24)),
        # the first works without a pause until 4, the second 4-5 and 5-7, then the first 7-11 and
        # 11-15
        (stages((2.0, 4.0), (1.0, 2.0)), 2, 18, 15, (12, 6)),
        # copies take both devices: 1-1.5, 2.5-3, then back 6-6.5 and 8.5-9
        (stages((1.0, 2.0), (1.0, 2.0), copy=0.5), 2, 14, 11, (6, 6)),
        # a slow first device does not compute while it sends: 0-3, 3.5-6.5, and back 9.5-10.5, 11-12
        (stages((3.0, 1.0), (1.0, 1.0), copy=0.5), 2, 14, 12, (8, 4)),
        # three devices: (2 + 3 - 1) turns forward and back
        (stages((1.0, 2.0), (1.0, 2.0), (1.0, 2.0)), 2, 18, 12, (6, 6, 6)),
    ],
)
def test_schedules_computed_by_hand(devices, num_micro_batches, one_by_one, together, busy):
    without, with_ = (
        simulate(devices, num_micro_batches, pipelined=pipelined) for pipelined in (False, True)
    )
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
        "devices compute 50% and 50% of a step, with train.pipelined 67% and 67%, 1.33 times as "
        "fast (from estimated times)"
    )


def test_with_a_queue_for_each_device_no_micro_batch_overtakes_another():
    """Why giving the backwards one after the other gives each device what autograd's queues do:
    they take what was made last."""
    rough = random.Random(0)
    for _ in range(100):
        num_devices, num = rough.randint(2, 4), rough.randint(2, 6)
        seconds = [rough.uniform(0.1, 3) for _ in range(num_devices)]
        order = _queued(seconds, num)
        assert order == [list(reversed(range(num)))] * num_devices


def _queued(seconds, num):
    """The order in which each device runs backwards, if it takes the last micro-batch that is ready
    whenever it is free."""
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
        step_seconds(profile, ONE, [CARD], Workload(extra_forwards=share, micro_batches=count))
        for share, count in ((0, 1), (0.5, 1), (0.5, 3))
    )
    forward = sum(stage.flops_forward for stage in (profile.embed, *profile.blocks, profile.head))
    assert two - one == pytest.approx(0.5 * forward / (165.2e12 * SHARE), rel=0.01)
    assert three == pytest.approx(3 * two, rel=0.01)
    assert "with 0.5 more forwards each" in assumptions([CARD], Workload(extra_forwards=0.5))[0]
