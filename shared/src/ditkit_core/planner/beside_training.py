"""What a run does beside its steps, for a plan: encoding its data, and drawing samples next to what training holds."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ditkit_core.adapters.inject import AdapterConfig
from ditkit_core.data.dataset import Sample
from ditkit_core.encoding.prior_preservation import count_media
from ditkit_core.engine.devices import choose_device
from ditkit_core.models.precision import parse_dtype
from ditkit_core.planner import gpus as hardware
from ditkit_core.planner.auxiliary import CompanionRow, Room, companion_rows, denoising_bytes, held_while_drawing
from ditkit_core.planner.memory import Budget, DevicePlan
from ditkit_core.run.encoding import scenes_of
from ditkit_core.run.run import Run
from ditkit_core.sampling.prompts import Shape, shape_of
from ditkit_core.weights.layer_streaming import free_memory_bytes


class Drawn(NamedTuple):
    """The samples that a run draws."""

    shapes: tuple[Shape, ...]
    num: int


def beside_training(
    run: Run,
    arch: Any,
    adapter: AdapterConfig,
    shapes: Sequence[Shape],
    devices: Sequence[DevicePlan],
    *,
    gpus: bool,
    samples: Sequence[Sample] | None = None,
    streamed: int = 0,
    class_shapes: Sequence[Shape] = (),
) -> tuple[CompanionRow, ...]:
    """Encoding and drawing, as configured; last of all previews, if they have a device of their own.

    Args:
        run: The run.
        arch: The model's architecture.
        adapter: What is trained.
        shapes: All that the data consists of.
        devices: What the steps hold.
        gpus: Whether the plan is for cards that need not be here.
        samples: What is trained on, if that is known already; None looks at the dataset.
        streamed: Bytes of weights that the steps have on the host.
        class_shapes: What the class pictures of prior preservation consist of, which are encoded too.

    Raises:
        UserError: If files of an encoder that are here are damaged or of another model.
    """
    config = run.config
    kind = "cuda" if gpus else run.devices[0].type
    averages = config.optim.kind.averages
    rooms = [_room(device.budget, kind) for device in devices]
    own, *others = rooms
    held, *held_elsewhere = (held_while_drawing(device.purposes, averages=averages) for device in devices)

    def denoising(drawn: Drawn, kind: str) -> int:
        if not drawn.shapes:
            return 0
        largest = max(drawn.shapes, key=_pixels)
        return denoising_bytes(
            run.spec, arch, run.precision, adapter, largest[0],
            references=largest[1], kind=kind, quantize=config.base.quantize,
        )  # fmt: skip

    def rows(drawn: Drawn, room: Room, beside: int, **given: Any) -> list[CompanionRow]:
        return companion_rows(
            run.spec.auxiliary.models(arch, config.model),
            drawn=[shape[0] for shape in drawn.shapes],
            text_dtype=parse_dtype(config.encode.text_dtype),
            streaming=config.encode.streaming,
            encode_tiling=config.encode.vae_tiling,
            sample_tiling=config.sample.vae_tiling,
            encode_room=_room_of(config.encode.device, "encode.device", run, own, gpus=gpus),
            sample_room=room,
            beside=beside,
            denoising=denoising(drawn, room.kind),
            num_samples=drawn.num,
            **given,
        )

    sizes = [
        size for shape in (*shapes, *class_shapes) for size in (shape[0], *((1, *reference) for reference in shape[1]))
    ]
    further = list(zip(others, held_elsewhere, strict=True))
    found = rows(to_be_drawn(run, shapes, samples), own, held, encoded=sizes, further=further)
    if config.sample.device and config.sample.every_steps:
        room = _room_of(config.sample.device, "sample.device", run, own, gpus=gpus)
        if gpus and room.kind == "cuda":
            room = room._replace(device=f"sample.device {config.sample.device}")
        if room.kind == "cpu" and room.available is not None:  # what the steps hold of the same memory is not there yet
            steps = sum(each.host + (each.peak if kind == "cpu" else 0) for each in devices)
            room = room._replace(available=max(0, room.available - streamed - steps))
        weights = sum(device.purposes[name] for device in devices for name in ("weights", "adapters"))
        weights += streamed if room.kind == "cpu" else 0  # where nothing is streamed
        previews = rows(_samples(run, shapes, samples), room, weights, encoded=())
        found += [replace(row, stage="preview") for row in previews]
    return tuple(found)


def has_data(run: Run) -> bool:
    """Whether the dataset is here."""
    folders = run.config.data.folders or (run.config.data.folder,)
    return all(folder and Path(folder).expanduser().is_dir() for folder in folders)


def to_be_drawn(run: Run, shapes: Sequence[Shape], samples: Sequence[Sample] | None = None) -> Drawn:
    """The samples that a run draws when it ends, and while it trains: the same ones; and class pictures that are missing.

    Those are drawn before the optimizer has anything, which is not told apart: only adapters can be trained with them.

    Args:
        run: The run.
        shapes: All that the data consists of, which captions are drawn in if the data is not here to say which.
        samples: As for `beside_training`.
    """
    asked, pictures = _samples(run, shapes, samples), class_pictures_to_draw(run)
    return Drawn((*asked.shapes, *pictures.shapes), asked.num + pictures.num)


def class_pictures_to_draw(run: Run) -> Drawn:
    """The class pictures that are missing, as they will be drawn."""
    prior, data = run.config.prior, run.config.data
    missing = prior.images - count_media(run.data.prior_folder) if prior.prompt else 0
    return Drawn((((1, data.height, data.width), ()),), missing) if missing > 0 else Drawn((), 0)


def _samples(run: Run, shapes: Sequence[Shape], samples: Sequence[Sample] | None) -> Drawn:
    config = run.config.sample
    if not config.prompts and not config.captions:
        return Drawn((), 0)
    if samples is None and not config.prompts and has_data(run):
        samples = run.data.dataset.samples
    if config.prompts or samples is not None:
        scenes = scenes_of(run, [] if config.prompts or samples is None else samples)
        found: list[Shape] = []
        for scene in scenes:
            found.append(shape_of(scene, scene.files, run.auxiliary.columns, run.spec.data.reference_size))
        return Drawn(tuple(found), len(scenes) * config.images)
    sizes_drawn = {
        ((config.frames or frames, config.height or height, config.width or width), references)
        for (frames, height, width), references in shapes
    }
    return Drawn(tuple(sorted(sizes_drawn)), config.captions * config.images)


def _room(budget: Budget, kind: str) -> Room:
    return Room(budget.name, budget.total - budget.reserve - budget.workspace, kind)


def _room_of(name: str, key: str, run: Run, own: Room, *, gpus: bool) -> Room:
    """The device of a setting, empty but for what runs there: encoders, which come before the model, or what draws previews."""
    if gpus and name != "cpu":  # the cards are not here, and which one does not matter while they are alike
        return own
    device = choose_device(name, key)
    if device.type == "cpu":
        # of another machine's memory nothing is known
        return Room("cpu", None if gpus else free_memory_bytes(device), "cpu")
    if device == run.devices[0]:
        return own
    (card,) = hardware.cards_here([device])
    return Room(f"{device}: {card.name}", card.total - card.reserve)


def _pixels(shape: Shape) -> int:
    frames, height, width = shape[0]
    return frames * height * width + sum(h * w for h, w in shape[1])
