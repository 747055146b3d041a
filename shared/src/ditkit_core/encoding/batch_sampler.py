"""Which samples make up which micro-batch, as places in a list: a function of the seed and the micro-batch's index alone."""

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
"""By how many epochs the mean size of a micro-batch is known, where epochs differ."""


class BatchIndices(NamedTuple):
    """One micro-batch."""

    first: int
    """Samples in all micro-batches before it, since the start of the run."""
    samples: list[int]
    """Which, as indices."""


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


class Epochs:
    """How often each sample is in each epoch, and in which order.

    A sample of 1.5 repeats is in every epoch once and in every second one again; in which of two is drawn by its id, so that epochs are
    of about one size. Over epochs 0 … e - 1 it is used floor(1.5 e + u) times, u in [0, 1): a function of seed, epoch and sample.
    """

    def __init__(self, ids: Sequence[str], seed: int, repeats: Sequence[float] = ()) -> None:
        """Describe them.

        Args:
            ids: Sample ids, all different.
            seed: The run's seed.
            repeats: Of each sample, above 0; empty: 1 each.
        """
        assert ids and all(each > 0 for each in repeats) and len(repeats) in (0, len(ids))
        self._ids, self._seed = ids, seed
        self._repeats = np.array(repeats or [1.0] * len(ids))
        whole = self._repeats == np.floor(self._repeats)
        phases = [0 if alike else seed_of(seed, "repeat", id) for alike, id in zip(whole, ids, strict=True)]
        self._phase = np.array(phases) / 2**63
        self.whole = bool(whole.all())
        """Whether all epochs are alike."""
        self.mean_count = float(self._repeats.sum())
        """Samples in an epoch, on average."""

    def _used(self, epoch: int) -> NDArray[np.float64]:
        return np.floor(epoch * self._repeats + self._phase)

    def before(self, epoch: int) -> int:
        """Samples in all epochs before one."""
        return int(self._used(epoch).sum())

    def counts(self, epoch: int) -> NDArray[np.int64]:
        """How often an epoch has each sample."""
        return (self._used(epoch + 1) - self._used(epoch)).astype(np.int64)

    def containing(self, place: int) -> int:
        """The epoch of a place in the sequence of all epochs."""
        if self.whole:
            return place // self.before(1)
        # In that many epochs more samples are used for certain.
        most = int((place + len(self._ids)) / self.mean_count) + 2
        return bisect.bisect_right(range(most), place, key=self.before) - 1

    def order(self, epoch: int, members: Sequence[int] | None = None) -> list[int]:
        """The samples of an epoch, or those of some, in its order."""
        counts, ids = self.counts(epoch), self._ids
        members = range(len(ids)) if members is None else members
        if (counts == 1).all():
            return [members[i] for i in epoch_order(self._seed, epoch, [ids[i] for i in members])]
        uses = [(i, copy) for i in members for copy in range(counts[i])]
        # the first use has the seed that it has where a sample is used once
        seeds = [seed_of(self._seed, "order", epoch, ids[i], *([copy] if copy else [])) for i, copy in uses]
        return [i for *_, i in sorted((seed, ids[i], copy, i) for seed, (i, copy) in zip(seeds, uses, strict=True))]


class BatchSampler:
    """Samples that may all go together: epochs follow each other without a gap.

    A micro-batch may hold the end of one and the start of the next, so every sample is used as often as it should be and every
    micro-batch has the same size.
    """

    def __init__(self, ids: Sequence[str], seed: int, size: int, repeats: Sequence[float] = ()) -> None:
        """Describe the order; arguments as of `Epochs`, and the samples of a micro-batch."""
        assert size > 0
        self.mean_size = float(size)
        self._epochs, self._size = Epochs(ids, seed, repeats), size
        # A micro-batch may touch two epochs; the orders are kept from one call to the next.
        self._order = functools.lru_cache(maxsize=2)(self._epochs.order)

    def places(self, index: int) -> BatchIndices:
        """The micro-batch of this index."""
        first = index * self._size
        return BatchIndices(first, [self.sample(place) for place in range(first, first + self._size)])

    def sample(self, place: int) -> int:
        """The sample at a place of the sequence."""
        epoch = self._epochs.containing(place)
        return self._order(epoch)[place - self._epochs.before(epoch)]


class BucketBatchSampler:
    """Samples of several groups, which no micro-batch mixes.

    In an epoch each group, in an order of its own, is cut into micro-batches, of which the last may be smaller, and these
    come in an order drawn over all groups: every sample as often per epoch as it should be.
    """

    def __init__(
        self,
        ids: Sequence[str],
        seed: int,
        groups: Sequence[Hashable],
        sizes: Mapping[Any, int],
        repeats: Sequence[float] = (),
    ) -> None:
        """Describe the order.

        Args:
            ids: Sample ids, all different.
            seed: The run's seed.
            groups: Of each sample, what it has to have in common with others.
            sizes: By group, samples in a micro-batch.
            repeats: As of `Epochs`.
        """
        self._ids, self._seed, self._epochs = ids, seed, Epochs(ids, seed, repeats)
        members: dict[Hashable, list[int]] = defaultdict(list)
        for i, group in enumerate(groups):
            members[group].append(i)
        self._groups = [(of_group, sizes[group]) for group, of_group in members.items()]
        self._starts = [0]
        looked_at = 1 if self._epochs.whole else _EPOCHS_FOR_MEAN
        num_batches = sum(map(self._num_batches, range(looked_at))) / looked_at
        self.mean_size = self._epochs.mean_count / num_batches
        self._epoch = functools.lru_cache(maxsize=2)(self._batches)

    def places(self, index: int) -> BatchIndices:
        """The micro-batch of this index."""
        if self._epochs.whole:
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
        first, made = self._epochs.before(epoch), []
        # pieces that begin with the same sample, used twice, keep their order
        for _, _, batch in sorted(zip(seeds, range(len(pieces)), pieces, strict=True)):
            made.append(BatchIndices(first, batch))
            first += len(batch)
        return made
