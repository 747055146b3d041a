"""Prior preservation: pictures of the class beside those of the instance, so that training leaves the class as it was.

Source: DreamBooth (https://arxiv.org/abs/2208.12242), section 4.2; as diffusers' training scripts have it, the loss is the
mean over the instance's samples plus a weight times the mean over as many samples of the class.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ditkit_core.config.field import setting
from ditkit_core.data.config import DataConfig
from ditkit_core.data.discovery import media_files
from ditkit_core.encoding.batch_sampler import BatchSampler
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import Batch, BatchSize, CaptionSampler, Shapes, TrainDataLoader, grouped_by_shape
from ditkit_core.errors import UserError
from ditkit_core.io.rng import seed_of

PRIOR_MARK = "prior: "
"""Before the id of a class picture, which the data may have too."""


@dataclass(frozen=True, kw_only=True)
class PriorConfig:
    """The `[prior]` section: pictures of the class that the trained subject belongs to. Without folder and prompt there is none."""

    folder: str = setting("", resume="refused", holds="path")
    """Folder of class pictures (or clips) and captions, in the format of data.folder. Empty: `prior` in the run folder, if there
    is a prompt."""
    prompt: str = setting("", resume="refused")
    """What the class is called (`a photo of a dog`): pictures that the folder lacks are drawn with the untrained model."""
    images: int = setting(100, resume="refused")
    """How many class pictures there are to be; with a prompt alone."""
    weight: float = setting(1.0, resume="stated")
    """Weight of the class in the loss, above 0."""

    def __post_init__(self) -> None:
        if self.prompt and not self.prompt.strip():
            raise UserError("prior.prompt is blank; say what the class is called, such as 'a photo of a dog'")
        if "\0" in self.prompt:  # it becomes the caption of each picture, and no caption has one
            raise UserError("prior.prompt has a null byte; correct it")
        if not 1 <= self.images <= 100_000:
            raise UserError(f"prior.images = {self.images} is not between 1 and 100000; set 100")
        if not 0 < self.weight <= 1000:
            raise UserError(f"prior.weight = {self.weight} is not above 0 and up to 1000; set 1, or leave [prior] out")
        if self.weight != 1 and not self.wanted:
            raise UserError(
                f"prior.weight = {self.weight} weighs nothing without prior.folder or prior.prompt; set one"
            )
        if self.images != 100 and not self.prompt:
            raise UserError(f"prior.images = {self.images} needs prior.prompt, from which they are drawn; leave it out")

    @property
    def wanted(self) -> bool:
        """Whether there is a prior."""
        return bool(self.folder or self.prompt)


def prior_data_config(data: DataConfig, folder: str) -> DataConfig:
    """The `[data]` section of the class pictures: read like the instance's, from another folder and without its trigger word."""
    return replace(data, folder=folder, folders=(), repeats=(), metadata="", references="", controls=(), trigger="")


def count_media(folder: Path) -> int:
    """How many pictures and clips lie in a folder, which need not exist."""
    return sum(1 for _ in media_files(folder)) if folder.is_dir() else 0


class PriorDataLoader:
    """Training data in which each micro-batch of n samples is followed by n samples of the prior."""

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
        """Describe the data.

        Args:
            data: The instance's.
            samples: The prior's, at least one.
            seed: The run's seed; the prior's order and captions are drawn apart from the instance's.
            batch_size: A limit on the prior's samples of one shape that go through the model together.
            weight: Of the prior in the loss.
            caption_dropout: Probability in [0, 1] that a sample is given with the empty caption.
            control_dropout: Probability in [0, 1] that it is given without the conditions that are optional.
        """
        own_seed = seed_of(seed, "prior")
        self._data, self._samples, self._weight = data, samples, weight
        self._order = BatchSampler([sample.id for sample in samples], own_seed, 1)
        self._captions = CaptionSampler(own_seed, caption_dropout, control_dropout)
        self._groups, self._sizes = grouped_by_shape(samples, batch_size)

    def micro_batches(self, index: int) -> list[Batch]:
        """The instance's micro-batch of this index, then the prior's samples, by shape."""
        chosen: dict[Shapes, list[int]] = defaultdict(list)
        for place in self._data.places(index):
            sample = self._order.sample(place)
            chosen[self._groups[sample]].append(sample)
        made = [self._data.micro_batch(index)]
        for group, samples in chosen.items():
            size = self._sizes[group]
            made += [self._batch(index, samples[first : first + size]) for first in range(0, len(samples), size)]
        return made

    def _batch(self, index: int, places: Sequence[int]) -> Batch:
        samples = [self._samples[place] for place in places]
        return Batch(
            ids=[sample.id for sample in samples],
            items=[self._captions.item(sample, index) for sample in samples],
            weights=[self._weight] * len(samples),
            counted=0.0,
        )
