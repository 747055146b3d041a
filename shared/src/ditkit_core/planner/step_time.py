"""How long a step would take: arithmetic over assumed rates, with what a card waits for besides.

This is an estimate for choosing between settings, and it says what it assumes. Times are whole nanoseconds, so that equal ways of dividing
a model take equal times.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ditkit_core.planner.gpus import Card
from ditkit_core.planner.memory import Division
from ditkit_core.planner.pipeline_schedule import (
    Comparison,
    Schedule,
    StageSeconds,
    accumulated,
    pipelined,
    utilisation,
)
from ditkit_core.planner.profiler import Profile, StageCost

UTILISATION = 0.5
"""Share of a card's published rate that a whole step is assumed to reach: elementwise work included, which is not counted apart."""
LINK_SHARE = 0.8
"""Share of a link's published rate that copies from pinned memory are assumed to reach."""
MEMORY_SHARE = 0.8
"""The same of a card's own memory."""
BUFFERS = 2
"""Streamed blocks that lie on a device at a time, the one at work included."""
CONVERSION_TRAFFIC = {"none": 0, "int8": 7, "fp8": 7, "nf4": 45}
"""Bytes read and written for each stored byte when quantized weights are made bf16, one operation after the other: 8 bits are copied
and scaled; a byte of two 4-bit codes is widened, looked up, scaled and copied."""
CONVERSIONS_FORWARD, CONVERSIONS_BACKWARD = 1, 2


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a step is, besides its model."""

    micro_batches: int = 1
    pipelined: bool = False
    fp32: bool = False
    """Whether matrices are multiplied in fp32."""
    quantize: str = "none"
    """What the frozen matrices are held in."""


@dataclass(frozen=True, kw_only=True)
class SpanTime:
    """What a device needs for the stages that it holds, in nanoseconds."""

    forward: int
    """Of one micro-batch, waiting for streamed weights included."""
    backward: int
    update: int
    """Of one step."""
    waiting: int
    """What is included of waiting for weights, in one micro-batch."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A step's time, and what it is made of."""

    seconds: float
    waiting_seconds: float
    """For weights that arrive later than they are needed, on all devices."""
    crossing_seconds: float
    """For what is sent between devices."""
    busy: tuple[float, ...]
    """Share of the step in which each device works."""


def step_seconds(profile: Profile, division: Division, cards: Sequence[Card], work: Workload) -> StepTime:
    """Estimate a training step.

    Args:
        profile: What the stages do.
        division: Where they are.
        cards: The devices, as many as the division has.
        work: How a step is made up.
    """
    spans, crossings = _spans(profile, division, cards, work)
    total, schedule = step_time(spans, crossings, work)
    working = [
        busy * 1e9 - span.waiting * work.micro_batches + span.update
        for busy, span in zip(schedule.busy, spans, strict=True)
    ]
    return StepTime(
        seconds=total / 1e9,
        waiting_seconds=sum(span.waiting for span in spans) * work.micro_batches / 1e9,
        crossing_seconds=sum(map(sum, crossings)) * work.micro_batches / 1e9,
        busy=tuple(time / max(total, 1) for time in working),
    )


def both_orders(profile: Profile, division: Division, cards: Sequence[Card], work: Workload) -> Comparison | None:
    """How much the devices work with pipelined micro-batches and without, updates left out; None where nothing could overlap."""
    if len(cards) == 1 or work.micro_batches == 1:
        return None
    return utilisation(_stages(*_spans(profile, division, cards, work)), work.micro_batches, source="estimated")


def _spans(
    profile: Profile, division: Division, cards: Sequence[Card], work: Workload
) -> tuple[list[SpanTime], list[tuple[int, int]]]:
    """What each device needs, and each cut."""
    bounds = [0, *(i for i in range(1, len(division.devices)) if division.devices[i] != division.devices[i - 1])]
    bounds.append(len(division.devices))
    assert len(bounds) == len(cards) + 1, (bounds, len(cards))
    spans = [
        span_time(profile, card, start, end, division.streamed, work)
        for card, (start, end) in zip(cards, pairwise(bounds), strict=True)
    ]
    return spans, [crossing_time(profile, cut, pair) for cut, pair in zip(bounds[1:-1], pairwise(cards), strict=True)]


def step_time(spans: Sequence[SpanTime], crossings: Sequence[tuple[int, int]], work: Workload) -> tuple[int, Schedule]:
    """Nanoseconds of a step whose devices need so long for their parts, and how the micro-batches go through them."""
    schedule = (pipelined if work.pipelined else accumulated)(_stages(spans, crossings), work.micro_batches)
    return round(schedule.seconds * 1e9) + sum(span.update for span in spans), schedule


def _stages(spans: Sequence[SpanTime], crossings: Sequence[tuple[int, int]]) -> list[StageSeconds]:
    return [
        StageSeconds(forward=span.forward / 1e9, backward=span.backward / 1e9, send=there / 1e9, send_back=back / 1e9)
        for span, (there, back) in zip(spans, [*crossings, (0, 0)], strict=True)
    ]


def span_time(
    profile: Profile, card: Card, start: int, end: int, streamed: Collection[int], work: Workload
) -> SpanTime:
    """What `card` needs for the blocks from `start` to before `end`, with the embedding before the first and the head after the last."""
    is_first, is_last = start == 0, end == len(profile.blocks)
    stages = [(profile.blocks[i], i in streamed) for i in range(start, end)]
    stages = [*([(profile.embed, False)] if is_first else []), *stages, *([(profile.head, False)] if is_last else [])]
    link = card.host_bandwidth * LINK_SHARE

    def timed(stage: StageCost, copied: int, flops: int, conversions: int) -> tuple[int, int]:
        return compute_time(stage, card, flops, conversions, work), int(copied / link * 1e9)

    # What a block sends to the host takes the link behind its forward, and again before its backward: of one block at a time, too.
    forward = [
        timed(stage, copied_forward(profile, stage) * through + stage.on_host, stage.flops_forward, CONVERSIONS_FORWARD)
        for stage, through in stages
    ]
    backward = [
        timed(
            stage, copied_backward(profile, stage) * through + stage.on_host, stage.flops_backward, CONVERSIONS_BACKWARD
        )
        for stage, through in stages[::-1]
    ]
    # A device that waits for the one before it has its first blocks there when its turn comes, and a backward those that the forward
    # ended with.
    passes = streaming_time(forward, ahead=not is_first), streaming_time(backward, ahead=True)
    kept = sum(stage.adapters + stage.gradients + stage.optimizer + stage.average for stage, _ in stages)
    return SpanTime(
        forward=passes[0],
        backward=passes[1],
        update=int(2 * kept / (card.memory_bandwidth * MEMORY_SHARE) * 1e9),
        waiting=sum(passes) - sum(compute for compute, _ in (*forward, *backward)),
    )


def copied_forward(profile: Profile, stage: StageCost) -> int:
    """Bytes that come for a streamed block's forward: of a full fine-tune its trained weights."""
    return stage.weights + (stage.adapters if profile.trains_all else 0)


def copied_backward(profile: Profile, stage: StageCost) -> int:
    """Bytes that come for its backward, and of a full fine-tune go back: one stream copies both ways, with the optimizer's state."""
    return stage.weights + (2 * (stage.adapters + stage.optimizer) if profile.trains_all else 0)


def compute_time(stage: StageCost, card: Card, flops: int, conversions: int, work: Workload) -> int:
    """Nanoseconds of a stage's arithmetic, with its quantized weights converted so many times."""
    rate = (card.fp32_flops if work.fp32 else card.bf16_flops) * UTILISATION
    converted = stage.weights * CONVERSION_TRAFFIC[work.quantize] * conversions
    return int(flops / rate * 1e9) + int(converted / (card.memory_bandwidth * MEMORY_SHARE) * 1e9)


def streaming_time(stages: Sequence[tuple[int, int]], *, ahead: bool) -> int:
    """Nanoseconds of stages that run one after the other while the weights of later ones are copied.

    A copy begins when the one before it is done and a buffer is free: when the block that had it has run.

    Args:
        stages: (arithmetic, copying) of each; copying is 0 for resident weights.
        ahead: Whether as many as there are buffers have arrived before the first stage begins.
    """
    now, copied, ends = 0, 0, list[int]()
    for compute, copying in stages:
        if copying and not (ahead and len(ends) < BUFFERS):
            free = ends[-BUFFERS] if len(ends) >= BUFFERS else 0
            copied = max(copied, free) + copying
            now = max(now, copied)
        now += compute
        if copying:
            ends.append(now)
    return now


def crossing_time(profile: Profile, cut: int, cards: tuple[Card, Card]) -> tuple[int, int]:
    """Nanoseconds to send the carry over before block `cut`, and its gradients back: through host memory, one copy out and one in."""

    def through_host(num_bytes: int) -> int:
        return sum(int(num_bytes / (card.host_bandwidth * LINK_SHARE) * 1e9) for card in cards)

    return through_host(profile.crossing[cut]), through_host(profile.crossing_back[cut])


def assumptions(cards: Sequence[Card], work: Workload) -> list[str]:
    """What an estimate for these cards assumes, line by line."""
    lines = []
    for card in dict.fromkeys(cards):
        rate = card.fp32_flops if work.fp32 else card.bf16_flops
        lines.append(
            f"{card.name}: {rate * UTILISATION / 1e12:.0f} TFLOP/s, which is {UTILISATION:.0%} of {rate / 1e12:g} in "
            f"{'fp32' if work.fp32 else 'bf16'}; memory {card.memory_bandwidth * MEMORY_SHARE / 1e9:.0f} GB/s, link to the host "
            f"{card.host_bandwidth * LINK_SHARE / 1e9:.1f} GB/s, which is {LINK_SHARE:.0%} of the published figures ({card.source})"
        )
    return lines
