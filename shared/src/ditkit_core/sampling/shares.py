"""Divides the samples of a run over its ranks, and brings what is needed of each back to the
first."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ditkit_core.distributed.ranks import Ranks


class RenderedSample(NamedTuple):
    """A sample whose file is written."""

    about: dict[str, Any]
    """Its entry in the list of samples."""
    frames: Tensor
    """Those that are shown of it, fp32 [3, frames, height, width] on the CPU."""


@dataclass(frozen=True, kw_only=True)
class SampleShares:
    """Which ranks generate samples."""

    ranks: Ranks = field(default_factory=Ranks)
    num: int = 1
    """How many of them generate, the first ones; the others have nothing to do."""

    @property
    def in_step(self) -> bool:
        """Whether ranks divide the weights, so that all of them have to run equally many forwards
        at the same time."""
        return self.ranks.shard > 1

    @classmethod
    def of(cls, ranks: Ranks) -> Self:
        """All of these ranks generate."""
        return cls(ranks=ranks, num=ranks.size)

    def local_indices(self, count: int) -> list[tuple[int, bool]]:
        """The indices of this rank's samples among `count`: the first rank has the first one, the
        second rank the next, and so on.

        Ranks that run `in_step` get stand-ins at the end where others have one more; these are
        marked False and do not count.
        """
        rank = self.ranks.rank
        share = [(index, True) for index in range(rank, count, self.num)] if rank < self.num else []
        return (
            share + [(0, False)] * (-(-count // self.num) - len(share)) if self.in_step else share
        )

    def ends(self, decision: bool) -> bool:
        """Whether this rank ends here if it would by its own `decision`: ranks that run `in_step`
        do so together."""
        return self.ranks.any(decision) if self.in_step else decision

    def gathered(self, local_samples: Sequence[RenderedSample], count: int) -> list[RenderedSample]:
        """All samples in their order, on the first rank; on others `local_samples` alone."""
        ranks = self.ranks
        descriptions: list[Any] = ranks.all_gather_object(
            [[sample.about, list(sample.frames.shape)] for sample in local_samples]
        )
        if not ranks.is_first:
            for sample in local_samples:
                ranks.send(sample.frames.contiguous(), to=0)
            return list(local_samples)
        samples: list[RenderedSample] = []
        for position in range(count):
            index, rank = divmod(position, self.num)
            about, shape = descriptions[rank][index]
            samples.append(
                RenderedSample(about, ranks.recv(torch.empty(shape), rank))
                if rank
                else local_samples[index]
            )
        return samples


ALONE = SampleShares()
"""This process generates all samples."""
