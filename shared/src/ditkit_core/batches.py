"""Which samples make up which micro-batch, as places in a list: a function of the seed and the micro-batch's index alone."""

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ditkit_core.randomness import seed_of


class Places(NamedTuple):
    """One micro-batch."""

    first: int
    """Samples in all micro-batches before it, since the start of the run."""
    samples: list[int]
    """Which, as indices."""


class Order(Protocol):
    """An endless sequence of micro-batches."""

    @property
    def mean_size(self) -> float:
        """Samples in a micro-batch, on average over an epoch."""
        ...

    def places(self, index: int) -> Places:
        """The micro-batch of this index, counted since the start of the run."""
        ...


def epoch_order(seed: int, epoch: int, ids: Sequence[str]) -> list[int]:
    """The order of one epoch, as indices into `ids`.

    Sorting by a hash rather than drawing a permutation: the order depends on nothing but the ids, whatever order they
    are given in, and another sample among them leaves the order of the rest as it was.

    Args:
        seed: The run's seed.
        epoch: Epochs since the start of the run.
        ids: Sample ids, all different.
    """
    return sorted(range(len(ids)), key=lambda i: (seed_of(seed, "order", epoch, ids[i]), ids[i]))


class EndlessOrder:
    """Samples that may all go together: epochs follow each other without a gap.

    A micro-batch may hold the end of one and the start of the next, so every sample is used once per epoch and every
    micro-batch has the same size.
    """

    def __init__(self, ids: Sequence[str], seed: int, size: int) -> None:
        assert ids and size > 0
        self.mean_size = float(size)
        self._count, self._size = len(ids), size
        # A micro-batch may touch two epochs; the orders are kept from one call to the next.
        self._epoch = functools.lru_cache(maxsize=2)(lambda epoch: epoch_order(seed, epoch, ids))

    def places(self, index: int) -> Places:
        """The micro-batch of this index."""
        first = index * self._size
        return Places(first, [self.sample(place) for place in range(first, first + self._size)])

    def sample(self, place: int) -> int:
        """The sample at a place of the sequence."""
        epoch, place = divmod(place, self._count)
        return self._epoch(epoch)[place]


@dataclass(frozen=True)
class _Group:
    members: list[int]
    size: int


class GroupedOrder:
    """Samples of several groups, which no micro-batch mixes.

    In an epoch each group, in an order of its own, is cut into micro-batches, of which the last may be smaller, and these
    come in an order drawn over all groups: every sample once per epoch.
    """

    def __init__(self, ids: Sequence[str], seed: int, groups: Sequence[Hashable], sizes: Mapping[Any, int]) -> None:
        """Describe the order.

        Args:
            ids: Sample ids, all different.
            seed: The run's seed.
            groups: Of each sample, what it has to have in common with others.
            sizes: By group, samples in a micro-batch.
        """
        self._ids, self._seed = ids, seed
        self._groups = [
            _Group([i for i, its in enumerate(groups) if its == group], sizes[group]) for group in dict.fromkeys(groups)
        ]
        self._num_batches = sum(-(-len(group.members) // group.size) for group in self._groups)
        self.mean_size = len(ids) / self._num_batches
        self._epoch = functools.lru_cache(maxsize=2)(self._batches)

    def places(self, index: int) -> Places:
        """The micro-batch of this index."""
        epoch, number = divmod(index, self._num_batches)
        return self._epoch(epoch)[number]

    def _batches(self, epoch: int) -> list[Places]:
        cut = []
        for group in self._groups:
            order = epoch_order(self._seed, epoch, [self._ids[i] for i in group.members])
            members = [group.members[i] for i in order]
            cut += [members[first : first + group.size] for first in range(0, len(members), group.size)]
        cut.sort(key=lambda batch: seed_of(self._seed, "batch order", epoch, self._ids[batch[0]]))
        first, made = epoch * len(self._ids), []
        for batch in cut:
            made.append(Places(first, batch))
            first += len(batch)
        return made
