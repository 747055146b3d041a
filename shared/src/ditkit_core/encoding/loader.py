"""The micro-batches of a run: which samples and captions, a function of the seed and the micro-batch's index, never of history."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ditkit_core.data.dataset import Sample
from ditkit_core.encoding.batch_sampler import BatchSampler, BucketBatchSampler
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.errors import UserError
from ditkit_core.io.rng import generator, seed_of

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of each tensor that is no text."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch."""

    ids: list[str]
    items: list[dict[str, Tensor]]
    """Per sample `latents` and the model's own tensors, on the CPU."""
    weights: Sequence[float] = ()
    """Factor of each sample's loss; empty: 1 each."""
    counted: float | None = None
    """How many samples it counts for in the step's mean; None: as many as it has."""


def files_of(samples: Iterable[Sample]) -> dict[str, str]:
    """By id the name that the windows of one file have in common, of samples that are such windows."""
    samples = list(samples)
    count = Counter(sample.media for sample in samples)
    windows = [sample for sample in samples if count[sample.media] > 1 and "#" in sample.id]
    return {sample.id: sample.id.rpartition("#")[0] for sample in windows}


def split_held_out(
    ids: Sequence[str], count: int, files: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[str], list[str]]:
    """Set samples aside that are never trained on, chosen by a hash of their files' names: adding clips moves at most as many.

    All windows of a file go together, because one that was trained on says much about the next; so there may be more than were asked for.

    Args:
        ids: Sample ids.
        count: How many to set aside at least.
        files: As `files_of`; a sample that is not there is a file of its own.

    Returns:
        Ids to train on and ids held out, each in the order given.

    Raises:
        UserError: If nothing would be left to train on.
    """
    held_out: set[str] = set()
    windows: dict[str, list[str]] = defaultdict(list)
    for id in ids:
        windows[files.get(id, id)].append(id)
    for file in sorted(windows, key=lambda file: seed_of("held out", file)):
        if len(held_out) < count:
            held_out.update(windows[file])
    if len(held_out) >= len(ids):
        together = f" of {len(windows)} files, whose windows go together," if len(windows) < len(ids) else ""
        raise UserError(
            f"holding out {count} of {len(ids)} clips{together} leaves none to train on; lower held_out.clips or add clips"
        )
    return [id for id in ids if id not in held_out], [id for id in ids if id in held_out]


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """How many samples of one shape go through the model together."""

    samples: int = 1
    """Where there is no budget of tokens."""
    tokens: int = 0
    """A budget: as many samples as fit, one at least; 0: none."""
    num_tokens: Callable[[Mapping[str, Tensor]], int] = lambda item: 1
    """As `ModelSpec.num_tokens`."""

    def of(self, sample: EncodedSample) -> int:
        """Samples like this one in a micro-batch."""
        return max(1, self.tokens // self.num_tokens(sample.outline())) if self.tokens else self.samples


class CaptionSampler:
    """Which caption a sample is given at each of its uses, and whether with its conditions."""

    def __init__(self, seed: int, dropout: float, control_dropout: float = 0.0) -> None:
        """Describe the choice.

        Args:
            seed: The run's seed.
            dropout: Probability in [0, 1] of the empty caption.
            control_dropout: Probability in [0, 1] that conditions which are optional are left out.
        """
        assert 0 <= dropout <= 1 and 0 <= control_dropout <= 1
        self._seed, self._dropout, self._control_dropout = seed, dropout, control_dropout

    def item(self, sample: EncodedSample, index: int, copy: int = 0) -> dict[str, Tensor]:
        """Read a sample for the micro-batch of this index, which may have it several times.

        Args:
            sample: The sample.
            index: The micro-batch's.
            copy: How many of it go before in the micro-batch.
        """
        # The first copy has the seed of a sample that is there once, so that repeats of others change nothing for it.
        names = (sample.id, copy) if copy else (sample.id,)
        drawn = torch.rand((), generator=generator(self._seed, "caption", index, *names))
        chosen = seed_of(self._seed, "which caption", index, *names) % len(sample.text_keys)
        without = torch.rand((), generator=generator(self._seed, "control", index, *names)) < self._control_dropout
        return sample.load(caption=chosen, drop_caption=bool(drawn < self._dropout), drop_controls=bool(without))


class TrainDataLoader:
    """The endless sequence of micro-batches of a run.

    Samples of one micro-batch have the same shapes, texts aside. Where all of a dataset have, epochs follow each other
    without a gap and micro-batches are of one size. Otherwise each shape is cut into micro-batches in every epoch, of which
    some are smaller; each then counts for the mean size, so that every sample has the same weight in what is learned.
    """

    def __init__(
        self,
        samples: Sequence[EncodedSample],
        *,
        seed: int,
        batch_size: BatchSize,
        caption_dropout: float = 0.0,
        control_dropout: float = 0.0,
    ) -> None:
        """Describe the data; of the cache only headers are read yet.

        Args:
            samples: What to train on, at least one.
            seed: The run's seed.
            batch_size: Samples per micro-batch.
            caption_dropout: Probability in [0, 1] that a sample is given with the empty caption.
            control_dropout: Probability in [0, 1] that it is given without the conditions that are optional.
        """
        assert samples
        self._samples = samples
        self._captions = CaptionSampler(seed, caption_dropout, control_dropout)
        ids = [sample.id for sample in samples]
        groups, sizes = grouped_by_shape(samples, batch_size)
        self.num_shapes = len(sizes)
        """How many shapes the samples have."""
        self._grouped = self.num_shapes > 1
        repeats = [sample.repeats for sample in samples]
        self._order: BatchSampler | BucketBatchSampler = (
            BucketBatchSampler(ids, seed, groups, sizes, repeats)
            if self._grouped
            else BatchSampler(ids, seed, sizes[groups[0]], repeats)
        )

    @property
    def mean_size(self) -> float:
        """Samples in a micro-batch, on average over an epoch."""
        return self._order.mean_size

    def micro_batch(self, index: int) -> Batch:
        """Read the micro-batch of this index, counted since the start of the run."""
        samples = [self._samples[place] for place in self._order.places(index).samples]
        return Batch(
            ids=[sample.id for sample in samples],
            items=[
                # A micro-batch of a small dataset can have a sample several times: each gets a caption of its own.
                self._captions.item(sample, index, sum(other is sample for other in samples[:place]))
                for place, sample in enumerate(samples)
            ],
            counted=self.mean_size if self._grouped else None,
        )

    def micro_batches(self, index: int) -> list[Batch]:
        """The same, alone."""
        return [self.micro_batch(index)]

    def places(self, index: int) -> range:
        """The places of a micro-batch's samples among all that are used, counted since the start of the run."""
        first, samples = self._order.places(index)
        return range(first, first + len(samples))


def shapes_of(sample: EncodedSample) -> Shapes:
    """What samples of one micro-batch have in common; texts may differ, which models pad."""
    return tuple(sorted(sample.media_shapes().items()))


def grouped_by_shape(samples: Sequence[EncodedSample], size: BatchSize) -> tuple[list[Shapes], dict[Shapes, int]]:
    """The shapes of each sample, and by shapes how many samples of them make a micro-batch."""
    groups = [shapes_of(sample) for sample in samples]
    return groups, {group: size.of(samples[groups.index(group)]) for group in dict.fromkeys(groups)}
