"""Prior preservation: training on class images alongside the instance's, so that the model does not
forget the class.

Source: DreamBooth (https://arxiv.org/abs/2208.12242), section 4.2. As in diffusers' training
scripts, the loss is the mean over the instance's samples plus a weight times the mean over the same
number of class images.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ditkit_core.data.config import DataConfig
from ditkit_core.data.discovery import media_files
from ditkit_core.data.masks import clip_of_mask
from ditkit_core.data.side_names import Names
from ditkit_core.encoding.batch_sampler import BatchSampler
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import (
    Batch,
    BatchSize,
    CaptionSampler,
    LazyItems,
    Shapes,
    TrainDataLoader,
    grouped_by_shape,
)
from ditkit_core.io.rng import seed_of

PRIOR_MARK = "prior: "
"""Prefix of a class image's id, because a sample of the dataset may have the same id."""


def prior_data_config(data: DataConfig, folder: str) -> DataConfig:
    """The `[data]` section for the class images: like the instance's, but with another folder and
    without the trigger word."""
    # The trigger word names the instance. In captions of the class it would teach the model that
    # they are the same. `exclude` and `crops` name files of the instance's folder, and a class
    # image may have such a name.
    return replace(
        data,
        folder=folder,
        folders=(),
        repeats=(),
        metadata="",
        exclude=(),
        crops=(),
        references="",
        controls=(),
        masks="",
        trigger="",
    )


def count_media(folder: Path) -> int:
    """Number of images and clips in a folder, without the masks next to them; 0 if it does not
    exist."""
    names = [name.rpartition(".")[0] for name in media_files(folder)] if folder.is_dir() else []
    clips = Names(names)
    return sum(
        clip_of_mask(name, clips) is None or (folder / f"{name}.txt").exists() for name in names
    )


class PriorDataLoader:
    """Training data in which each micro-batch of n samples is followed by n class images."""

    def __init__(
        self,
        data: TrainDataLoader,
        samples: Sequence[EncodedSample],
        *,
        seed: int,
        batch_size: BatchSize,
        weight: float,
        caption_dropout: float = 0.0,
        control_dropout: float = 0.0,
    ) -> None:
        """Combine the instance's data with class images, at least one.

        Args:
            batch_size: Limit on the class images of one shape in a micro-batch.
            caption_dropout: Probability in [0, 1] that a class image gets the empty caption.
            control_dropout: Probability in [0, 1] that a class image is used without its optional
                conditions.
        """
        # A separate seed: the instance's order stays the same with and without class images.
        own_seed = seed_of(seed, "prior")
        self._data, self._samples, self._weight = data, samples, weight
        self._order = BatchSampler([sample.id for sample in samples], own_seed, 1)
        self._captions = CaptionSampler(own_seed, caption_dropout, control_dropout)
        self._groups, self._sizes = grouped_by_shape(samples, batch_size)

    def micro_batches(self, index: int) -> list[Batch]:
        """The instance's micro-batch of this index, then the class images, by shape."""
        chosen: dict[Shapes, list[int]] = defaultdict(list)
        for position in self._data.positions(index):
            sample = self._order.sample(position)
            chosen[self._groups[sample]].append(sample)
        batches = [self._data.micro_batch(index)]
        for group, samples in chosen.items():
            size = self._sizes[group]
            batches += [
                self._batch(index, samples[first : first + size])
                for first in range(0, len(samples), size)
            ]
        return batches

    def _batch(self, index: int, sample_indices: Sequence[int]) -> Batch:
        samples = [self._samples[sample_index] for sample_index in sample_indices]
        return Batch(
            ids=[sample.id for sample in samples],
            items=LazyItems(
                lambda: [self._captions.item(sample, index) for sample in samples], len(samples)
            ),
            weights=[self._weight] * len(samples),
            # the step's mean divides by the instance's samples only, as in DreamBooth's sum of two
            # means
            counted=0.0,
        )
