"""The micro-batches of a run. Samples and captions depend only on the seed and the index of the
micro-batch, never on history.

So a resumed run continues with exactly the samples and captions that the uninterrupted run would
have had.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ditkit_core.data.dataset import Sample
from ditkit_core.data.masks import MASK
from ditkit_core.encoding.batch_sampler import BatchSampler, BucketBatchSampler
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.errors import UserError, argument
from ditkit_core.io.rng import generator, seed_of

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of each tensor except the text's."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch."""

    ids: list[str]
    items: Sequence[dict[str, Tensor]]
    """For each sample, `latents` and the model's own tensors, on the CPU."""
    weights: Sequence[float] = ()
    """Factor of each sample's loss; empty means 1 each."""
    counted: float | None = None
    """Number of samples that it counts as in the step's mean; None means its own number of
    samples."""
    matches_base: bool = False
    """Whether the target is the base's own prediction."""


class LazyItems(Sequence[dict[str, Tensor]]):
    """Items that are read when the first of them is used: a rank knows every micro-batch of a step,
    and reads only its own."""

    def __init__(self, read: Callable[[], list[dict[str, Tensor]]], count: int):
        """Read nothing yet; `read` returns `count` items."""
        self._read, self._count = read, count

    @cached_property
    def _items(self) -> list[dict[str, Tensor]]:
        return self._read()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]


def files_of(samples: Iterable[Sample]) -> dict[str, str]:
    """For samples that are windows of one file: the common name of the file's windows, by sample
    id."""
    samples = list(samples)
    count = Counter(sample.media for sample in samples)
    windows = [sample for sample in samples if count[sample.media] > 1 and "#" in sample.id]
    return {sample.id: sample.id.rpartition("#")[0] for sample in windows}


def split_held_out(
    ids: Sequence[str], count: int, files: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[str], list[str]]:
    """Split off at least `count` validation samples, which are never trained on: ids to train on
    and held-out ids, in order.

    A hash of the files' names chooses them, so that adding n clips changes at most n of them. All
    windows of a file (`files_of`) stay together, because windows of one file look alike; so there
    may be more held-out samples than requested.
    """
    held_out: set[str] = set()
    windows: dict[str, list[str]] = defaultdict(list)
    for id in ids:
        windows[files.get(id, id)].append(id)
    for file in sorted(windows, key=lambda file: seed_of("held out", file)):
        if len(held_out) < count:
            held_out.update(windows[file])
    if len(held_out) >= len(ids):
        together = (
            f" of {len(windows)} files, whose windows stay together,"
            if len(windows) < len(ids)
            else ""
        )
        raise UserError(
            f"holding out {count} of {len(ids)} clips{together} leaves none to train on; lower "
            f"{argument('held_out.clips')} or add clips"
        )
    return [id for id in ids if id not in held_out], [id for id in ids if id in held_out]


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """Number of samples in a micro-batch."""

    samples: int = 1
    """Samples per micro-batch, if there is no token budget."""
    tokens: int = 0
    """Token budget: a micro-batch has as many samples as fit, at least one. 0 means no budget."""
    num_tokens: Callable[[Mapping[str, Tensor]], int] = lambda item: 1
    """`TrainingSpec.num_tokens`."""

    def of(self, sample: EncodedSample) -> int:
        """Number of samples in a micro-batch of samples with the shapes of this one."""
        return (
            max(1, self.tokens // self.num_tokens(sample.outline()))
            if self.tokens
            else self.samples
        )


@dataclass(frozen=True, kw_only=True)
class BaseSteps:
    """The steps whose target is the base's own prediction (`prior.match_base`)."""

    share: float
    """Share of the steps, at least 0 and below 1."""
    accumulation: int
    """Micro-batches in a step."""
    weight: float = 1.0
    text_key: str = ""
    """Key of the caption of all their samples; none means the empty caption."""

    def has(self, seed: int, index: int) -> bool:
        """Whether the micro-batch of this index is in one: a function of the seed and the step."""
        random = generator(seed, "match base", index // self.accumulation)
        return bool(torch.rand((), generator=random) < self.share)


class CaptionSampler:
    """Samples the caption for each use of a sample, whether its conditions are dropped, and whether
    it is mirrored."""

    def __init__(self, seed: int, dropout: float, control_dropout: float = 0.0) -> None:
        """Set the probabilities, in [0, 1], of the empty caption and that optional conditions are
        dropped."""
        assert 0 <= dropout <= 1 and 0 <= control_dropout <= 1
        self._seed, self._dropout, self._control_dropout = seed, dropout, control_dropout

    def item(self, sample: EncodedSample, index: int, copy: int = 0) -> dict[str, Tensor]:
        """Read a sample for the micro-batch of this index, which may contain it several times:
        `copy` counts its earlier uses there."""
        # The first copy has the seed of a sample that occurs once, so that repeats do not change
        # its caption.
        names = (sample.id, copy) if copy else (sample.id,)
        uniform = torch.rand((), generator=generator(self._seed, "caption", index, *names))
        chosen = seed_of(self._seed, "which caption", index, *names) % len(sample.text_keys)
        without = (
            torch.rand((), generator=generator(self._seed, "control", index, *names))
            < self._control_dropout
        )
        if sample.mirrored is not None and seed_of(self._seed, "mirrored", index, *names) % 2:
            sample = sample.mirrored
        return sample.load(
            caption=chosen, drop_caption=bool(uniform < self._dropout), drop_controls=bool(without)
        )


class TrainDataLoader:
    """The endless sequence of micro-batches of a run.

    Samples of one micro-batch have the same shapes, except for texts. If the whole dataset has one
    shape, all micro-batches have the same size and may span two epochs. Otherwise the samples of
    each shape are split into micro-batches in every epoch, and some are smaller. Each then counts
    as the mean size, so that every sample has the same weight in training.
    """

    def __init__(
        self,
        samples: Sequence[EncodedSample],
        *,
        seed: int,
        batch_size: BatchSize,
        caption_dropout: float = 0.0,
        control_dropout: float = 0.0,
        base_steps: BaseSteps | None = None,
    ) -> None:
        """Prepare the order of the samples; this reads only headers from the cache.

        Args:
            caption_dropout: Probability in [0, 1] that a sample gets the empty caption.
            control_dropout: Probability in [0, 1] that a sample is used without its optional
                conditions.
            base_steps: The steps whose target is the base's own prediction; None for none.
        """
        assert samples
        self._seed, self._base_steps = seed, base_steps
        self._samples = samples
        self._captions = CaptionSampler(seed, caption_dropout, control_dropout)
        ids = [sample.id for sample in samples]
        groups, sizes = grouped_by_shape(samples, batch_size)
        self.num_shapes = len(sizes)
        """Number of different shapes among the samples."""
        self._grouped = self.num_shapes > 1
        repeats = [sample.repeats for sample in samples]
        self._order: BatchSampler | BucketBatchSampler = (
            BucketBatchSampler(ids, seed, groups, sizes, repeats)
            if self._grouped
            else BatchSampler(ids, seed, sizes[groups[0]], repeats)
        )

    @property
    def mean_size(self) -> float:
        """Average number of samples in a micro-batch over an epoch."""
        return self._order.mean_size

    def micro_batch(self, index: int) -> Batch:
        """Read the micro-batch of this index, counted since the start of the run."""
        samples = [
            self._samples[sample_index] for sample_index in self._order.micro_batch(index).samples
        ]
        base = (
            self._base_steps
            if self._base_steps and self._base_steps.has(self._seed, index)
            else None
        )

        def read() -> list[dict[str, Tensor]]:
            if base is not None:
                uncaptioned = [
                    replace(sample, empty_text_key=base.text_key or sample.empty_text_key)
                    for sample in samples
                ]
                return [sample.load(drop_caption=True) for sample in uncaptioned]
            # A micro-batch of a small dataset can contain a sample several times: each use gets its
            # own caption.
            copies = [
                sum(other is sample for other in samples[:position])
                for position, sample in enumerate(samples)
            ]
            return [
                self._captions.item(sample, index, copy)
                for sample, copy in zip(samples, copies, strict=True)
            ]

        return Batch(
            ids=[sample.id for sample in samples],
            items=LazyItems(read, len(samples)),
            weights=() if base is None else [base.weight] * len(samples),
            counted=self.mean_size if self._grouped else None,
            matches_base=base is not None,
        )

    def micro_batches(self, index: int) -> list[Batch]:
        """The micro-batch of this index as a list of one; `PriorDataLoader` adds class images
        here."""
        return [self.micro_batch(index)]

    def positions(self, index: int) -> range:
        """The positions of a micro-batch's samples among all samples used since the start of the
        run."""
        first, samples = self._order.micro_batch(index)
        return range(first, first + len(samples))


def shapes_of(sample: EncodedSample) -> Shapes:
    """The shapes that samples of one micro-batch share; texts may have different lengths, because
    models pad them."""
    shapes = sample.media_shapes()
    # Masks weigh the loss of each sample alone, so that those with and without one may share a
    # micro-batch.
    shapes.pop(MASK.name, None)
    return tuple(sorted(shapes.items()))


def grouped_by_shape(
    samples: Sequence[EncodedSample], size: BatchSize
) -> tuple[list[Shapes], dict[Shapes, int]]:
    """The shapes of each sample, and the number of samples per micro-batch for each of these
    shapes."""
    groups = [shapes_of(sample) for sample in samples]
    return groups, {group: size.of(samples[groups.index(group)]) for group in dict.fromkeys(groups)}
