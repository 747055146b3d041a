"""The dataset of a run, its cache and its encoders."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ditkit_core.api.auxiliary import Auxiliary
from ditkit_core.api.dataset import read_dataset
from ditkit_core.data.buckets import describe_lengths, describe_sizes
from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset, Sample, shortened_clips
from ditkit_core.encoding.cache import Cache
from ditkit_core.encoding.prior_preservation import PRIOR_MARK, count_media, prior_data_config
from ditkit_core.io.console import say, warn
from ditkit_core.io.files import local_path
from ditkit_core.models.conditions import ClipInputs
from ditkit_core.models.spec import ModelSpec
from ditkit_core.run.config import RunConfig


def _say_repeats_in_names(folders: Collection[Path]) -> None:
    """Say that numbers in names such as 10_cat, which kohya's programs read as repeats, are not
    read, and what to set."""
    repeats = {
        folder: match[1]
        for folder in sorted(folders)
        if (match := re.match(r"(\d{1,4})_.", folder.name))
    }
    if not repeats:
        return
    numbers = ", ".join(repeats.values())
    keys = f"data.folders = {json.dumps(list(map(str, repeats)))} and data.repeats = [{numbers}]"
    remedy = (
        f"if they are meant so, set {keys}"
        if len(folders) > 1
        else "with one folder they change nothing, train.steps does"
    )
    say(
        f"data.folder: {' '.join(folder.name for folder in repeats)}: numbers in names of folders "
        f"are not read as repeats; {remedy}"
    )


@dataclass(frozen=True)
class RunData:
    """The dataset that a run reads, the cache, and what encodes one into the other. The dataset is
    scanned once, on first use."""

    config: RunConfig
    auxiliary: Auxiliary
    """The encoders, and the columns that the model is conditioned on."""
    datasets: dict[DataConfig, Dataset] = field(default_factory=dict, repr=False, compare=False)
    """Those that were read already: a search tries many configurations over thousands of files."""

    @property
    def spec(self) -> ModelSpec:
        """The model's family."""
        return self.auxiliary.spec

    @cached_property
    def cache(self) -> Cache:
        """The cache of encoded clips and captions."""
        path = self.config.encode.cache
        # Next to the run folder, so that runs side by side share what they encode.
        return Cache(local_path(path) if path else self.config.run_folder.path.parent / "cache")

    @property
    def dataset(self) -> Dataset:
        """The samples, checked."""
        config = self.config.data
        if config not in self.datasets:
            self.datasets[config] = self._scan(config, "data.folder")
        return self.datasets[config]

    @property
    def prior_folder(self) -> Path:
        """The folder of the class images of prior preservation."""
        path = self.config.prior.folder
        return local_path(path) if path else self.config.run_folder.prior

    def scanned(self, config: DataConfig, key: str = "data.folder") -> Dataset:
        """A dataset as this model reads it; prints nothing."""
        return read_dataset(config, self.spec.data, self.auxiliary.columns, key=key)

    def _scan(self, config: DataConfig, key: str) -> Dataset:
        dataset = self.scanned(config, key)
        for name, reason in dataset.excluded:
            warn(f"left out: {name}: {reason}")
        if key == "data.folder" and not config.repeats:
            _say_repeats_in_names({sample.media.parent for sample in dataset.samples})
        edits = sum(bool(sample.references) for sample in dataset.samples)
        if edits:
            say(f"{key}: {edits} of {len(dataset.samples)} samples have references")
        if masked := sum(sample.mask is not None for sample in dataset.samples):
            outside = self.config.train.mask_weight
            say(
                f"{key}: {masked} of {len(dataset.samples)} samples have loss masks; "
                f"train.mask_weight = {outside:g} outside"
            )
        sizes = [(sample.height, sample.width) for sample in dataset.samples]
        if config.buckets is True or config.resolutions:
            say(f"{key}: buckets {describe_sizes(sizes)} samples")
        elif {*sizes} != {(config.height, config.width)}:
            one = f"data.buckets = false crops all to {config.height} x {config.width}"
            say(f"{key}: shapes {describe_sizes(sizes)} samples; {one}")
        if shortened := shortened_clips(dataset.samples, config):
            seconds = f"{min(config.lengths) / dataset.fps:.2g} s at {dataset.fps:g} fps"
            lengths = describe_lengths(sample.frames for sample in shortened)
            say(
                f"{key}: {len(shortened)} of {len(dataset.samples)} samples are shorter than "
                f"{min(config.lengths)} frames ({seconds}) and are trained "
                f'with the frames that they have ({lengths}); data.short_clips = "skip" leaves them out'
            )
        if config.frame_buckets or config.windows != "first":
            files = len({sample.media for sample in dataset.samples})
            lengths = describe_lengths(sample.frames for sample in dataset.samples)
            say(f"{key}: {len(dataset.samples)} windows of {files} files; frames {lengths}")
        return dataset

    @property
    def prior_data(self) -> DataConfig | None:
        """How the class images are read; None if the run uses none, or all are still to be
        generated."""
        prior = self.config.prior
        if not prior.wanted or (prior.class_prompt and not count_media(self.prior_folder)):
            return None
        return prior_data_config(self.config.data, str(self.prior_folder))

    def prior_samples(self) -> list[Sample]:
        """The class images of prior preservation that exist already, under ids of their own."""
        samples = (
            () if self.prior_data is None else self._scan(self.prior_data, "prior.folder").samples
        )
        # Marked: a class image may have the file name of a sample, and the cache and the loader go
        # by ids.
        return [replace(sample, id=PRIOR_MARK + sample.id) for sample in samples]

    @property
    def class_inputs(self) -> ClipInputs:
        """What conditioners are given of a class image."""
        size = self.config.data
        return ClipInputs(clip=None, frames=1, height=size.height, width=size.width, fps=0.0)

    @property
    def fps(self) -> float:
        """Frames per second of generated samples, and of clips unless the dataset sets another
        rate."""
        return self.config.data.fps or self.spec.data.fps
