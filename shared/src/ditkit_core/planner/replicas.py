"""The gradients that replicas have and send in a step.

The real sum of a training step runs here for every rank, on a small tensor in place of all
gradients and with exchanges that move nothing. So the plan changes with the sum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ditkit_core.distributed.gradient_sum import GradientSum
from ditkit_core.distributed.ranks import Ranks
from ditkit_core.planner.memory_tracker import MemoryTracker
from ditkit_core.planner.workload import RankGradients, Round


class Move(NamedTuple):
    """One set of gradients that a rank sends or receives; a broadcast is a move to or from rank
    0."""

    sends: bool
    other: int
    """The other rank; -1 for all others."""


@dataclass
class RecordedRanks(Ranks):
    """A rank of several that are not there.

    Of gradients it records the moves, and of tokens the bytes, as rings send them: a rank keeps its
    own part.
    """

    moves: list[Move] = field(default_factory=list)

    def all_reduce(self, numbers: Tensor, group: Any = None) -> Tensor:
        """Flags."""
        return numbers

    def send(self, tensor: Tensor, to: int) -> None:
        """Gradients."""
        self.moves.append(Move(True, to))

    def recv(self, buffer: Tensor, source: int) -> Tensor:
        """Gradients."""
        self.moves.append(Move(False, source))
        return buffer

    def broadcast(self, tensor: Tensor, source: int = 0, group: Any = None) -> Tensor:
        """The sum of all gradients."""
        self.moves.append(Move(self.is_first, -1))
        return tensor

    def mean_in_group(self, tensor: Tensor) -> Tensor:
        """The sum of gradients of ranks that share samples, which is counted by its number of ranks
        alone."""
        return tensor

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Tokens or heads."""
        self.bytes_sent += parts.nbytes - parts.nbytes // self.context
        return parts.new_empty(parts.shape)

    def all_gather(self, part: Tensor) -> Tensor:
        """Tokens."""
        self.bytes_sent += part.nbytes * (self.context - 1)
        return part.new_empty((self.context, *part.shape))


_SET = 1024
"""Bytes of the tensor that stands for one set of gradients: flags of the exchange are small next to
it."""
_HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class ReplicaSums:
    """How replicas add up the gradients of a step."""

    gradients: RankGradients
    moves: tuple[tuple[Move, ...], ...]
    """The exchanges of each rank, in their order."""

    @property
    def most_sent(self) -> int:
        """Sets of gradients that the busiest rank gives to exchanges in a step."""
        return max(sum(move.sends for move in moves) for moves in self.moves)

    def seconds(self, cost: Callable[[int, int], float], broadcast: float) -> float:
        """Time from the first exchange until all ranks have the sum, if all begin at once. `cost`
        is of a set of gradients from one rank to another, `broadcast` of the sum from rank 0 to
        all, in seconds."""
        free = [0.0] * len(self.moves)
        left = [[move for move in moves if move.other >= 0] for moves in self.moves]
        # Two ranks meet when both have come to the exchange between them; one of any step's first
        # moves always can.
        while any(left):
            for rank, moves in enumerate(left):
                while moves and left[moves[0].other][:1] == [Move(not moves[0].sends, rank)]:
                    other = moves.pop(0).other
                    left[other].pop(0)
                    free[rank] = free[other] = max(free[rank], free[other]) + cost(rank, other)
        return max(free) + (broadcast if len(self.moves) > 1 else 0.0)


@cache
def replica_sums(micro_batches: int, size: int, *, adapts: bool, context: int = 1) -> ReplicaSums:
    """Add up the gradients of a step's micro-batches on every rank, as
    `train_step.accumulate_gradients` does; unless adapters are trained, each rank first adds up its
    own. `context` ranks share each sample."""
    ranks = [RecordedRanks(rank, size, context=context) for rank in range(size)]
    sums_by_rank = [_of_rank(recorded, micro_batches, adapts=adapts) for recorded in ranks]
    rounds = {entry for rounds_of_rank, _, _ in sums_by_rank for entry in rounds_of_rank}
    chosen = [
        max((entry for entry in rounds if entry.again is again), default=None)
        for again in (False, True)
    ]
    gradients = RankGradients(
        rounds=tuple(entry for entry in chosen if entry is not None),
        exchanged=max(sets for _, sets, _ in sums_by_rank),
    )
    return ReplicaSums(gradients=gradients, moves=tuple(moves for _, _, moves in sums_by_rank))


def _of_rank(
    ranks: RecordedRanks, micro_batches: int, *, adapts: bool
) -> tuple[Sequence[Round], int, tuple[Move, ...]]:
    """The gradients of earlier micro-batches at the begin of each, the most sets during the
    exchange, and the exchange."""
    parameter = nn.Parameter(torch.empty(_SET // 4), requires_grad=True)
    total = GradientSum({"": parameter}, micro_batches if adapts else ranks.num_groups, ranks)
    rounds = []
    with MemoryTracker() as tracker:
        for leaf in ranks.share(micro_batches):
            again = parameter.grad is not None
            rounds.append(Round(again=again, sums=tracker.total(_HOST) // _SET - again))
            if not again:
                parameter.grad = torch.empty_like(parameter)
            if adapts:
                total.add(leaf)
        if not adapts:
            total.add(ranks.group_index)
        tracker.restart_peak()
        if ranks.size > 1 or adapts:
            total.finish()
        return rounds, tracker.peak[_HOST] // _SET, tuple(ranks.moves)
