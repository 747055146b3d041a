"""The profile of a rank that divides weights with others.

FSDP2 cuts each parameter by rows. Every rank has as many, rounded up, and what is gathered is
padded to that. It gathers a block for its forward and again for its backward, where it prefetches
the next: two blocks at a time. Embedding and head are gathered once for both. Whole gradients of a
block are added up over ranks while the next block computes its own.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ditkit_core.planner.memory import ParameterRows, Profile, StageCost
from ditkit_core.planner.ranks.layout import RankLayout
from ditkit_core.planner.ranks.replicas import replica_sums
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
    trained_bytes, all_trained = (
        _of_rank(trained, shard),
        sum(rows.number * rows.bytes_each for rows in trained),
    )
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
