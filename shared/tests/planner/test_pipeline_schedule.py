"""Pipelined micro-batches on several devices: schedules computed by hand, and what holds for all of them."""

import heapq
import random

import pytest

from ditkit_core.planner.pipeline_schedule import StageSeconds, accumulated, pipelined, utilisation


def stages(*times, copy=0.0):
    """Devices with these (forward, backward) seconds."""
    last = len(times) - 1
    return [
        StageSeconds(forward=f, backward=b, send=0.0 if i == last else copy, send_back=0.0 if i == last else copy)
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
    without, with_ = accumulated(devices, num_micro_batches), pipelined(devices, num_micro_batches)
    assert (without.seconds, with_.seconds) == (one_by_one, together)
    assert without.busy == with_.busy == busy
    assert with_.utilisation == tuple(seconds / together for seconds in busy)


def test_what_cannot_overlap_gains_nothing():
    one_device = utilisation(stages((1.0, 2.0)), 4, source="measured")
    one_micro_batch = utilisation(ALIKE, 1, source="measured")
    assert one_device.gain == one_micro_batch.gain == 1
    assert one_device.pipelined.utilisation == (1,)


def test_no_schedule_beats_the_busiest_device_or_loses_to_one_after_the_other():
    rough = random.Random(0)
    for _ in range(200):
        times = [(rough.uniform(0.1, 3), rough.uniform(0.1, 6)) for _ in range(rough.randint(2, 4))]
        found = utilisation(stages(*times, copy=rough.uniform(0, 0.5)), rough.randint(2, 6), source="estimated")
        assert max(found.pipelined.busy) < found.pipelined.seconds < found.accumulated.seconds


def test_the_line_says_where_its_times_are_from():
    line = str(utilisation(ALIKE, 2, source="estimated"))
    assert line == (
        "devices compute 50% and 50% of a step, with train.pipelined 67% and 67%, 1.33 times as fast (from estimated times)"
    )
    assert "from measured times" in str(utilisation(ALIKE, 2, source="measured"))


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
