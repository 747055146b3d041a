"""What a step does apart from its model: how many micro-batches it has, how they run, and who
shares them."""

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch

from ditkit_core.distributed.gradient_sum import num_waiting_sums
from ditkit_core.execution import Execution

CudaGraphs = Literal["auto", "on", "off"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Properties of a step apart from its model."""

    execution: Execution = field(default_factory=Execution)
    """How the step runs as configured."""
    micro_batches: int = 1
    """Number accumulated; gradients of the first exist while the second runs."""
    cuda_graphs: CudaGraphs = "off"
    """`execution.cuda_graphs` as it turns out: `off` also where a setting of the run forbids
    replays. Where it is split, streamed or offloaded nothing is replayed either:
    `DeviceSpan.as_replayed` knows."""
    kinds: int = 1
    """Kinds of micro-batches; a kind has inputs of its own once it is replayed."""
    validates: bool = False
    """Whether there is a validation, whose forwards are eager."""
    extra_forwards: float = 0.0
    """Mean number of further forwards in a step, which keep nothing (`prior.match_base`,
    `flow.target_guidance`, `flow.slider_positive`)."""
    rounding: str = ""
    """`optim.rounding` of trained weights in bf16; empty if they are fp32."""
    ranks: "RankGradients | None" = None
    """Gradients of the fullest rank, if several ranks share the step; `micro_batches` is then the
    number of the rank that has most."""

    @property
    def kernels(self) -> str:
        """Whose memory and time the step has: `torch` or `triton`. `auto` is `torch`:
        `with_planned_kernels` resolves it."""
        return "torch" if self.execution.kernels == "auto" else self.execution.kernels

    @property
    def fp32(self) -> bool:
        """Whether matrices are multiplied in fp32."""
        return self.execution.precision.matmul == torch.float32

    @property
    def waiting(self) -> int:
        """Micro-batches whose activations are alive when the first backward runs."""
        return self.micro_batches - 1 if self.execution.pipelined else 0

    @property
    def has_cuda_graphs(self) -> bool:
        """Whether the host launches no operation of a micro-batch. A work from
        `DeviceSpan.as_replayed` leaves no choice."""
        return self.cuda_graphs != "off"

    def rounds(self, *, trains_all: bool) -> list["Round"]:
        """The micro-batches with the highest peaks: one that begins a set of gradients, and one
        that adds to a set.

        A replay always adds: its gradients have memory that stays, and begin as zeros.
        """
        if self.has_cuda_graphs:
            return [
                micro_batch._replace(again=True)
                for micro_batch in replace(self, cuda_graphs="off").rounds(trains_all=trains_all)
            ]
        if self.ranks is not None:
            return list(self.ranks.rounds)
        apart = not (trains_all or self.execution.pipelined)  # else all are added to one set
        leaves = range(self.micro_batches)
        sums = [
            max((num_waiting_sums(leaf) for leaf in leaves[odd::2]), default=0) * apart
            for odd in (0, 1)
        ]
        return [Round(again=False, sums=sums[0]), Round(again=True, sums=sums[1])][
            : self.micro_batches
        ]


class Round(NamedTuple):
    """The gradients of earlier micro-batches that exist while one runs."""

    again: bool
    """Whether its gradients are added in place to the gradients of the one before."""
    sums: int = 0
    """Sets of gradients that wait to be added to others. Where ranks divide gradients: whether they
    already have their parts of some."""
    unsharded: bool = False
    """Whether ranks that divide gradients leave them whole, because a later micro-batch adds to
    them."""


class RankGradients(NamedTuple):
    """Sets of gradients of ranks that share a step; each figure is the fullest rank's."""

    rounds: tuple[Round, ...]
    exchanged: int
    """Sets that exist while ranks exchange theirs, buffers included."""


PLAIN = Workload()
"""One micro-batch of exact weights."""
