"""The training step of a run: the largest micro-batch, with the run's adapter and the format of its
weights.

A step with fewer tokens needs less memory. Nothing is loaded: sizes come from the data, or from the
configuration.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ditkit_core.adapters.assistant import ranks_next_to_dora
from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.files.entry import parse_merge
from ditkit_core.adapters.files.identify import layers_of
from ditkit_core.adapters.files.read import open_adapter
from ditkit_core.adapters.files.start import config_from_file
from ditkit_core.adapters.inject import chosen_of
from ditkit_core.data.buckets import resolutions_of
from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Sample
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loss_masks import LOSS_WEIGHTS
from ditkit_core.encoding.prior_preservation import count_media
from ditkit_core.engine.placement import Placement
from ditkit_core.io.files import local_path
from ditkit_core.loading.architecture import arch_here
from ditkit_core.loading.model import Model
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.gpus import GPU, gpus_here
from ditkit_core.planner.partition import needs_profile, placement_of
from ditkit_core.planner.planned_step import Size, StepJob, with_planned_kernels
from ditkit_core.planner.step_time import Utilisation, utilisation_of
from ditkit_core.run.context import RunContext
from ditkit_core.run.data import RunData
from ditkit_core.sampling.prompts import Shape, shape_of
from ditkit_core.training.config import TrainConfig
from ditkit_core.training.replay import MOST
from ditkit_core.weights.quantize import check_scaled


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The micro-batch of a plan."""

    size: Size
    references: tuple[tuple[int, int], ...]
    items: list[dict[str, Tensor]]
    shapes: tuple[Shape, ...]
    """All shapes of the data."""
    class_shapes: tuple[Shape, ...]
    """All shapes of the class images of prior preservation."""
    source: str
    """Where the size comes from, for messages."""

    @property
    def is_uniform(self) -> bool:
        """Whether all micro-batches have references, or none has."""
        return all(
            bool(references) == bool(self.references)
            for _, references in (*self.shapes, *self.class_shapes)
        )

    def described(self) -> str:
        """The bucket in a few words."""
        frames, height, width = self.size
        edited = (
            f" with references {', '.join(f'{h}x{w}' for h, w in self.references)}"
            if self.references
            else ""
        )
        size = f"{frames} frames of {height}x{width}" if frames > 1 else f"{height}x{width}"
        masked = " with loss masks" if LOSS_WEIGHTS in self.items[0] else ""
        return f"{len(self.items)} x {size}{edited}{masked} ({self.source})"


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A run's step, to be profiled."""

    run: RunContext
    """A run of one transformer."""
    bucket: Bucket
    job: StepJob

    @classmethod
    def of(
        cls,
        run: RunContext,
        kind: str = "cuda",
        samples: Sequence[Sample] | None = None,
        class_images: Sequence[Sample] | None = None,
        gpus: Sequence[GPU] = (),
    ) -> "PlannedStep":
        """The step of a run whose model is not built, on a kind of device (`cuda` or `cpu`); known
        GPUs say what `train.kernels = auto` would be there. Samples and class images as for
        `largest_bucket`."""
        # Where it is unknown, this raises the reason.
        arch = arch_here(run.spec, run.config.model)[1] if run.arch is None else run.arch
        adapter = _adapter(
            run.spec, arch, run.config.adapter, run.config.base.merge_key(run.component)
        )
        bucket = largest_bucket(run.data, arch, samples, class_images)
        job = job_of(run, arch, adapter, bucket, kind)
        return cls(
            run=run,
            bucket=bucket,
            job=replace(job, execution=with_planned_kernels(job.execution, kind, gpus)),
        )


def place_run(run: RunContext, unloaded: Model, *, training: bool = False) -> Placement:
    """The placement of a run's model, which has its adapters; every command that loads a model
    calls it. In training it is as the run's plan says, with the policies of `train.checkpointing`.
    """
    arch, planned = unloaded.origin.arch, training and needs_profile(run.execution)
    bucket = largest_bucket(run.data, arch) if planned else None
    job = job_of(run, arch, unloaded.origin.adapter, bucket, run.devices[0].type)
    return placement_of(unloaded.module, job, training=training)


def job_of(
    run: RunContext, arch: Any, adapter: AdapterConfig, bucket: Bucket | None, kind: str
) -> StepJob:
    """The step of a run of one transformer, whose adapter has the settings that an `adapter.init`
    file decides. Without a bucket nothing is profiled."""
    config = run.config
    matched = config.prior.match_base
    others = 3.0 if config.flow.slider_positive else float(config.flow.target_guidance != 1)
    if run.stored_formats:  # matrices that stay as their file has them cannot be trained
        check_scaled(str(config.model.here(run.component)), config.adapter.method)
    return StepJob(
        spec=run.spec,
        arch=arch,
        batch=() if bucket is None else bucket.items,
        execution=run.execution,
        stored=run.stored_formats,
        adapter=adapter,
        optim=config.optim,
        ema=config.ema,
        # Forwards with other captions keep nothing: they take time alone, and the batches of plans
        # lack those captions.
        flow=replace(
            config.flow,
            target_guidance=1.0,
            target_schedule="constant",
            slider_positive="",
            slider_negative="",
            slider_guidance=3.0,
        ),
        clip_norm=config.train.clip_norm,
        clip_by=config.train.clip_by,
        assistant=_assistant(
            run.spec, arch, adapter, config.base.assistants[run.component == "transformer_2"]
        )
        if bucket is not None and adapter.use_dora
        else {},
        micro_batches=config.micro_batches,
        extra_forwards=matched + (1 - matched) * others,
        kinds=1 if bucket is None else num_kinds(config.data, bucket),
        # FSDP2 makes zeros of gradients that a rank lacks.
        uniform=bucket is not None and bucket.is_uniform and config.ranks.shard == 1,
        validates=config.held_out.clips > 0,
        kind=kind,
    )


def num_kinds(data: DataConfig, bucket: Bucket) -> int:
    """Kinds of micro-batches that may be replayed, by the shapes of the data; of data that are not
    here, one kind is assumed."""
    shapes = {*bucket.shapes, *bucket.class_shapes} if has_data(data) else set()
    return max(1, min(MOST, len(shapes)))


def _assistant(
    spec: ModelSpec, arch: Any, adapter: AdapterConfig, assistant: tuple[str, str]
) -> dict[str, int]:
    key, entry = assistant
    if not entry:
        return {}
    architecture, sets = spec.architecture, spec.adapters.targets
    layers, (path, _) = layers_of(architecture.build, arch), parse_merge(entry, key)
    doras = chosen_of(layers, adapter.targets, sets)
    return ranks_next_to_dora(open_adapter(path, architecture.names, layers), doras, key)


def _adapter(spec: ModelSpec, arch: Any, adapter: AdapterConfig, merge_key: str) -> AdapterConfig:
    if not adapter.init or adapter.method == "full":
        return adapter
    architecture = spec.architecture
    file = open_adapter(
        local_path(adapter.init), architecture.names, layers_of(architecture.build, arch)
    )
    return config_from_file(adapter, file, merge_key)[0]


def largest_bucket(
    data: RunData,
    arch: Any,
    samples: Sequence[Sample] | None = None,
    class_images: Sequence[Sample] | None = None,
) -> Bucket:
    """The micro-batch with the most tokens: from the dataset if it is available, or known already,
    else with the configured size.

    Each micro-batch of the data is followed by as many class images, and class images of one shape
    go through the model together. The largest of all is planned.
    """
    config, spec = data.config, data.spec
    if samples is None and has_data(config.data):
        samples = data.dataset.samples
    shapes, source = _data_shapes(data, samples)
    if class_images is None:
        images = data.prior_data if data.prior_folder.is_dir() else None
        class_images = [] if images is None else data.scanned(images, "prior.folder").samples
    # Those that exist, and those that are still to be generated.
    of_class = {*_shapes(data, class_images), *missing_class_images(data).shapes}
    masked = bool(config.data.masks) or any(sample.mask is not None for sample in samples or ())
    batches = {
        shape: _batch(spec, config.train, arch, shape, masked=masked) for shape in sorted(shapes)
    }
    # A micro-batch of class images has at most as many as the data's micro-batch before it.
    most = max(map(len, batches.values()))
    batches |= {
        shape: _batch(spec, config.train, arch, shape, masked=masked)[:most]
        for shape in sorted(of_class - shapes)
    }
    largest = max(batches, key=lambda shape: sum(map(spec.training.num_tokens, batches[shape])))
    if largest not in shapes:
        source = "the largest of the class images, which is larger than the data's"
    return Bucket(
        size=largest[0],
        references=largest[1],
        items=batches[largest],
        shapes=tuple(sorted(shapes)),
        source=source,
        class_shapes=tuple(sorted(of_class)),
    )


def _batch(
    spec: ModelSpec, train: TrainConfig, arch: Any, shape: Shape, *, masked: bool
) -> list[dict[str, Tensor]]:
    with torch.device("meta"):
        item = spec.training.empty_item(arch, *shape)
        if masked:
            item[LOSS_WEIGHTS] = torch.empty(1, *item["latents"].shape[1:])
    # The same item repeated: a plan only needs its shapes.
    return [item] * (
        max(1, train.batch_tokens // spec.training.num_tokens(item))
        if train.batch_tokens
        else train.batch_size
    )


def _data_shapes(data: RunData, samples: Sequence[Sample] | None) -> tuple[set[Shape], str]:
    """The shapes of the data, and where they come from."""
    section = data.config.data
    if samples is not None:
        return _shapes(
            data, samples
        ), f"the largest in {', '.join(section.folders or (section.folder,))}"
    largest, *smaller = resolutions_of(section, data.spec.data.size_step)
    named = (
        "data.frames and resolutions" if section.resolutions else "data.frames, height and width"
    )
    # Edits are assumed to have one reference of the sample's size.
    reference_size = data.spec.data.reference_size if section.references else None
    assumed = ", one reference each" if reference_size else ""

    def shape(height: int, width: int) -> Shape:
        return (section.frames, height, width), (
            reference_size(height, width, 1),
        ) if reference_size else ()

    if largest.kept is not None:  # the others have no more pixels
        return {shape(*largest.kept)}, named + assumed
    source = "the largest bucket of data.height and data.width" if section.buckets else named
    return {
        shape(*size) for resolution in (largest, *smaller) for size in resolution.sizes
    }, source + assumed


def _shapes(data: RunData, samples: Sequence[Sample]) -> set[Shape]:
    return {
        shape_of(sample, data.auxiliary.columns, data.spec.data.reference_size)
        for sample in samples
    }


class Generated(NamedTuple):
    """Samples that a run generates."""

    shapes: tuple[Shape, ...]
    num: int


def missing_class_images(data: RunData) -> Generated:
    """The class images that are missing, as they will be generated."""
    prior, section = data.config.prior, data.config.data
    missing = prior.images - count_media(data.prior_folder) if prior.class_prompt else 0
    return (
        Generated((((1, section.height, section.width), ()),), missing)
        if missing > 0
        else Generated((), 0)
    )


def has_data(config: DataConfig) -> bool:
    """Whether the dataset is on this machine."""
    folders = config.folders or (config.folder,)
    return all(folder and local_path(folder).is_dir() for folder in folders)


def utilisation_of_run(run: RunContext, samples: Sequence[EncodedSample]) -> Utilisation | None:
    """The utilisation of a run's steps; None on a CPU, whose peak rate is unknown."""
    if any(device.type != "cuda" for device in run.devices):
        return None
    job = PlannedStep.of(run, "cuda", run.data.dataset.samples, []).job
    return utilisation_of(job, [sample.outline() for sample in samples], gpus_here(run.devices))
