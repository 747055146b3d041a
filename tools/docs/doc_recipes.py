"""Memory and hours of each recipe, planned: the table of docs/recipes/README.md. No GPU, no weights and no data."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image

from ditkit_core.config.resolve import resolve
from ditkit_core.config.sizes import GIB
from ditkit_core.io.console import doing
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.gpus import GPU, parse_gpus
from ditkit_core.planner.memory import DevicePlan, Partition, Profile, compose, on_host
from ditkit_core.planner.partition import budgets_of, streamed_of
from ditkit_core.planner.planned_step import Size
from ditkit_core.planner.profiler import profile
from ditkit_core.planner.step_time import span_time, step_seconds
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run
from ditkit_core.run.jobs import jobs_of
from ditkit_core.run.plans.planned_step import PlannedStep
from ditkit_flux2.spec import FLUX2
from ditkit_wan.spec import WAN
from ditkit_zimage.spec import ZIMAGE

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
COLUMNS = {"3060": "rtx3060", "4060 Ti": "rtx4060ti-16", "3090": "rtx3090", "4090": "rtx4090", "5090": "rtx5090"}
"""The GPUs whose hours the table has, by the head of their column; the 4060 Ti is that of 16 GB."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run file of docs/recipes with its promise."""

    spec: ModelSpec
    file: str
    """Its name without the ending."""
    goal: str
    """What a person wants, as the page's index has it."""
    model: str
    gpus: str
    """The GPUs that it promises to fit, as `--gpus` takes them."""
    host: str = ""
    """Memory of the host that it promises to fit, as `--host` takes it; empty where hardly any is used."""
    hours: int
    """Promised: the whole run takes at most this long on the slowest known GPUs of these sizes."""
    section: str
    """The heading of the page that is about it."""

    @property
    def path(self) -> Path:
        """The run file."""
        return RECIPES / f"{self.file}.toml"

    def gpus_of(self, column: str) -> tuple[GPU, ...] | None:
        """The GPUs of a column of the table: its own first, then the others that the recipe names. None if it has less memory than promised."""
        (gpu,) = parse_gpus(COLUMNS[column])
        first, *others = parse_gpus(self.gpus)
        return (gpu, *others) if gpu.total >= first.total else None

    @contextmanager
    def run(self, **flags: object) -> Iterator[RunContext]:
        """The recipe as a run, with flags added. Where it trains edits, it gets pairs of images of its size: references take memory and time."""
        config = resolve(
            RunConfig, file=self.path, flags={key.replace("__", "."): value for key, value in flags.items()}
        )
        if not config.data.references:
            yield create_run(self.spec, config)
            return
        with TemporaryDirectory() as folder:
            root = Path(folder)
            image = Image.new("RGB", (config.data.width, config.data.height))
            for index in range(config.held_out.clips + 4):
                for part in ("before", "after"):
                    (root / part).mkdir(exist_ok=True)
                    image.save(root / part / f"{index}.png")
                (root / "after" / f"{index}.txt").write_text(f"edit number {index}", encoding="utf-8")
            pairs = replace(config.data, folder=str(root / "after"), references=str(root / "before"))
            yield create_run(self.spec, replace(config, data=pairs))


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A recipe's step and forwards, measured on fake tensors: what memory and hours on any GPU follow from."""

    run: RunContext
    step: PlannedStep
    profile: Profile
    division: Partition
    one: Profile
    """Of a step with one sample of the largest training size, whose forward validation takes."""
    sample: Profile
    """Of a step with one sample of the size that is generated."""

    @classmethod
    def of(cls, run: RunContext) -> "PlannedRun":
        """Profile a run. It has one policy for all blocks, and names the split points if it has several devices."""
        step = PlannedStep.of(jobs_of(run).largest)
        made = profile(step.job)
        size = step.bucket.size
        alone = made if len(step.job.batch) == 1 else _profile_of_one(step, size)
        sample, configured = (size, step.run.config.sample)
        if run.spec.data.frame_step or configured.height:
            sample = (configured.frames or size[0], configured.height or size[1], configured.width or size[2])
        generated = alone if sample == size else _profile_of_one(step, sample)
        return cls(
            run=run, step=step, profile=made, division=_division(step.run.config, made), one=alone, sample=generated
        )

    def devices(self, gpus: tuple[GPU, ...]) -> tuple[DevicePlan, ...]:
        """Memory of the training step on these GPUs."""
        return compose(self.profile, self.division, budgets_of(gpus), self.step.job.work)

    @property
    def host(self) -> int:
        """Bytes of page-locked host memory, for streamed weights."""
        return on_host(self.profile, self.division.streamed)

    def seconds(self, gpus: tuple[GPU, ...]) -> float:
        """Of a training step."""
        return step_seconds(self.profile, self.division, gpus, self.step.job.work)

    def hours(self, gpus: tuple[GPU, ...]) -> float:
        """Of all steps, validation, previews and samples of all experts. Loading, encoding, decoding and saving come on top: minutes."""
        step, validated = self.seconds(gpus), self._forward(self.one, gpus)
        sampled, every_steps = (
            self._calls_of_samples() * self._forward(self.sample, gpus),
            self.run.config.sample.every_steps,
        )
        total = sampled
        for job in jobs_of(self.run):
            config, held_out = job.run.config, job.run.config.held_out
            steps = config.train.steps
            measured = 1 + steps // (held_out.every_steps or config.save.every_steps)
            total += steps * step + measured * held_out.clips * len(held_out.sigmas) * validated
            total += steps // every_steps * sampled if every_steps else 0.0
        return total / 3600

    def _calls_of_samples(self) -> int:
        """Forwards of the samples at one step."""
        sample, spec = self.run.config.sample, self.run.spec
        authors = spec.auxiliary.sample_defaults(self.step.job.arch)
        twice = authors.guided_by == "negative" and (sample.guidance or authors.guidance) > 1
        return (len(sample.prompts) or sample.captions) * sample.images * (sample.steps or authors.steps) * (1 + twice)

    def _forward(self, costs: Profile, gpus: tuple[GPU, ...]) -> float:
        """Seconds of one forward."""
        work = replace(self.step.job.work, cuda_graphs="off")  # samples and validation are never replayed
        spans = zip(gpus, pairwise(self.division.bounds), strict=True)
        return sum(
            span_time(costs, gpu, start, end, self.division.streamed, work).forward / 1e9 for gpu, (start, end) in spans
        )


def _profile_of_one(step: PlannedStep, size: Size) -> Profile:
    with torch.device("meta"):
        item = step.run.spec.training.empty_item(step.job.arch, size, step.bucket.references)
    alone = replace(step.job, batch=[item], micro_batches=1)
    return profile(alone.with_execution(checkpointing="none"))


def _division(config: RunConfig, made: Profile) -> Partition:
    """The device of each block and the streamed ones, as a plan has them."""
    count = len(made.blocks)
    bounds = [0, *config.train.split_points, count]
    swap = config.train.swap_blocks or (0,) * (len(bounds) - 1)
    has_weights = [block.weights + block.adapters > 0 for block in made.blocks]
    devices: list[int] = []
    streamed: set[int] = set()
    for device, (start, end) in enumerate(pairwise(bounds)):
        devices += [device] * (end - start)
        streamed |= streamed_of(has_weights, start, end, swap[device])
    return Partition(devices=tuple(devices), streamed=frozenset(streamed))


_KLEIN_4B, _KLEIN_9B, _DEV = "FLUX.2 klein 4B", "FLUX.2 klein 9B", "FLUX.2 dev"
_WAN_1, _WAN_5, _WAN_14, _WAN_22 = "Wan 2.1 1.3B", "Wan 2.2 TI2V-5B", "Wan 2.1 14B", "Wan 2.2 A14B"
_CHARACTER, _STYLE, _EDIT, _MOTION, _LONG = "a character", "a style", "an edit", "a motion", "clips of three seconds"
_ZIMAGE = "Z-Image"
_STARTED, _ALL = "a start image that moves", "all weights trained"
ALL = (
    Recipe(spec=FLUX2, file="klein_4b_character_8gb", goal=_CHARACTER, model=_KLEIN_4B, gpus="8GiB", host="16GiB", hours=6, section="Character: FLUX.2 klein"),
    Recipe(spec=FLUX2, file="klein_9b_8gb", goal=_CHARACTER, model=_KLEIN_9B, gpus="8GiB", host="16GiB", hours=7, section="Character: FLUX.2 klein"),
    Recipe(spec=WAN, file="wan_a14b_character_8gb", goal=_CHARACTER, model=_WAN_22, gpus="8GiB", host="48GiB", hours=8, section="Character from photographs: Wan 2.2 A14B"),
    Recipe(spec=ZIMAGE, file="zimage_character_8gb", goal=_CHARACTER, model=_ZIMAGE, gpus="8GiB", host="16GiB", hours=7, section="Character: Z-Image"),
    Recipe(spec=ZIMAGE, file="zimage_character_12gb", goal=_CHARACTER, model=_ZIMAGE, gpus="12GiB", host="16GiB", hours=10, section="Character: Z-Image"),
    Recipe(spec=ZIMAGE, file="zimage_character_16gb", goal=_CHARACTER, model=_ZIMAGE, gpus="16GiB", host="16GiB", hours=7, section="Character: Z-Image"),
    Recipe(spec=ZIMAGE, file="zimage_character_24gb", goal=_CHARACTER, model=_ZIMAGE, gpus="24GiB", hours=5, section="Character: Z-Image"),
    Recipe(spec=FLUX2, file="klein_9b_character_24gb", goal=_CHARACTER, model=_KLEIN_9B, gpus="24GiB", hours=5, section="Character: FLUX.2 klein"),
    Recipe(spec=WAN, file="wan_a14b_character_24gb", goal=_CHARACTER, model=_WAN_22, gpus="24GiB", host="32GiB", hours=8, section="Character from photographs: Wan 2.2 A14B"),
    Recipe(spec=FLUX2, file="dev_24gb", goal=_CHARACTER, model=_DEV, gpus="24GiB", host="48GiB", hours=14, section="Character or style: FLUX.2 dev"),
    Recipe(spec=FLUX2, file="klein_4b_style_8gb", goal=_STYLE, model=_KLEIN_4B, gpus="8GiB", host="16GiB", hours=5, section="Style: FLUX.2 klein"),
    Recipe(spec=FLUX2, file="klein_9b_style_24gb", goal=_STYLE, model=_KLEIN_9B, gpus="24GiB", hours=4, section="Style: FLUX.2 klein"),
    Recipe(spec=FLUX2, file="klein_4b_edit_12gb", goal=_EDIT, model=_KLEIN_4B, gpus="12GiB", hours=5, section="Edit: FLUX.2 klein"),
    Recipe(spec=FLUX2, file="klein_9b_edit_24gb", goal=_EDIT, model=_KLEIN_9B, gpus="24GiB", hours=4, section="Edit: FLUX.2 klein"),
    Recipe(spec=WAN, file="wan_1.3b_motion_8gb", goal=_MOTION, model=_WAN_1, gpus="8GiB", hours=8, section="Motion: Wan 1.3B"),
    Recipe(spec=WAN, file="wan_1.3b_motion_16gb", goal=_MOTION, model=_WAN_1, gpus="16GiB", hours=18, section="Motion: Wan 1.3B"),
    Recipe(spec=WAN, file="wan_a14b_motion_24gb", goal=_MOTION, model=_WAN_22, gpus="24GiB", host="48GiB", hours=10, section="Motion: Wan 2.2 A14B"),
    Recipe(spec=WAN, file="wan_a14b_24gb", goal=_LONG, model=_WAN_22, gpus="24GiB", host="64GiB", hours=90, section="Three seconds at 480 × 832: Wan 14B"),
    Recipe(spec=WAN, file="wan_14b_24gb_16gb", goal=_LONG, model=_WAN_14, gpus="24GiB,16GiB", host="64GiB", hours=56, section="Three seconds at 480 × 832: Wan 14B"),
    Recipe(spec=WAN, file="wan_ti2v_5b_24gb", goal=_STARTED, model=_WAN_5, gpus="24GiB", hours=10, section="Text or start image: TI2V-5B"),
    Recipe(spec=WAN, file="wan_1.3b_full_12gb", goal=_ALL, model=_WAN_1, gpus="12GiB", host="32GiB", hours=50, section="All weights: Wan"),
    Recipe(spec=FLUX2, file="klein_4b_full_12gb", goal=_ALL, model=_KLEIN_4B, gpus="12GiB", hours=15, section="All weights: FLUX.2"),
    Recipe(spec=WAN, file="wan_1.3b_full_16gb", goal=_ALL, model=_WAN_1, gpus="16GiB", hours=31, section="All weights: Wan"),
    Recipe(spec=FLUX2, file="klein_4b_full_24gb", goal=_ALL, model=_KLEIN_4B, gpus="24GiB", hours=6, section="All weights: FLUX.2"),
    Recipe(spec=FLUX2, file="klein_9b_full_24gb", goal=_ALL, model=_KLEIN_9B, gpus="24GiB", host="64GiB", hours=13, section="All weights: FLUX.2"),
    Recipe(spec=WAN, file="wan_14b_full_24gb", goal=_ALL, model=_WAN_14, gpus="24GiB", host="64GiB", hours=32, section="All weights: Wan"),
    Recipe(spec=FLUX2, file="dev_full_24gb", goal=_ALL, model=_DEV, gpus="24GiB", host="96GiB", hours=20, section="All weights: FLUX.2"),
)  # fmt: skip
"""By goal, then by the GPU's memory, in the page's order."""


def recipes() -> Iterator[str]:
    """The table, line by line."""
    yield f"| I want | of | I have | run file | GPU, GiB | host, GiB | {' | '.join(COLUMNS)} |"
    yield "|---|---|---|---|" + "---:|" * (2 + len(COLUMNS))
    yield from map(row, ALL)


def row(recipe: Recipe) -> str:
    """A recipe's line: peaks of each GPU and of the host, and hours by column."""
    doing(f"planning {recipe.file}")
    with recipe.run() as run:
        planned = PlannedRun.of(run)
    devices = planned.devices(parse_gpus(recipe.gpus))
    host = planned.host + sum(device.host for device in devices)
    cells = [
        f"[{recipe.goal}](#{anchor(recipe.section)})",
        recipe.model,
        sold(recipe),
        f"[`{recipe.file}`]({recipe.file}.toml)",
        " + ".join(f"{device.peak / GIB:.1f}" for device in devices),
        f"{host / GIB:.1f}" if host else "",
        *(_hours(planned, recipe.gpus_of(column)) for column in COLUMNS),
    ]
    return f"| {' | '.join(cells)} |"


def _hours(planned: PlannedRun, gpus: tuple[GPU, ...] | None) -> str:
    if gpus is None or not all(device.fits for device in planned.devices(gpus)):
        return "–"
    hours = planned.hours(gpus)
    return f"{hours:.{int(hours < 10)}f}"


def sold(recipe: Recipe) -> str:
    """The machine that a recipe is for, in a few words."""
    gpus = recipe.gpus.replace("GiB", " GB").replace(",", " + ")
    return f"{gpus}, {recipe.host.replace('GiB', ' GB')} host" if recipe.host else gpus


def anchor(heading: str) -> str:
    """The link to a heading of a page."""
    return re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-")
