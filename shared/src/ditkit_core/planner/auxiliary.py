"""Memory of encoding and sampling: each encoder alone, and sampling in addition to the memory of training.

Fake tensors run through the functions that the encoders and the sampler call themselves, so that a plan cannot diverge from them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import nn

from ditkit_core.data.dataset import Sample
from ditkit_core.engine.devices import choose_device
from ditkit_core.io.console import doing
from ditkit_core.models.encoders import AuxiliaryModel, LayerContext
from ditkit_core.models.precision import parse_dtype
from ditkit_core.planner.gpus import gpus_here
from ditkit_core.planner.memory import DevicePlan
from ditkit_core.planner.memory_tracker import MemoryTracker, fake_tensors
from ditkit_core.planner.planned_step import (
    Bucket,
    Generated,
    PlannedStep,
    Size,
    StepJob,
    has_data,
    missing_class_images,
)
from ditkit_core.planner.reduced_model import give_memory, materialise, reduced_model
from ditkit_core.run.context import RunContext
from ditkit_core.run.encoding import sample_prompts
from ditkit_core.sampling.prompts import Shape, shape_of
from ditkit_core.weights.layer_streaming import free_memory_bytes, too_large

_DEVICE = torch.device("cpu", 1)
"""With fake tensors, a device other than the host."""
_SMALLER = "a smaller sample.height and sample.width"
Mode = Literal["whole", "layer by layer", "in tiles"]


class MeasuredModel(NamedTuple):
    """Bytes of an auxiliary model at its peak."""

    weights: int
    peak: int
    """The weights included."""


class Room(NamedTuple):
    """A device with its available memory."""

    device: str
    available: int | None
    """Bytes without those reserved for other programs; None if unknown."""
    kind: str = "cuda"
    """`cuda` or `cpu`."""
    in_use: int = 0
    """Bytes that are in use meanwhile: the trained model while it generates samples, or its copy for previews."""

    def fits(self, peak: int) -> bool:
        """Whether there is room; True if the memory is unknown."""
        return self.available is None or peak <= self.available


@dataclass(frozen=True, kw_only=True)
class AuxiliaryRow:
    """One line of a plan: the memory of a stage other than training on its device."""

    stage: str
    """`encode`, `sample`, or `preview` where these are generated on a device of their own."""
    name: str
    device: str
    size: Size | None
    """Size of the largest sample; None if the stage does not depend on it."""
    mode: Mode
    weights: int
    """Bytes of its own weights."""
    in_use: int
    """Bytes that training occupies on the device meanwhile: `Room.in_use`."""
    peak: int
    """Bytes in total."""
    available: int | None
    remedy: str
    """The setting to change if it does not fit, with the memory needed then; empty if it fits."""

    @property
    def fits(self) -> bool | None:
        """Whether there is room; None if unknown."""
        return None if self.available is None else self.peak <= self.available

    @property
    def missing(self) -> int:
        """Missing bytes; 0 if it fits or the memory is unknown."""
        return 0 if self.available is None else max(0, self.peak - self.available)


def measure_model(
    model: AuxiliaryModel,
    size: Size,
    *,
    text_dtype: torch.dtype,
    mode: Mode = "whole",
    kind: str = "cuda",
) -> MeasuredModel:
    """Measure an auxiliary model on fake tensors.

    Args:
        model: The module with the functions that call it.
        size: Size of its input.
        text_dtype: Dtype of text encoders.
        mode: As a whole, layer by layer, or on the largest tile; the model must support it.
        kind: Kind of device that it runs on: `cuda` or `cpu`.
    """
    module = model.build(text_dtype)
    with fake_tensors(kind) as tracker, torch.no_grad():
        if mode == "layer by layer":
            assert model.run_streamed is not None
            model.run_streamed(module, _DEVICE, lambda: _passing(module, tracker))
        else:
            with tracker.purpose("weights"):
                give_memory(module, _DEVICE)
            if mode == "in tiles":
                assert model.tiles is not None
                size = model.tiles.largest(size)
            model.run(module, size, _DEVICE)
    return MeasuredModel(tracker.at_peak[_DEVICE]["weights"], tracker.peak[_DEVICE])


def _passing(module: nn.Module, tracker: MemoryTracker) -> LayerContext:
    """Buffers for streamed layers, as `PassingMemory` keeps them: one tensor per name and shape, reused by the next layer."""
    kept: dict[tuple[str, torch.Size], nn.Parameter] = {}

    @contextmanager
    def loaded(name: str) -> Iterator[nn.Module]:
        part = module.get_submodule(name)
        before = []
        with tracker.purpose("weights"):
            for inner, tensor in list(part.named_parameters(remove_duplicate=False)):
                key = (inner, tensor.shape)
                if key not in kept:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=_DEVICE)
                    kept[key] = nn.Parameter(fake, requires_grad=False)
                owner, _, leaf = inner.rpartition(".")
                before.append((part.get_submodule(owner), leaf, tensor))
                before[-1][0]._parameters[leaf] = kept[key]
        yield part
        for holder, leaf, tensor in before:
            holder._parameters[leaf] = tensor

    return loaded


def denoising_bytes(job: StepJob, size: Size, references: Sequence[tuple[int, int]] = ()) -> int:
    """Peak bytes of one transformer call without gradients, above its weights and including inputs.

    One block of each kind is run, because without gradients only a block's output stays alive.

    Args:
        job: The step that trains it.
        size: Size of the sample.
        references: Height and width of each image to edit.
    """
    spec, dtype = job.spec, job.precision.matmul
    model = reduced_model(job)
    with torch.device("meta"):
        item = spec.training.empty_item(job.arch, size, references)
    with fake_tensors(job.kind) as tracker, torch.no_grad():
        with tracker.purpose("weights"):
            names = {id(module): name for name, module in model.whole.named_modules()}
            for stage in model.stages():
                materialise(stage.eval(), names[id(stage)], spec, dtype=dtype, device=_DEVICE)
        weights = tracker.total(_DEVICE)
        item = {name: torch.empty(t.shape, dtype=t.dtype, device=_DEVICE) for name, t in item.items()}
        sigma = torch.empty(1, device=_DEVICE)
        model(spec.training.make_inputs([item["latents"].float()], sigma, [item], 1.0))
    return tracker.peak[_DEVICE] - weights


def held_while_sampling(purposes: Mapping[str, int], *, averages: bool = False) -> int:
    """Bytes in use on a device while samples are generated between two steps: no gradients and no activations.

    Args:
        purposes: Bytes by purpose, as `DevicePlan` has them.
        averages: Whether the optimizer averages the weights itself.
    """
    held = sum(purposes.get(name, 0) for name in ("weights", "adapters", "optimizer", "average"))
    # Samples are generated with averaged weights, and a copy of the trained ones is kept meanwhile.
    return held + (purposes.get("adapters", 0) if averages or purposes.get("average") else 0)


@dataclass(frozen=True, kw_only=True)
class AuxiliaryPlanner:
    """Plans the memory of encoding and sampling, stage by stage."""

    models: Sequence[AuxiliaryModel]
    """The family's auxiliary models, from `AuxiliarySpec.models`."""
    text_dtype: torch.dtype
    """`encode.text_dtype`."""
    streaming: str = "auto"
    """`encode.streaming`."""
    encode_tiling: bool = False
    """`encode.vae_tiling`."""
    sample_tiling: bool = False
    """`sample.vae_tiling`."""

    def encode_rows(self, sizes: Sequence[Size], room: Room) -> list[AuxiliaryRow]:
        """The encoders, which run one at a time with nothing else on their device.

        Args:
            sizes: Sizes of all clips and references that are encoded.
            room: Their device.
        """
        chosen = [each for each in self.models if each.stage == "encode" and sizes]
        return [self._row(each, sizes, room, tiled=self.encode_tiling) for each in chosen]

    def sample_rows(
        self, sizes: Sequence[Size], rooms: Sequence[Room], *, denoising: int, num_samples: int = 1
    ) -> list[AuxiliaryRow]:
        """The transformer's denoising on each of its devices, and the decoder on the first.

        Args:
            sizes: Sizes of the samples; empty for none.
            rooms: The model's devices.
            denoising: `denoising_bytes` of the largest sample.
            num_samples: Samples generated in a row; from the second on, the decoder stays loaded while the model runs.
        """
        rows: list[AuxiliaryRow] = []
        for model in self.models:
            if model.stage == "sample" and sizes:
                decoder = self._row(model, sizes, rooms[0], tiled=self.sample_tiling)
                for place, room in enumerate(rooms):
                    kept = decoder.weights if num_samples > 1 and not place else 0
                    peak = room.in_use + kept + denoising
                    rows.append(
                        replace(
                            decoder,
                            name="denoising",
                            device=room.device,
                            mode="whole",
                            weights=kept,
                            in_use=room.in_use,
                            peak=peak,
                            available=room.available,
                            remedy="" if room.fits(peak) else _SMALLER,
                        )
                    )
                rows.append(decoder)
        return rows

    def _row(self, model: AuxiliaryModel, sizes: Sequence[Size], room: Room, *, tiled: bool) -> AuxiliaryRow:
        doing(f"planning the {model.name}")
        mode: Mode = "in tiles" if tiled and model.tiles else "whole"
        if model.run_streamed and self._streams(model, room):
            mode = "layer by layer"
        # Either the largest image or the largest clip needs most, so both are measured.
        worst = {
            max(sizes, key=lambda size: size[1] * size[2]),
            max(sizes, key=lambda size: size[0] * size[1] * size[2]),
        }
        measure = partial(measure_model, model, text_dtype=self.text_dtype, kind=room.kind)
        each = {size: measure(size, mode=mode) for size in sorted(worst)}
        size, measured = max(each.items(), key=lambda found: found[1].peak)
        peak = room.in_use + measured.peak
        return AuxiliaryRow(
            stage=model.stage,
            name=model.name,
            device=room.device,
            size=size if model.tiles else None,
            mode=mode,
            weights=measured.weights,
            in_use=room.in_use,
            peak=peak,
            available=room.available,
            remedy="" if room.fits(peak) else _remedy(model, mode, room, partial(measure, size)),
        )

    def _streams(self, model: AuxiliaryModel, room: Room) -> bool:
        if self.streaming != "auto":
            return self.streaming == "always"
        # A state dict counts a shared weight twice, as the encoder does when it decides whether to stream.
        needed = sum(tensor.nbytes for tensor in model.build(self.text_dtype).state_dict().values())
        return room.available is not None and too_large(needed, room.available)


def _remedy(model: AuxiliaryModel, mode: Mode, room: Room, measure: Callable[..., MeasuredModel]) -> str:
    """The setting that lets a stage fit, with the memory needed then; if it is not enough, also what to do after it."""
    last = 'encode.device = "cpu"' if model.stage == "encode" else _SMALLER
    setting, other = f"{model.stage}.vae_tiling = true", "in tiles"
    if not model.tiles:
        setting, other = 'encode.streaming = "always"', "layer by layer"
    if mode != "whole" or not (model.tiles or model.run_streamed):
        return last
    needed = room.in_use + measure(mode=other).peak
    then = f"{setting} would need {needed / 2**30:.1f} GiB"
    return then if room.fits(needed) else f"{then}, which is still too much; {last}"


def plan_auxiliary(
    step: PlannedStep,
    devices: Sequence[DevicePlan],
    *,
    gpus: bool,
    samples: Sequence[Sample] | None = None,
    streamed: int = 0,
) -> tuple[AuxiliaryRow, ...]:
    """Rows for encoding and sampling as configured, then for previews if they have a separate device.

    Args:
        step: The run's step.
        devices: Memory of the steps on each device.
        gpus: Whether the plan is for GPUs that need not be in this machine.
        samples: The training samples, if known already; None reads the dataset.
        streamed: Bytes of streamed weights on the host.

    Raises:
        UserError: If local files of an encoder are damaged or of another model.
    """
    run, config, shapes = step.run, step.run.config, step.bucket.shapes
    kind, averages = "cuda" if gpus else run.devices[0].type, config.optim.kind.averages
    rooms = [
        Room(
            device=device.budget.name,
            available=device.budget.available - device.budget.workspace,
            kind=kind,
            in_use=held_while_sampling(device.purposes, averages=averages),
        )
        for device in devices
    ]
    planner = AuxiliaryPlanner(
        models=run.spec.auxiliary.models(step.job.arch, config.model),
        text_dtype=parse_dtype(config.encode.text_dtype),
        streaming=config.encode.streaming,
        encode_tiling=config.encode.vae_tiling,
        sample_tiling=config.sample.vae_tiling,
    )
    encoders = _room_of(config.encode.device, "encode.device", run, rooms[0], gpus=gpus)
    found = planner.encode_rows(_encoded_sizes(step.bucket), encoders)

    def sampled(generated: Generated, on: Sequence[Room]) -> list[AuxiliaryRow]:
        if not generated.shapes:
            return []
        denoising = denoising_bytes(replace(step.job, kind=on[0].kind), *max(generated.shapes, key=_pixels))
        sizes = [size for size, _ in generated.shapes]
        return planner.sample_rows(sizes, on, denoising=denoising, num_samples=generated.num)

    found += sampled(to_be_generated(run, shapes, samples), rooms)
    if config.sample.device and config.sample.every_steps:
        room = _preview_room(run, rooms[0], devices, gpus=gpus, streamed=streamed)
        found += [replace(row, stage="preview") for row in sampled(_samples(run, shapes, samples), [room])]
    return tuple(found)


def _encoded_sizes(bucket: Bucket) -> list[Size]:
    shapes = (*bucket.shapes, *bucket.class_shapes)
    return [size for shape in shapes for size in (shape[0], *((1, *reference) for reference in shape[1]))]


def to_be_generated(run: RunContext, shapes: Sequence[Shape], samples: Sequence[Sample] | None = None) -> Generated:
    """The samples that a run generates during and after training, and missing class images.

    Class images are generated before the optimizer has state. The plan ignores this, since with adapters the difference is small.

    Args:
        run: The run.
        shapes: All shapes of the data; captions are sampled in each of them if the dataset is not available.
        samples: As for `plan_auxiliary`.
    """
    asked, images = _samples(run, shapes, samples), missing_class_images(run)
    return Generated((*asked.shapes, *images.shapes), asked.num + images.num)


def _samples(run: RunContext, shapes: Sequence[Shape], samples: Sequence[Sample] | None) -> Generated:
    config = run.config.sample
    if not config.prompts and not config.captions:
        return Generated((), 0)
    if samples is None and not config.prompts and has_data(run):
        samples = run.data.dataset.samples
    if config.prompts or samples is not None:
        prompts = sample_prompts(run, [] if config.prompts or samples is None else samples)
        found = [
            shape_of(prompt, prompt.files, run.auxiliary.columns, run.spec.data.reference_size) for prompt in prompts
        ]
        return Generated(tuple(found), len(prompts) * config.images)
    sizes = {
        ((config.frames or frames, config.height or height, config.width or width), references)
        for (frames, height, width), references in shapes
    }
    return Generated(tuple(sorted(sizes)), config.captions * config.images)


def _room_of(name: str, key: str, run: RunContext, own: Room, *, gpus: bool) -> Room:
    """The device of a setting, with nothing else on it: encoders run before the model is loaded, and previews have their own device."""
    own = own._replace(in_use=0)
    if gpus and name != "cpu":  # the GPUs are not in this machine; all are assumed to be like the first
        return own
    device = choose_device(name, key)
    if device.type == "cpu":
        # the host memory of another machine is unknown
        return Room("cpu", None if gpus else free_memory_bytes(device), "cpu")
    if device == run.devices[0]:
        return own
    (found,) = gpus_here([device])
    return Room(f"{device}: {found.name}", found.total - found.reserve)


def _preview_room(run: RunContext, own: Room, devices: Sequence[DevicePlan], *, gpus: bool, streamed: int) -> Room:
    """The device that generates previews, with a copy of the model."""
    name = run.config.sample.device
    room = _room_of(name, "sample.device", run, own, gpus=gpus)
    weights = sum(device.purposes[purpose] for device in devices for purpose in ("weights", "adapters"))
    if room.kind == "cuda":
        return room._replace(device=f"sample.device {name}" if gpus else room.device, in_use=weights)
    if room.available is not None:  # the steps will use the same memory, and have not begun
        steps = sum(each.host + (each.peak if own.kind == "cpu" else 0) for each in devices)
        room = room._replace(available=max(0, room.available - streamed - steps))
    return room._replace(in_use=weights + streamed)  # the copy streams nothing


def _pixels(shape: Shape) -> int:
    frames, height, width = shape[0]
    return frames * height * width + sum(h * w for h, w in shape[1])
