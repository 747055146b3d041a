"""A configuration put to work: what the commands share, made when first asked for."""

import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ditkit_core
from ditkit_core.adapters.export import check_adapted
from ditkit_core.config.toml import to_toml
from ditkit_core.data.buckets import describe_lengths, describe_sizes
from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset, NothingToTrain, Sample, scan
from ditkit_core.encoding.cache import Cache
from ditkit_core.encoding.encode import Conditioning, encode_references
from ditkit_core.encoding.encode import encode as encode_samples
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import files_of, split_held_out
from ditkit_core.encoding.prior_preservation import PRIOR_MARK, count_media, prior_data_config
from ditkit_core.engine.ac_policies import Policy
from ditkit_core.engine.ac_schedule import ACSchedule
from ditkit_core.engine.devices import choose_device, choose_devices
from ditkit_core.engine.engine import Engine
from ditkit_core.engine.placement import Placement
from ditkit_core.errors import UserError
from ditkit_core.io.console import progress, say, warn
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.conditions import Column
from ditkit_core.models.encoders import Encoder, Sampler
from ditkit_core.models.paths import Components
from ditkit_core.models.precision import Precision, parse_dtype
from ditkit_core.models.spec import Expert, ModelSpec
from ditkit_core.run.config import RunConfig
from ditkit_core.run.experts import as_trained
from ditkit_core.run.prepare import Prepared, Unloaded, arch_here, build, load
from ditkit_core.sampling.prompts import Scene
from ditkit_core.weights.fp8_scaled import num_scaled, open_weights
from ditkit_core.weights.metadata import published, published_part


class Encoded(NamedTuple):
    """What a run trains on, in the cache."""

    samples: list[EncodedSample]
    prior: list[EncodedSample]
    """The class pictures of prior preservation."""


@dataclass(frozen=True)
class Run:
    """A run's configuration with its model family."""

    spec: ModelSpec
    """Once made: with what this architecture has otherwise than its family."""
    config: RunConfig
    """Once made: with the model's own values where [data] leaves them open."""
    arch: Any = None
    """The architecture; None if it is not known and nothing here says it."""
    _given: tuple[ModelSpec, RunConfig] = field(init=False, repr=False, compare=False)
    """Specification and configuration before either was completed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_given", (self.spec, self.config))
        if self.arch is None:
            with suppress(UserError):  # said where the model is built
                object.__setattr__(self, "arch", arch_here(self.spec, self.config.model)[1])
        if self.arch is not None:
            object.__setattr__(self, "spec", self.spec.for_arch(self.arch))
        data = self.config.data
        frames, height, width = self.spec.data.size
        data = replace(
            data, frames=max(data.frame_buckets, default=data.frames) or frames, height=data.height or height,
            width=data.width or width,
        )  # fmt: skip
        train = self.config.train
        if train.control_dropout < 0:
            train = replace(train, control_dropout=self.spec.training.control_dropout)
        config = replace(self.config, data=data, train=train)  # what the model decides, decided once
        object.__setattr__(self, "config", config if self.arch is None else as_trained(config, self.spec, self.arch))
        if self.config.train.threads:
            torch.set_num_threads(self.config.train.threads)

    @property
    def given_config(self) -> RunConfig:
        """The configuration as it was given."""
        return self._given[1]

    @property
    def experts(self) -> Sequence[Expert]:
        """The architecture's; none where one transformer sees all noise levels."""
        return () if self.arch is None else self.spec.architecture.experts(self.arch)

    @property
    def expert(self) -> Expert | None:
        """The one that the run trains; None if the model has one transformer, or several are to be trained."""
        return next((expert for expert in self.experts if expert.name == self.config.experts.train), None)

    @property
    def part(self) -> str:
        """The component that the run trains."""
        return "transformer" if self.expert is None else self.expert.part

    def having(self, config: RunConfig) -> "Run":
        """The same model with another configuration."""
        return Run(self.spec, config, self.arch)

    def known_as(self, arch: Any) -> "Run":
        """The run of an architecture that its files told once they were fetched."""
        spec, config = self._given
        return self if arch == self.arch else Run(spec, config, arch)

    @cached_property
    def stored_as(self) -> str:
        """What the blocks' matrices are in a file that lies here: `fp8` for scaled 8 bits, else `none`; `none` of a file elsewhere."""
        path = self.config.model.here(self.part)
        if path is None or (path.is_dir() and not any(path.glob("*.safetensors"))):
            return "none"
        try:
            return "fp8" if num_scaled(open_weights(path)) else "none"
        except UserError:  # said where the file is needed, which a plan by model.preset or a config.json does not
            return "none"

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """What the model is divided over; most often one."""
        config = self.config.train
        if not config.devices:
            return (choose_device(config.device, "train.device"),)
        if config.device != "auto":
            raise UserError(f"train.device = {config.device!r} and train.devices are both set; leave one of them out")
        return choose_devices(config.devices)

    @property
    def device(self) -> torch.device:
        """Where inputs go, and samples are decoded: the first."""
        return self.devices[0]

    def load(self, unloaded: Unloaded, placement: Placement) -> Prepared:
        """Give the model its weights, on its devices.

        Args:
            unloaded: The model.
            placement: Which device runs what, as the planner's `place` and `plan_placement` decide.
        """
        if len(self.devices) > 1:
            say(placement.described())
        prepared = load(unloaded, placement=placement, seed=self.config.train.seed, say=say)
        if prepared.passage is not None:
            say(prepared.passage.describe())
        return prepared

    @property
    def micro_batches(self) -> int:
        """How many a step adds up; prior preservation adds one to each."""
        return self.config.train.accumulation * (2 if self.config.prior.wanted else 1)

    @cached_property
    def precision(self) -> Precision:
        """The dtypes of the model."""
        matmul = parse_dtype(self.config.model.dtype)
        return self.config.precision.precision(matmul, self.spec.precision.reference)

    def engine(self, prepared: Prepared, schedule: ACSchedule | None = None) -> Engine:
        """Runs the model as configured.

        Args:
            prepared: The model.
            schedule: What `train.checkpointing` came to; None where nothing has a backward, and a budget need not be resolved.
        """
        config = self.config.train
        streaming = () if prepared.passage is None else (prepared.passage,)
        if schedule is None:
            schedule = config.schedule if config.schedule.budget is None else ACSchedule.everywhere(Policy())
        return Engine(policy=schedule, backend=config.attention, compile=config.compile, passages=streaming)

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
    def columns(self) -> Sequence[Column]:
        """What the model is conditioned by beside text."""
        return () if self.arch is None else self.spec.data.columns(self.arch)

    @cached_property
    def conditioning(self) -> Conditioning | None:
        """What encodes it, not loaded; None if there is nothing."""
        return self._conditioning(self.config.model)

    @cached_property
    def readers(self) -> Conditioning | None:
        """The same without the model's files, which it takes none of to say whether there is what is to be encoded."""
        return self._conditioning(None)

    def _conditioning(self, components: Components | None) -> Conditioning | None:
        if self.arch is None:
            return None
        config, device = self.config.encode, choose_device(self.config.encode.device, "encode.device")
        conditioners = self.spec.auxiliary.conditioners(self.arch, components, device, config.vae_tiling)
        texts = [column.name for column in self.columns if column.kind == "text"]
        return Conditioning(conditioners=conditioners, texts=texts) if conditioners else None

    @cached_property
    def encoders(self) -> tuple[Encoder, Encoder]:
        """Media and text encoder, not loaded."""
        config, device = self.config.encode, choose_device(self.config.encode.device, "encode.device")
        media = self.spec.auxiliary.media_encoder(self.config.model, device, config.vae_tiling)
        return media, self.spec.auxiliary.text_encoder(
            self.config.model, device, parse_dtype(config.text_dtype), config.streaming
        )

    @cached_property
    def sampler(self) -> Sampler:
        """The family's sampler, not loaded."""
        tiled = self.config.sample.vae_tiling
        return self.spec.auxiliary.sampler(self.config.model, self.device, self.precision.matmul, tiled)

    def build(self) -> Unloaded:
        """The model on `meta`, its files matched and its adapters in place: what is wrong with either shows here."""
        config = self.config
        unloaded = build(
            self.spec, config.model, config.adapter, config.base, precision=self.precision, part=self.part, say=say
        )  # fmt: skip
        check_adapted(self.spec, config.export, unloaded.model)
        return unloaded

    def encode(self, class_prompt: str = "") -> Encoded:
        """Every sample, and the texts and references of the samples to be drawn, through the encoders into the cache.

        Args:
            class_prompt: The prompt of class pictures that are still to be drawn, if any are.
        """
        data = self.dataset
        # says now if nothing would be left to train on
        split_held_out([sample.id for sample in data.samples], self.config.held_out.clips, files_of(data.samples))
        scenes = self.scenes(data.samples, warn=warn)
        texts = [*self._texts(scenes), *filter(None, [class_prompt])]
        failed: list[tuple[str, str]] = []
        encoded = self.encode_samples([*data.samples, *self._prior_samples()], data.fps, texts, failed)
        own = {sample.id for sample in data.samples}
        if not any(sample.id in own for sample in encoded):
            raise NothingToTrain.after([each for each in failed if each[0] in own])
        self._encode_controls(scenes)
        return Encoded(
            [sample for sample in encoded if sample.id in own], [sample for sample in encoded if sample.id not in own]
        )

    def encode_prior(self) -> list[EncodedSample]:
        """The class pictures of prior preservation alone."""
        return self.encode_samples(self._prior_samples(), self.dataset.fps, [])

    @property
    def prior_data(self) -> DataConfig | None:
        """How the class pictures are read; None if none are wanted or all are still to be drawn."""
        prior = self.config.prior
        if not prior.wanted or (prior.prompt and not count_media(self.prior_folder)):
            return None
        return prior_data_config(self.config.data, str(self.prior_folder))

    def _prior_samples(self) -> list[Sample]:
        found = () if self.prior_data is None else self._scan(self.prior_data, "prior.folder").samples
        return [replace(sample, id=PRIOR_MARK + sample.id) for sample in found]

    def encode_samples(
        self,
        samples: Sequence[Sample],
        fps: float,
        texts: Sequence[str] = (),
        failed: list[tuple[str, str]] | None = None,
    ) -> list[EncodedSample]:
        """Some samples and texts through the encoders into the cache; `failed` takes which were left out, and why."""
        media, text = self.encoders

        def left_out(sample: Sample, error: UserError) -> None:
            warn(f"left out: {sample.id}: {error}")
            if failed is not None:
                failed.append((sample.id, str(error)))

        return encode_samples(
            samples,
            cache=self.cache,
            media_encoder=media,
            text_encoder=text,
            fps=fps,
            reference_size=self.spec.data.reference_size,
            conditioning=self.conditioning,
            assemble=self.spec.training.assemble,
            extra_captions=texts,
            progress=_encode_progress,
            on_bad=left_out if self.config.data.on_bad == "skip" else None,
        )

    def scenes(self, samples: Sequence[Sample], warn: Callable[[str], None] | None = None) -> list[Scene]:
        """What is to be drawn: the prompts, or the first of the samples' captions, no longer than what they are drawn from.

        Where samples may be bad, no caption is drawn whose clip has no condition that can be read: encoding leaves it out.
        """
        data, config = self.config.data, self.config.sample
        readers = self.readers if data.on_bad == "skip" and not config.prompts else None
        if readers is not None:
            config = replace(config, captions=len(samples) if config.captions else 0)
        found = config.scenes(
            samples,
            size=(data.frames, data.height, data.width),
            size_step=self.spec.data.size_step,
            columns=self.columns,
        )
        fitted = (scene.fitted(self.columns, self.fps, warn) for scene in found)
        if readers is None:
            return list(fitted)
        usable = (scene for scene in fitted if readers.reads(scene.controls(self.fps)))
        return list(islice(usable, self.config.sample.captions))

    @property
    def fps(self) -> float:
        """Frames per second of what is drawn, and of clips unless the dataset says otherwise."""
        return self.config.data.fps or self.spec.data.fps

    def encode_scenes(self, scenes: Sequence[Scene]) -> None:
        """The texts and references of the samples to be drawn into the cache."""
        self.encode_samples([], self.spec.data.fps, self._texts(scenes))
        self._encode_controls(scenes)

    def _encode_controls(self, scenes: Sequence[Scene]) -> None:
        for scene in scenes:
            self.reference_latents(scene.references)
            self.conditions_of(scene)

    def conditions_of(self, scene: Scene) -> Mapping[str, Tensor]:
        """What the model is told of a scene beside its text, encoded if the cache lacks it."""
        if self.conditioning is None:
            return {}
        return self.conditioning.tensors(scene.controls(self.fps), self.cache, _encode_progress)

    def _texts(self, scenes: Sequence[Scene]) -> list[str]:
        return [*(scene.prompt for scene in scenes), self.config.sample.negative]

    def reference_latents(self, pictures: Sequence[Path]) -> list[Tensor]:
        """The latents of the pictures that a sample is drawn from, encoded if the cache lacks them."""
        if not pictures:
            return []
        assert self.spec.data.reference_size is not None, "checked"
        return encode_references(
            pictures,
            cache=self.cache,
            media_encoder=self.encoders[0],
            reference_size=self.spec.data.reference_size,
            progress=_encode_progress,
        )

    def metadata(self, prepared: Prepared, step: int, *, data: str) -> dict[str, str]:
        """What a file's header says about where it came from; no folder of this machine is named."""
        versions = {"ditkit": ditkit_core.__version__, "torch": torch.__version__, "python": platform.python_version()}
        model, expert = self.config.model, self.expert
        return {
            "ditkit.model": self.spec.name,
            "ditkit.base": published_part(getattr(model, self.part) or model.base),
            **({} if expert is None else {"ditkit.expert": expert.name}),
            "ditkit.preset": prepared.preset,
            "ditkit.step": str(step),
            "ditkit.data": data,
            "ditkit.config": to_toml(self.config, shown=published),
            "ditkit.versions": json.dumps(versions),
        }


@contextmanager
def _encode_progress(stage: str, total: int) -> Iterator[Any]:
    with progress(f"encode {stage}", total) as bar:
        yield bar.advance
