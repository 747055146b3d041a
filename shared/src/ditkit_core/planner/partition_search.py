"""The fastest way to divide a model over cards that it fits on, by looking at every way.

What a device holds and how long it takes depend on its own blocks, not on how the others are divided: each span of blocks is judged once,
spans of like blocks share the judgement, and dynamic programming puts the spans together.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from ditkit_core.planner.gpus import Card
from ditkit_core.planner.memory import Budget, DevicePlan, Division, compose, on_host, plan_device, sent_to_host
from ditkit_core.planner.partition import streamed_of
from ditkit_core.planner.profiler import Profile
from ditkit_core.planner.step_time import SpanTime, Workload, crossing_time, span_time, step_time

_ENDLESS = Budget(name="", total=2**62)
_CAPS = 12
"""Bounds of the slowest device's time that are tried where micro-batches overlap."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """The blocks that a device holds, from `start` to before `end`, some of them streamed."""

    card: Card
    start: int
    end: int
    num_streamed: int
    time: SpanTime
    host: int
    """Bytes of the streamed weights, and of activations that wait on the host."""


def budget_of(card: Card) -> Budget:
    """The card as a plan takes it."""
    return Budget(name=card.name, total=card.total, reserve=card.reserve)


Judge = Callable[[Card, int, int], Span | None]
_Way = tuple[int, int, tuple[Span, ...]]


def _undominated(ways: list[_Way], most: int | None) -> list[_Way]:
    """Of ways, those of which none is both faster and lighter on the host, the fastest first."""
    kept: list[_Way] = []
    for way in sorted(ways, key=lambda way: way[:2])[:most]:
        if not kept or way[1] < kept[-1][1]:
            kept.append(way)
    return kept


class Search:
    """Ways to divide one profile."""

    def __init__(self, profile: Profile, work: Workload, *, streams_trained: bool = False):
        """Judge nothing yet.

        Args:
            profile: What the stages hold and do.
            work: How a step is made up.
            streams_trained: Whether blocks can be streamed whose weights are trained.
        """
        self._profile, self._work = profile, work
        self._num_blocks = len(profile.blocks)
        trained = profile.trains_all and streams_trained
        self._has_weights = [block.weights + trained * block.adapters > 0 for block in profile.blocks]
        # A block without parameters runs where its carry is: no device begins with it.
        self._starts = [i for i, block in enumerate(profile.blocks) if i and block.weights + block.adapters > 0]
        kinds = {block: kind for kind, block in enumerate(dict.fromkeys(profile.blocks))}
        self._kinds = [kinds[block] for block in profile.blocks]
        self._held: dict[Hashable, int] = {}
        self._times: dict[Hashable, tuple[SpanTime, int]] = {}
        self._like = cache(self._signature)

    def fastest(self, cards: Sequence[Card], share: float = 1.0, host: int | None = None) -> tuple[Span, ...] | None:
        """The fastest division over all of these cards, in their order; None if none fits.

        Args:
            cards: At least one.
            share: Of what each card can give, the most that may be used.
            host: Bytes that may be taken on the host; None for any.
        """
        judge = self._judge(share)
        found = self._divide(cards, judge, host)
        if not found or not self._work.pipelined:
            return found[0] if found else None
        # The slowest device decides, which is no sum: bound it more and more.
        slowest = max(span.time.forward + span.time.backward for span in found[0])
        least = sum(span.time.forward + span.time.backward for span in found[0]) / len(found[0])
        ways = found
        for step in range(_CAPS):
            ways = [*ways, *self._divide(cards, judge, host, least * (slowest / least) ** (step / _CAPS))]
        return min(ways, key=self._step_time)

    def least_host(self, cards: Sequence[Card]) -> int | None:
        """The fewest bytes on the host with which the model fits these cards; None if it does not."""
        ways = self._divide(cards, self._judge(1.0), 2**62)
        return sum(span.host for span in ways[-1]) if ways else None

    def least_missing(self, cards: Sequence[Card]) -> int:
        """Bytes that the fullest card lacks with all blocks streamed and the best cuts; 0 if it fits."""
        best: dict[int, int] = {0: 0}
        for place, card in enumerate(cards):
            following: dict[int, int] = {}
            for end in self._ends(place == len(cards) - 1):
                lacking = [
                    max(before, self._least_held(start, end) - (card.total - card.reserve))
                    for start, before in best.items()
                    if start < end
                ]
                if lacking:
                    following[end] = min(lacking)
            best = following
        return best[self._num_blocks]

    def division(self, spans: Sequence[Span]) -> Division:
        """The spans as a plan takes them."""
        devices = tuple(i for i, span in enumerate(spans) for _ in range(span.start, span.end))
        streamed = (self._streamed(span.start, span.end, span.num_streamed) for span in spans)
        return Division(devices=devices, streamed=frozenset().union(*streamed))

    def plan(self, spans: Sequence[Span]) -> tuple[DevicePlan, ...]:
        """What each card holds."""
        budgets, work = [budget_of(span.card) for span in spans], self._work
        return compose(
            self._profile, self.division(spans), budgets, micro_batches=work.micro_batches, pipelined=work.pipelined
        )

    def _judge(self, share: float) -> Judge:
        @cache
        def judge(card: Card, start: int, end: int) -> Span | None:
            count = self._fewest_streamed(start, end, int((card.total - card.reserve) * share))
            if count is None:
                return None
            time, host = self._time(card, start, end, count)
            return Span(card=card, start=start, end=end, num_streamed=count, time=time, host=host)

        return judge

    def _divide(
        self, cards: Sequence[Card], judge: Judge, host: int | None, bound: float | None = None
    ) -> list[tuple[Span, ...]]:
        """Spans that take least in sum, none of them longer than `bound`: the fastest ones first, behind them what takes less of a
        limited host; empty if nothing fits."""
        count = 1 if self._work.pipelined else self._work.micro_batches
        # best[k]: (nanoseconds, bytes on the host, spans) of the cards so far, when they hold the first k blocks
        best: dict[int, list[_Way]] = {0: [(0, 0, ())]}
        for place, card in enumerate(cards):
            following: dict[int, list[_Way]] = {}
            for start, ways in best.items():
                sent = sum(crossing_time(self._profile, start, (cards[place - 1], card))) if place else 0
                for end in self._ends(place == len(cards) - 1):
                    if end <= start:
                        continue
                    span = judge(card, start, end)
                    if span is None or (bound and span.time.forward + span.time.backward > bound):
                        break  # with more blocks it holds more, and takes longer
                    taken = (span.time.forward + span.time.backward + sent) * count + span.time.update
                    following.setdefault(end, []).extend(
                        (time + taken, held + span.host, (*spans, span))
                        for time, held, spans in ways
                        if host is None or held + span.host <= host
                    )
            best = {end: _undominated(ways, 1 if host is None else None) for end, ways in following.items()}
        return [spans for _, _, spans in best.get(self._num_blocks, [])]

    def _step_time(self, spans: Sequence[Span]) -> int:
        pairs = [(before.card, after.card) for before, after in pairwise(spans)]
        sent = [crossing_time(self._profile, span.start, pair) for span, pair in zip(spans[1:], pairs, strict=True)]
        return step_time([span.time for span in spans], sent, self._work)[0]

    def _ends(self, is_last: bool) -> list[int]:
        return [self._num_blocks] if is_last else self._starts

    def _fewest_streamed(self, start: int, end: int, capacity: int) -> int | None:
        """How many of the blocks have to be streamed so that a device holds no more than `capacity`."""
        if self._bytes_held(start, end, 0) <= capacity:
            return 0
        if self._least_held(start, end) > capacity:
            return None
        low, high = 0, sum(self._has_weights[start:end])
        while high - low > 1:
            # Blocks of one kind weigh the same: the line between the two meets the capacity next to the count that is looked for.
            over, under = self._bytes_held(start, end, low), self._bytes_held(start, end, high)
            guess = low + math.ceil((high - low) * (over - capacity) / (over - under)) if over > under else low + 1
            for middle in (min(max(guess, low + 1), high - 1), (low + high) // 2):
                if low < middle < high:
                    fits = self._bytes_held(start, end, middle) <= capacity
                    low, high = (low, middle) if fits else (middle, high)
        return high

    def _least_held(self, start: int, end: int) -> int:
        return min(self._bytes_held(start, end, count) for count in {0, sum(self._has_weights[start:end])})

    def _bytes_held(self, start: int, end: int, count: int) -> int:
        like = (self._like(start, end), count)
        if like not in self._held:
            self._held[like] = plan_device(
                self._profile, start, end, _ENDLESS, streamed=self._streamed(start, end, count),
                micro_batches=self._work.micro_batches, pipelined=self._work.pipelined,
            ).peak  # fmt: skip
        return self._held[like]

    def _time(self, card: Card, start: int, end: int, count: int) -> tuple[SpanTime, int]:
        """Of a span, and bytes of what it streams or sends to the host."""
        like = (card, self._like(start, end), count)
        if like not in self._times:
            streamed = self._streamed(start, end, count)
            time = span_time(self._profile, card, start, end, streamed, self._work)
            work = self._work
            sent = sent_to_host(
                self._profile, range(start, end), micro_batches=work.micro_batches, pipelined=work.pipelined
            )
            self._times[like] = time, on_host(self._profile, streamed) + sent
        return self._times[like]

    def _streamed(self, start: int, end: int, count: int) -> frozenset[int]:
        return streamed_of(self._has_weights, start, end, count)

    def _signature(self, start: int, end: int) -> Hashable:
        """What a span's bytes and time depend on."""
        crossed = [
            (self._profile.crossing[cut], self._profile.crossing_back[cut])
            for cut in (start, end)
            if 0 < cut < self._num_blocks
        ]
        return start == 0, end == self._num_blocks, tuple(self._kinds[start:end]), tuple(crossed)
