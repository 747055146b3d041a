"""Hours of a whole run on any GPU, and the recipes as runs: a step and the forwards of validation
and samples, measured on fake tensors."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image

from ditkit_core.config.resolve import resolve
from ditkit_core.io.files import local_path
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.gpus import GPU, weakest
from ditkit_core.planner.memory import DevicePlan, Partition, Profile, compose, on_host
from ditkit_core.planner.partition import partition_of
from ditkit_core.planner.planned_step import Size
from ditkit_core.planner.profiler import profile
from ditkit_core.planner.rank_layout import (
    PlannedLaunch,
    RankLayout,
    layout_of,
    parse_links,
)
from ditkit_core.planner.rank_step import RankStep, profile_of_rank, work_of_rank
from ditkit_core.planner.step_time import span_time, step_seconds
from ditkit_core.planner.targets import budgets_of
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run
from ditkit_core.run.jobs import Jobs
from ditkit_core.run.plans.plan import ALONE
from ditkit_core.run.plans.planned_step import PlannedStep
from ditkit_core.run.recipes import Recipe


@contextmanager
def run_of_recipe(
    spec: ModelSpec, recipe: Recipe, flags: Mapping[str, Any] | None = None
) -> Iterator[RunContext]:
    """A recipe as a run, with flags over it. Where it trains edits and its pairs are not there, it
    gets some of its size for the plan: references take memory and time."""
    config = resolve(RunConfig, file=recipe.path, flags=flags)
    if not config.data.references or local_path(config.data.references).exists():
        yield create_run(spec, config)
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
        yield create_run(spec, replace(config, data=pairs))


def launch_of(recipe: Recipe) -> PlannedLaunch:
    """The processes of a recipe, as a plan takes them."""
    return PlannedLaunch(nproc=recipe.processes * (recipe.processes > 1), link=recipe.link)


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run's step and forwards, measured on fake tensors: what memory and hours on any GPU follow
    from."""

    jobs: Jobs
    step: PlannedStep
    profile: Profile
    division: Partition
    one: Profile
    """Of a step with one sample of the largest training size, whose forward validation takes."""
    sample: Profile
    """Of a step with one sample of the size that is generated."""
    layout: RankLayout | None = None
    """The processes that train it; None for one. Costs and memory are then of one rank."""
    link: str = ""
    """Between them, as `--link` takes it."""

    @classmethod
    def of(cls, jobs: Jobs, launch: PlannedLaunch = ALONE) -> "PlannedRun":
        """Profile a run. It has one policy for all blocks, and names the split points if it has
        several devices; or several processes train it, with one GPU each and one kind of link."""
        step, spec = PlannedStep.of(jobs.largest), jobs.run.spec
        costs = profile(step.job)
        size = step.bucket.size
        alone = costs if len(step.job.batch) == 1 else _profile_of_one(step, size)
        sample, configured = (size, step.run.config.sample)
        if spec.data.frame_step or configured.height:
            sample = (
                configured.frames or size[0],
                configured.height or size[1],
                configured.width or size[2],
            )
        generated = alone if sample == size else _profile_of_one(step, sample)
        layout = layout_of(step.run.config.ranks, 1, launch) if launch.nproc else None
        if layout is not None:
            costs = profile_of_rank(costs, layout, step.job.precision.reduction)
        return cls(
            jobs=jobs,
            step=step,
            profile=costs,
            division=_division(step.run.config, costs),
            one=alone,
            sample=generated,
            layout=layout,
            link=launch.link,
        )

    def devices(self, gpus: tuple[GPU, ...]) -> tuple[DevicePlan, ...]:
        """Memory of the training step on these GPUs; of several processes, of one of them."""
        work = self.step.job.work
        if self.layout is not None:
            gpus = (weakest(gpus),)
            work = work_of_rank(work, self.layout, adapts=not self.profile.trains_all)
        return compose(self.profile, self.division, budgets_of(gpus), work)

    @property
    def host(self) -> int:
        """Bytes of page-locked host memory, for streamed weights."""
        return on_host(self.profile, self.division.streamed)

    def seconds(self, gpus: tuple[GPU, ...]) -> float:
        """Of a training step, with the exchanges of several processes."""
        if self.layout is not None:
            step = RankStep(
                layout=self.layout,
                profile=self.profile,
                division=self.division,
                work=self.step.job.work,
                gpu=weakest(gpus),
            )
            (time, *_) = step.plan(parse_links(self.link, self.layout)).times
            return time.step or 0.0
        return step_seconds(self.profile, self.division, gpus, self.step.job.work)

    def hours(self, gpus: tuple[GPU, ...]) -> float:
        """Of all steps, validation, previews and samples of all experts. Loading, encoding,
        decoding and saving come on top: minutes."""
        step, validated = self.seconds(gpus), self._forward(self.one, gpus)
        sampled = self._calls_of_samples() * self._forward(self.sample, gpus)
        every_steps = self.jobs.run.config.sample.every_steps
        total = sampled
        for job in self.jobs:
            config, held_out = job.run.config, job.run.config.held_out
            steps = config.train.steps
            measured = 1 + steps // (held_out.every_steps or config.save.every_steps)
            clips = self._of_a_process(held_out.clips)
            total += steps * step + measured * clips * len(held_out.sigmas) * validated
            total += steps // every_steps * sampled if every_steps else 0.0
        return total / 3600

    def _calls_of_samples(self) -> int:
        """Forwards of the samples at one step."""
        sample, spec = self.jobs.run.config.sample, self.jobs.run.spec
        authors = spec.auxiliary.sample_defaults(self.step.job.arch)
        twice = authors.guided_by == "negative" and (sample.guidance or authors.guidance) > 1
        return (
            self._of_a_process((len(sample.prompts) or sample.captions) * sample.images)
            * (sample.steps or authors.steps)
            * (1 + twice)
        )

    def _of_a_process(self, count: int) -> int:
        """The largest part that a process has of so many clips or samples."""
        return -(-count // (self.layout.size if self.layout else 1))

    def _forward(self, costs: Profile, gpus: tuple[GPU, ...]) -> float:
        """Seconds of one forward."""
        # samples and validation are never replayed
        work = replace(self.step.job.work, cuda_graphs="off")
        spans = zip(
            (weakest(gpus),) if self.layout else gpus, pairwise(self.division.bounds), strict=True
        )
        return sum(
            span_time(costs, gpu, start, end, self.division.streamed, work).forward / 1e9
            for gpu, (start, end) in spans
        )


def hours_in_words(hours: float) -> str:
    """Hours with one digit below ten."""
    return f"{hours:.{int(hours < 10)}f}"


def _profile_of_one(step: PlannedStep, size: Size) -> Profile:
    with torch.device("meta"):
        item = step.run.spec.training.empty_item(step.job.arch, size, step.bucket.references)
    alone = replace(step.job, batch=[item], micro_batches=1)
    return profile(alone.with_execution(checkpointing="none"))


def _division(config: RunConfig, costs: Profile) -> Partition:
    """The device of each block and the streamed ones, as a plan has them."""
    split_points = config.train.split_points
    swap_blocks = config.train.swap_blocks or (0,) * (1 + len(split_points))
    has_weights = [block.weights + block.adapters > 0 for block in costs.blocks]
    return partition_of(has_weights, split_points, swap_blocks)
