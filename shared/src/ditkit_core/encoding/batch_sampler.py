"""Batch samplers: the samples of each micro-batch, as indices into a list.

The result depends only on the seed and the index of the micro-batch, never on earlier
micro-batches. So a resumed run continues with the same samples, and nothing about the order has to
be saved.
"""

import bisect
import functools
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ditkit_core.io.rng import seed_of

_EPOCHS_FOR_MEAN = 64
"""Number of epochs that the mean size of a micro-batch is estimated from if epochs differ
(fractional repeats)."""


class BatchIndices(NamedTuple):
    """One micro-batch."""

    first: int
    """Number of samples in all earlier micro-batches of the run."""
    samples: list[int]


class Epochs:
    """The number of uses of each sample in each epoch, and their order.

    A sample with 1.5 repeats is used once in every epoch and a second time in every other epoch. A
    hash of its id decides in which, so that epochs have about the same size. In epochs 0 … e - 1 it
    is used floor(1.5 e + u) times, with u in [0, 1) from seed and id.
    """

    def __init__(self, ids: Sequence[str], seed: int, repeats: Sequence[float] = ()) -> None:
        """Prepare the epochs; `repeats` are average uses of each sample per epoch, above 0 (empty:
        1 each), and ids are all different."""
        assert ids and all(repeat > 0 for repeat in repeats) and len(repeats) in (0, len(ids))
        self._ids, self._seed = ids, seed
        self._repeats = np.array(repeats or [1.0] * len(ids))
        integral = self._repeats == np.floor(self._repeats)
        phases = [
            0 if is_whole else seed_of(seed, "repeat", id)
            for is_whole, id in zip(integral, ids, strict=True)
        ]
        # seeds are integers below 2**63, so phases are in [0, 1)
        self._phase = np.array(phases) / 2**63
        self.has_whole_repeats = bool(integral.all())
        """Whether all epochs have the same samples, because all repeats are integers."""
        self.mean_count = float(self._repeats.sum())
        """Average number of samples in an epoch."""

    def _used(self, epoch: int) -> NDArray[np.float64]:
        return np.floor(epoch * self._repeats + self._phase)

    def before(self, epoch: int) -> int:
        """Number of samples in all epochs before this one."""
        return int(self._used(epoch).sum())

    def counts(self, epoch: int) -> NDArray[np.int64]:
        """Number of uses of each sample in an epoch."""
        return (self._used(epoch + 1) - self._used(epoch)).astype(np.int64)

    def containing(self, position: int) -> int:
        """The epoch of a place in the sequence of all epochs."""
        if self.has_whole_repeats:
            return position // self.before(1)
        # An upper bound for the search: this many epochs certainly have more samples than
        # `position`.
        most = int((position + len(self._ids)) / self.mean_count) + 2
        return bisect.bisect_right(range(most), position, key=self.before) - 1

    def order(self, epoch: int, members: Sequence[int] | None = None) -> list[int]:
        """The samples of an epoch in order, as indices; if `members` are given, only those.

        They are sorted by a hash, not by a random permutation. So the order depends only on the ids
        and not on the order in which they are given, and adding a sample does not change the order
        of the others.
        """
        counts, ids = self.counts(epoch), self._ids
        uses = [
            (i, copy)
            for i in (range(len(ids)) if members is None else members)
            for copy in range(counts[i])
        ]
        # The first use has the seed of a sample that is used once, so that repeating one sample
        # does not move the others.
        seeds = [
            seed_of(self._seed, "order", epoch, ids[i], *([copy] if copy else []))
            for i, copy in uses
        ]
        return [
            i
            for *_, i in sorted(
                (seed, ids[i], copy, i) for seed, (i, copy) in zip(seeds, uses, strict=True)
            )
        ]


class BatchSampler:
    """Micro-batches of samples that all have the same shapes.

    A micro-batch may contain the end of one epoch and the start of the next. So every micro-batch
    has the same size, and no sample is dropped at the end of an epoch.
    """

    def __init__(
        self, ids: Sequence[str], seed: int, size: int, repeats: Sequence[float] = ()
    ) -> None:
        """Prepare the order; `size` is the number of samples per micro-batch, other arguments are
        as in `Epochs`."""
        assert size > 0
        self.mean_size = float(size)
        self._epochs, self._size = Epochs(ids, seed, repeats), size
        # Two orders, because a micro-batch may span two epochs.
        self._order = functools.lru_cache(maxsize=2)(self._epochs.order)

    def micro_batch(self, index: int) -> BatchIndices:
        """The micro-batch of this index."""
        first = index * self._size
        return BatchIndices(
            first, [self.sample(position) for position in range(first, first + self._size)]
        )

    def sample(self, position: int) -> int:
        """The sample at a place of the sequence."""
        epoch = self._epochs.containing(position)
        return self._order(epoch)[position - self._epochs.before(epoch)]


class BucketBatchSampler:
    """Micro-batches of samples in several groups (buckets), which are never mixed in one
    micro-batch.

    In each epoch every group is shuffled and split into micro-batches; the last one may be smaller.
    Then the micro-batches of all groups are shuffled.
    """

    def __init__(
        self,
        ids: Sequence[str],
        seed: int,
        groups: Sequence[Hashable],
        sizes: Mapping[Any, int],
        repeats: Sequence[float] = (),
    ) -> None:
        """Prepare the order; `sizes` are samples per micro-batch, by group."""
        self._ids, self._seed, self._epochs = ids, seed, Epochs(ids, seed, repeats)
        members: dict[Hashable, list[int]] = defaultdict(list)
        for i, group in enumerate(groups):
            members[group].append(i)
        self._groups = [(indices, sizes[group]) for group, indices in members.items()]
        self._starts = [0]  # first micro-batch of each epoch, extended as far as needed
        num_epochs = 1 if self._epochs.has_whole_repeats else _EPOCHS_FOR_MEAN
        num_batches = sum(map(self._num_batches, range(num_epochs))) / num_epochs
        self.mean_size = self._epochs.mean_count / num_batches
        self._epoch = functools.lru_cache(maxsize=2)(self._batches)

    def micro_batch(self, index: int) -> BatchIndices:
        """The micro-batch of this index."""
        if self._epochs.has_whole_repeats:
            epoch, number = divmod(index, self._num_batches(0))
            return self._epoch(epoch)[number]
        while self._starts[-1] <= index:
            self._starts.append(self._starts[-1] + self._num_batches(len(self._starts) - 1))
        epoch = bisect.bisect_right(self._starts, index) - 1
        return self._epoch(epoch)[index - self._starts[epoch]]

    def _num_batches(self, epoch: int) -> int:
        counts = self._epochs.counts(epoch)
        return sum(math.ceil(counts[members].sum() / size) for members, size in self._groups)

    def _batches(self, epoch: int) -> list[BatchIndices]:
        pieces = []
        for members, size in self._groups:
            order = self._epochs.order(epoch, members)
            pieces += [order[first : first + size] for first in range(0, len(order), size)]
        seeds = [seed_of(self._seed, "batch order", epoch, self._ids[piece[0]]) for piece in pieces]
        first, batches = self._epochs.before(epoch), []
        # The number breaks ties: two pieces that begin with the same (repeated) sample have the
        # same seed.
        for _, _, batch in sorted(zip(seeds, range(len(pieces)), pieces, strict=True)):
            batches.append(BatchIndices(first, batch))
            first += len(batch)
        return batches
