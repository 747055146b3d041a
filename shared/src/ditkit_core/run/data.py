"""The dataset and the cache of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ditkit_core.data.buckets import describe_lengths, describe_sizes
from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset, Sample, scan
from ditkit_core.encoding.cache import Cache
from ditkit_core.encoding.prior_preservation import PRIOR_MARK, count_media, prior_data_config
from ditkit_core.io.console import say, warn
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.conditions import Column
from ditkit_core.models.spec import ModelSpec
from ditkit_core.run.config import RunConfig


@dataclass(frozen=True)
class RunData:
    """What a run reads: the dataset is scanned once, when it is first asked for."""

    spec: ModelSpec
    config: RunConfig
    columns: Sequence[Column]

    @cached_property
    def cache(self) -> Cache:
        """Where encoded clips and captions are kept."""
        own = self.config.encode.cache
        return Cache(Path(own) if own else Path(self.config.run.folder).parent / "cache")

    @cached_property
    def dataset(self) -> Dataset:
        """The samples, checked."""
        return self._scan(self.config.data, "data.folder")

    @property
    def prior_folder(self) -> Path:
        """Where the class pictures of prior preservation lie."""
        return Path(self.config.prior.folder or RunFolder(Path(self.config.run.folder)).prior)

    def scanned(self, config: DataConfig, key: str = "data.folder") -> Dataset:
        """A dataset as this model reads it, without a word about what it holds."""
        spec = self.spec
        return scan(
            config, frame_step=spec.data.frame_step, size_step=spec.data.size_step, fps=spec.data.fps,
            reference_size=spec.data.reference_size, columns=self.columns, key=key,
        )  # fmt: skip

    def _scan(self, config: DataConfig, key: str) -> Dataset:
        found = self.scanned(config, key)
        for name, reason in found.excluded:
            warn(f"left out: {name}: {reason}")
        edits = sum(bool(sample.references) for sample in found.samples)
        if edits:
            say(f"{key}: {edits} of {len(found.samples)} samples have references")
        if config.buckets:
            say(f"{key}: buckets {describe_sizes((sample.height, sample.width) for sample in found.samples)} samples")
        if config.frame_buckets or config.windows != "first":
            files = len({sample.media for sample in found.samples})
            lengths = describe_lengths(sample.frames for sample in found.samples)
            say(f"{key}: {len(found.samples)} windows of {files} files; frames {lengths}")
        return found

    @property
    def prior_data(self) -> DataConfig | None:
        """How the class pictures are read; None if none are wanted or all are still to be drawn."""
        prior = self.config.prior
        if not prior.wanted or (prior.prompt and not count_media(self.prior_folder)):
            return None
        return prior_data_config(self.config.data, str(self.prior_folder))

    def prior_samples(self) -> list[Sample]:
        """The class images of prior preservation that are there, under ids of their own."""
        found = () if self.prior_data is None else self._scan(self.prior_data, "prior.folder").samples
        return [replace(sample, id=PRIOR_MARK + sample.id) for sample in found]

    @property
    def fps(self) -> float:
        """Frames per second of samples, and of clips unless the dataset says otherwise."""
        return self.config.data.fps or self.spec.data.fps
