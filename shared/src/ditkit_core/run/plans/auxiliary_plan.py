"""The memory of a run's encoding, sampling and previews: what is generated, and where."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ditkit_core.adapters.added_adapter import added_bytes
from ditkit_core.adapters.files.identify import layers_of
from ditkit_core.data.dataset import Sample
from ditkit_core.engine.devices import choose_device
from ditkit_core.engine.placement import Placement
from ditkit_core.loading.on_meta import loaded_dtype
from ditkit_core.models.precision import Precision, parse_dtype
from ditkit_core.models.spec import build_on_meta
from ditkit_core.planner.auxiliary import (
    AuxiliaryPlanner,
    AuxiliaryRow,
    DeviceMemory,
    denoising_bytes,
    held_while_sampling,
)
from ditkit_core.planner.gpus import gpus_here
from ditkit_core.planner.memory import DevicePlan
from ditkit_core.run.data import RunData
from ditkit_core.run.encoding import sample_prompts
from ditkit_core.run.plans.planned_step import (
    Generated,
    PlannedStep,
    has_data,
    missing_class_images,
)
from ditkit_core.run.sample_adapters import SampleAdapters
from ditkit_core.sampling.prompts import Shape, shape_of
from ditkit_core.weights.layer_streaming import free_memory_bytes


def plan_auxiliary(
    step: PlannedStep,
    devices: Sequence[DevicePlan],
    blocks: Sequence[range],
    *,
    gpus: bool,
    samples: Sequence[Sample] | None = None,
    streamed: int = 0,
    per_machine: int = 1,
    host: int | None = None,
) -> tuple[AuxiliaryRow, ...]:
    """Rows for encoding and sampling as configured, then for previews if they have a separate
    device.

    Args:
        devices: Memory of the steps on each device, which has these blocks.
        gpus: Whether the plan is for GPUs that need not be in this machine.
        samples: The training samples, if known already; None reads the dataset. Without one,
            captions are sampled in each shape of the bucket.
        streamed: Bytes of streamed weights on the host.
        per_machine: Ranks on a machine; all of them encode.
        host: Bytes of host memory for streamed weights and offloaded activations; None if unknown.
    """
    run, config, shapes = step.run, step.run.config, step.bucket.shapes
    training_device = None if gpus else run.devices[0]
    kind = "cuda" if training_device is None else training_device.type
    exchanges = bool(run.experts and config.sample.preview_steps) and not config.sample.device
    memories = [
        DeviceMemory(
            device=device.budget.name,
            available=device.budget.available - device.budget.workspace,
            kind=kind,
            in_use=held_while_sampling(device.purposes, averages=config.optim.kind.averages)
            # A CPU has both experts; a GPU has one at a time.
            + (weights_on(device) if exchanges and kind == "cpu" else 0),
        )
        for device in devices
    ]
    planner = AuxiliaryPlanner(
        models=run.spec.auxiliary.models(step.job.arch, config.model),
        text_dtype=parse_dtype(config.encode.text_dtype),
        streaming=config.encode.streaming,
        encoding=run.auxiliary.encoding,
        decodings=run.auxiliary.decodings,
    )
    encoders = _memory_of(config.encode.device, "encode.device", training_device, memories[0])
    if encoders.kind == "cpu" and encoders.available is not None:
        encoders = encoders._replace(available=encoders.available // per_machine)
    encoded = (*shapes, *step.bucket.class_shapes)
    sizes = [
        size
        for clip, references in encoded
        for size in (clip, *((1, *reference) for reference in references))
    ]
    rows = planner.encode_rows(sizes, encoders)
    adapter_bytes = _added_on(
        replace(run.sample_adapters, arch=step.job.arch), run.precision, blocks
    )

    def pixels(shape: Shape) -> int:
        (frames, height, width), references = shape
        return frames * height * width + sum(h * w for h, w in references)

    def sampled(generated: Generated, devices: Sequence[DeviceMemory]) -> list[AuxiliaryRow]:
        if not generated.shapes:
            return []
        # previews have one device
        more = adapter_bytes if len(devices) == len(adapter_bytes) else [sum(adapter_bytes)]
        denoising = denoising_bytes(
            replace(step.job, kind=devices[0].kind), *max(generated.shapes, key=pixels)
        )
        sizes = [size for size, _ in generated.shapes]
        return planner.sample_rows(
            sizes, devices, denoising=denoising, num_samples=generated.num, adapter_bytes=more
        )

    # Class images are generated before the optimizer has state. The plan ignores this, since with
    # adapters the difference is small.
    previews, images = _samples(run.data, shapes, samples), missing_class_images(run.data)
    rows += sampled(
        Generated((*previews.shapes, *images.shapes), previews.num + images.num), memories
    )
    if config.sample.device and config.sample.every_steps:
        memory = _memory_of(config.sample.device, "sample.device", training_device, memories[0])
        memory = _with_copy(memory, kind, devices, streamed=streamed)
        if memory.kind == "cuda" and gpus:
            memory = memory._replace(device=f"sample.device {config.sample.device}")
        rows += [replace(row, stage="preview") for row in sampled(previews, [memory])]
    if exchanges and kind == "cuda":
        # While the other of two experts takes its steps of a preview, the weights of the one that
        # trains wait on the host, and the other streams as many.
        held = streamed + sum(device.host for device in devices)
        moved = streamed + sum(weights_on(device) - device.gathered for device in devices)
        about = {
            "stage": "preview",
            "name": "exchange of the experts",
            "size": None,
            "mode": "whole",
            "weights": moved,
        }
        rows.append(
            DeviceMemory("host", host, in_use=held).row(moved, lambda: _NO_EXCHANGE, **about)
        )
    return tuple(rows)


_NO_EXCHANGE = "name another GPU as sample.device, or set sample.every_steps = 0: without room there are no previews"


def weights_on(device: DevicePlan) -> int:
    """Bytes of the model's weights on a device, its adapters included."""
    return device.purposes["weights"] + device.purposes["adapters"]


def _added_on(
    sample_adapters: SampleAdapters, precision: Precision, blocks: Sequence[range]
) -> list[int]:
    """Bytes of the adapters of [sample] on each device; of several experts, whose turns it is one
    after the other, the most."""
    spec, arch = sample_adapters.spec, sample_adapters.arch
    adapters = sample_adapters.opened(fetch=False)
    if not any(adapters):
        return [0] * len(blocks)
    model = build_on_meta(spec, arch, precision)
    devices = [torch.device("meta", index) for index in range(len(blocks))]
    of_blocks = tuple(device for device, span in zip(devices, blocks, strict=True) for _ in span)
    device_of = Placement(embed=devices[0], blocks=of_blocks, head=devices[-1]).device_of(model)
    shapes, dtype_of = layers_of(spec.architecture.build, arch), loaded_dtype(spec, precision)
    spans = [{name for name in shapes if device_of(name) == device} for device in devices]
    return [
        max(added_bytes(adapter, shapes, dtype_of, span) for adapter in adapters) for span in spans
    ]


def _samples(data: RunData, shapes: Sequence[Shape], samples: Sequence[Sample] | None) -> Generated:
    config = data.config.sample
    if not config.prompts and not config.captions:
        return Generated((), 0)
    if samples is None and not config.prompts and has_data(data.config.data):
        samples = data.dataset.samples
    if config.prompts or samples is not None:
        prompts = sample_prompts(data, [] if config.prompts or samples is None else samples)
        shapes_of_prompts = [
            shape_of(prompt, data.auxiliary.columns, data.spec.data.reference_size)
            for prompt in prompts
        ]
        return Generated(tuple(shapes_of_prompts), len(prompts) * config.images)
    sizes = {
        ((config.frames or frames, config.height or height, config.width or width), references)
        for (frames, height, width), references in shapes
    }
    return Generated(tuple(sorted(sizes)), config.captions * config.images)


def _memory_of(
    name: str, key: str, training_device: torch.device | None, training_memory: DeviceMemory
) -> DeviceMemory:
    """The device of a setting, with nothing else on it: encoders run before the model is loaded,
    and previews have their own device.

    Args:
        training_device: The first that trains; None if the plan is for GPUs that need not be in
            this machine.
    """
    training_memory = training_memory._replace(in_use=0)
    # the GPUs are not in this machine; all are assumed to be like the first
    if training_device is None and name != "cpu":
        return training_memory
    device = choose_device(name, key)
    if device.type == "cpu":
        # the host memory of another machine is unknown
        return DeviceMemory(
            "cpu", None if training_device is None else free_memory_bytes(device), "cpu"
        )
    if device == training_device:
        return training_memory
    (gpu,) = gpus_here([device])
    return DeviceMemory(f"{device}: {gpu.name}", gpu.total - gpu.reserve)


def _with_copy(
    memory: DeviceMemory, kind: str, devices: Sequence[DevicePlan], *, streamed: int
) -> DeviceMemory:
    """The device that generates previews, with a copy of the model."""
    weights = sum(map(weights_on, devices))
    if memory.kind == "cuda":
        return memory._replace(in_use=weights)
    if memory.available is not None:  # the steps will use the same memory, and have not begun
        steps = sum(device.host + (device.peak if kind == "cpu" else 0) for device in devices)
        memory = memory._replace(available=max(0, memory.available - streamed - steps))
    return memory._replace(in_use=weights + streamed)  # the copy streams nothing
