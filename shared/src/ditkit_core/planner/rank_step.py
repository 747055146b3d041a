"""The step of one rank of several: its costs, what it sends, and the time of that which no
arithmetic hides.

FSDP2 cuts each parameter by rows. Every rank has as many, rounded up, and what is gathered is
padded to that. It gathers a block for its forward and again for its backward, where it prefetches
the next: two blocks at a time. Embedding and head are gathered once for both. Whole gradients of a
block are added up over ranks while the next block computes its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ditkit_core.planner.gpus import GPU
from ditkit_core.planner.memory import ParameterRows, Partition, Profile, StageCost
from ditkit_core.planner.rank_layout import RankLayout, Route
from ditkit_core.planner.replicas import replica_sums
from ditkit_core.planner.step_time import compute_time, step_seconds, streaming_time
from ditkit_core.planner.workload import RankGradients, Round, Workload


def profile_of_rank(
    undivided: Profile, layout: RankLayout, reduction: torch.dtype = torch.float32
) -> Profile:
    """The costs of one rank's stages, from the whole model's; gradients are added up over ranks in
    the dtype `reduction`."""
    if layout.shard == 1:
        return undivided
    ratio = reduction.itemsize / torch.float32.itemsize
    stages = {
        stage: _dividing_weights(stage, layout.shard, ratio)
        for stage in dict.fromkeys(undivided.stages)
    }
    blocks = tuple(stages[block] for block in undivided.blocks)
    return replace(
        undivided, embed=stages[undivided.embed], blocks=blocks, head=stages[undivided.head]
    )


def work_of_rank(work: Workload, layout: RankLayout, *, adapts: bool) -> Workload:
    """The part of a step that the fullest rank does."""
    micro_batches = layout.micro_batches(work.micro_batches)
    if layout.shard > 1:
        gradients = gradients_of_rank(micro_batches, adapts=adapts)
    else:
        gradients = replica_sums(
            work.micro_batches, layout.size, adapts=adapts, context=layout.context
        ).gradients
    return replace(work, micro_batches=micro_batches, ranks=gradients)


def gradients_of_rank(micro_batches: int, *, adapts: bool) -> RankGradients:
    """Gradients of a rank that divides them with others, for so many micro-batches of its own.

    Gradients of adapters stay undivided until the last micro-batch of a step, and are added up over
    ranks once. Gradients of all weights are added up in every micro-batch, since a whole set of
    them would be as large as the model.
    """
    if micro_batches == 1:
        rounds = [Round(again=False)]
    elif adapts:
        rounds = [
            Round(again=False, unsharded=True),
            *[Round(again=True, unsharded=True)] * (micro_batches > 2),
            Round(again=True),
        ]
    else:
        rounds = [Round(again=False), Round(again=False, sums=1)]
    return RankGradients(rounds=tuple(rounds), exchanged=0)


def _dividing_weights(stage: StageCost, shard: int, reduction: float) -> StageCost:
    frozen, trained = (
        [rows for rows in stage.rows if rows.is_trained is is_trained]
        for is_trained in (False, True)
    )
    trained_bytes = _of_rank(trained, shard)
    all_trained = sum(rows.number * rows.bytes_each for rows in trained)
    share = trained_bytes / all_trained if all_trained else 0.0
    padded = shard * share
    return replace(
        stage,
        # Buffers are no parameters: every rank has them whole.
        weights=stage.weights
        - sum(rows.number * rows.bytes_each for rows in frozen)
        + _of_rank(frozen, shard),
        adapters=int(stage.adapters * share),
        gradients=int(stage.gradients * share),
        optimizer=int(stage.optimizer * share),
        average=int(stage.average * share),
        update_extra=int(stage.update_extra * share),
        gathered=shard * (trained_bytes + _of_rank(frozen, shard)),
        reduced=int(stage.gradients * padded * reduction),
        whole_gradients=stage.gradients,
    )


def _of_rank(parameters: Sequence[ParameterRows], shard: int) -> int:
    """Bytes of the rows that the first rank has."""
    return sum(-(-rows.number // shard) * rows.bytes_each for rows in parameters)


@dataclass(frozen=True, kw_only=True)
class RouteTime:
    """The times of a step over one kind of links, in seconds."""

    name: str
    exchanges: tuple[float, ...]
    """Of each kind of exchange."""
    exposed: float
    """Of all exchanges, the part that no arithmetic hides."""
    step: float | None
    """A whole step; None if no rate of the device is known."""
    efficiency: float | None
    """Share of the ranks' time in which they do the step's arithmetic."""
    rates: str


@dataclass(frozen=True, kw_only=True)
class RanksPlan:
    """The part of a plan that is about several ranks."""

    layout: RankLayout
    micro_batches: int
    """Of a step, over all ranks."""
    host_of_machine: int
    """Bytes of page-locked host memory of all ranks of a machine."""
    loading: int
    """Bytes on the host of a rank while it loads a model whose weights ranks divide; 0 if they do
    not."""
    saving: int
    """Bytes on the host of a rank for a save that is written while training goes on; 0 if it saves
    adapters."""
    sent: dict[str, int]
    """Bytes that the busiest rank sends in a step, by kind of exchange."""
    times: tuple[RouteTime, ...]


class _Traffic(NamedTuple):
    """One kind of exchange in a step."""

    sent: int
    """Bytes that the busiest rank sends."""
    seconds: float
    exposed: float
    """Seconds of it that no arithmetic hides."""


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """A step of one rank, and how its ranks add up gradients."""

    layout: RankLayout
    profile: Profile
    """Of one rank, from `profile_of_rank`."""
    division: Partition
    work: Workload
    """Of the step, over all ranks."""
    gpu: GPU | None = None
    """The slowest; None if no rate is known."""

    @property
    def own_work(self) -> Workload:
        """The part of the fullest rank."""
        return work_of_rank(self.work, self.layout, adapts=self._adapts)

    def plan(self, routes: Sequence[Route], host: int = 0) -> RanksPlan:
        """Bytes, and times over these links; `host` is a rank's page-locked memory."""
        tensors = [
            rows.number * rows.bytes_each for stage in self.profile.stages for rows in stage.rows
        ]
        return RanksPlan(
            layout=self.layout,
            micro_batches=self.work.micro_batches,
            host_of_machine=self.layout.nproc * host,
            saving=self._saving,
            loading=max(tensors, default=0) if self.layout.shard > 1 else 0,
            sent={name: exchange.sent for name, exchange in self._exchanges(routes[0]).items()},
            times=tuple(map(self._time, routes)),
        )

    @property
    def _saving(self) -> int:
        """A copy of what a rank writes: its rows of weights, optimizer state and average, which it
        shares with their replicas."""
        if self.layout.shard == 1 or self._adapts:
            return 0
        trained = sum(
            stage.adapters + stage.optimizer + stage.average for stage in self.profile.stages
        )
        return trained * self.layout.shard // self.layout.size

    @property
    def _adapts(self) -> bool:
        return not self.profile.trains_all

    def _time(self, route: Route) -> RouteTime:
        exchanges = self._exchanges(route).values()
        exposed, step, efficiency = sum(exchange.exposed for exchange in exchanges), None, None
        if self.gpu is not None:
            work = self.own_work
            computing = step_seconds(self.profile, self.division, [self.gpu], work)
            step = computing + exposed
            # Of a step's samples each rank computes a part; those that share one compute a part of
            # it.
            efficiency = (
                computing
                / work.micro_batches
                * self.work.micro_batches
                * self.layout.context
                / (step * self.layout.size)
            )
        return RouteTime(
            name=route.name,
            exchanges=tuple(exchange.seconds for exchange in exchanges),
            exposed=exposed,
            step=step,
            efficiency=efficiency,
            rates=str(route),
        )

    def _exchanges(self, route: Route) -> dict[str, _Traffic]:
        traffic = self._of_shards(route) if self.layout.shard > 1 else self._of_replicas(route)
        return traffic | self._of_tokens(route)

    def _of_replicas(self, route: Route) -> dict[str, _Traffic]:
        """Whole gradients, after the last backward: first of the ranks that share samples, then of
        all."""
        context, size = self.layout.context, self.layout.size
        num_bytes = sum(stage.gradients for stage in self.profile.stages)
        traffic = dict[str, _Traffic]()
        if context > 1:
            sent = 2 * num_bytes * (context - 1) // context
            seconds = sent / route.gathered(context)
            traffic["gradients, of shared samples"] = _Traffic(sent, seconds, seconds)
        sums = replica_sums(self.work.micro_batches, size, adapts=self._adapts, context=context)
        if size > 1:
            seconds = sums.seconds(
                lambda rank, other: num_bytes / route.between_two(rank, other),
                num_bytes / route.gathered(size),
            )
            traffic["gradients, in a tree"] = _Traffic(sums.most_sent * num_bytes, seconds, seconds)
        return traffic

    def _of_shards(self, route: Route) -> dict[str, _Traffic]:
        """Weights, gathered for the forward and again for the backward of each block, and
        gradients, added up behind each block."""
        shard, repeated = self.layout.shard, self.layout.size // self.layout.shard
        micro_batches = self.own_work.micro_batches
        sums = 1 if self._adapts else micro_batches  # see `gradients_of_rank`
        ends, blocks = (self.profile.embed, self.profile.head), self.profile.blocks
        part, rate = (shard - 1) / shard, route.gathered(shard)
        across = route.ring(max(1, self.layout.nproc // shard)) if repeated > 1 else 1.0
        twice = 2 * (repeated - 1) / repeated / shard

        def summed(stages: Sequence[StageCost]) -> float:
            return sum(stage.reduced for stage in stages) * (part / rate + twice / across)

        gathered_ends = sum(stage.gathered for stage in ends)
        gathered_blocks = sum(block.gathered for block in blocks)
        gathers = (gathered_ends + 2 * gathered_blocks) * part * micro_batches
        reduced = sum(stage.reduced for stage in self.profile.stages)
        # Of exchanges that arithmetic may hide: the same timeline as of streamed weights, whose
        # copies run ahead by a block.
        forward = self._exposed(True, [block.gathered * part / rate for block in blocks])
        gather = [block.gathered * part / rate for block in blocks]
        backward = self._exposed(False, gather)
        with_sums = self._exposed(
            False,
            [gathering + summed([block]) for gathering, block in zip(gather, blocks, strict=True)],
        )
        tail = summed([*ends, blocks[0]])
        traffic = {
            "weights, gathered": _Traffic(
                int(gathers),
                gathers / rate,
                micro_batches * (gathered_ends * part / rate + forward + backward),
            ),
            "gradients, to the rank of their rows": _Traffic(
                int(reduced * part * sums),
                reduced * part * sums / rate,
                sums * (with_sums - backward + tail),
            ),
        }
        if repeated > 1:
            sent = reduced * twice * sums
            # The time that nothing hides is in the row before.
            traffic["gradients, of repeated ranks"] = _Traffic(int(sent), sent / across, 0.0)
        return traffic

    def _of_tokens(self, route: Route) -> dict[str, _Traffic]:
        """Tokens of ranks that share samples: for attention, and all of them before the head.
        Nothing hides them."""
        if self.layout.context == 1:
            return {}
        sent = self.own_work.micro_batches * sum(
            stage.sent_forward + stage.sent_backward for stage in self.profile.stages
        )
        seconds = sent / route.gathered(self.layout.context)
        return {"tokens of shared samples": _Traffic(sent, seconds, seconds)}

    def _exposed(self, is_forward: bool, exchanges: Sequence[float]) -> float:
        """Seconds for which a pass over the blocks waits for exchanges; without a known rate all of
        them."""
        if self.gpu is None:
            return sum(exchanges)
        computed = [
            compute_time(block, self.gpu, self.work, backward=not is_forward)
            for block in self.profile.blocks
        ]
        stages = [
            (compute, int(exchange * 1e9))
            for compute, exchange in zip(computed, exchanges, strict=True)
        ]
        total = streaming_time(stages if is_forward else stages[::-1], ahead=False)
        return (total - sum(computed)) / 1e9
