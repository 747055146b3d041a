"""What a run trains: a list of jobs, one for each transformer. Two experts are two jobs, trained
one after the other.

Everything that a run does is done for each of its jobs, so nothing else needs to know of experts.
They share no trained weight: the result is bitwise identical to training each of them in a run of
its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ditkit_core.config.nearest import path_remedy
from ditkit_core.config.resume import ConfigChange
from ditkit_core.errors import UserError
from ditkit_core.io.console import warn
from ditkit_core.io.files import local_path
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.spec import Expert
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, with_config
from ditkit_core.run.experts import own_settings
from ditkit_core.training.checkpoint import latest


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """The training of one transformer."""

    run: RunContext
    """Its configuration: of an expert with that one's settings, noise levels and folder."""
    init_from: str = ""
    """Folder of another run, whose trained weights initialize this one; empty for none."""

    @property
    def name(self) -> str:
        """The expert's name; empty if the model has one transformer."""
        return "" if self.run.expert is None else self.run.expert.name

    @property
    def folder(self) -> RunFolder:
        """The folder of its saves, metrics and exports."""
        return self.run.config.run_folder

    @property
    def settings(self) -> RunConfig:
        """Its configuration as its folder stores it: as the user wrote it, without the values that
        the model decides."""
        return self.run.request.config

    def changes(self) -> list[ConfigChange]:
        """The stated changes of its settings since its last save."""
        return self.folder.check(self.settings)

    @property
    def completed_step(self) -> int | None:
        """Number of optimizer steps if the job is complete, else None."""
        step = self.folder.completed_step()
        return step if step is not None and step >= self.run.config.train.steps else None

    def saved_step(self, passed_over: Callable[[str], None] = warn) -> int | None:
        """The step of the latest save, after checking all its files; None without a save.
        `passed_over` gets a line for each damaged one."""
        save = latest(self.folder.state, passed_over)
        return None if save is None else int(save.name.removeprefix("step-"))


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """The jobs of a run, in the order in which they are trained."""

    run: RunContext
    """The run of all of them, which generates the samples; the run of the job, if there is one
    job."""
    all: tuple[TrainingJob, ...]

    def __iter__(self) -> Iterator[TrainingJob]:
        return iter(self.all)

    @property
    def settings(self) -> RunConfig:
        """The configuration as the run's folder stores it."""
        return self.run.request.config

    @property
    def in_folders(self) -> tuple[TrainingJob, ...]:
        """The jobs that have folders of their own inside the run's folder, which collects their
        results; none if the run is its only job."""
        return self.all if self.run.trains_several else ()

    def named(self, name: str) -> TrainingJob | None:
        """The job of an expert, or of the only transformer, whose name is empty; None if the run
        trains no such expert."""
        return next((job for job in self if job.name == name), None)

    @cached_property
    def largest(self) -> RunContext:
        """The run of the job that needs most memory, since one is in memory at a time. It generates
        the samples of the whole run."""
        # Experts have equal shapes, so only the adapter's rank and the format of the base make a
        # difference.
        job = max(self, key=lambda job: (job.run.config.adapter.rank, job.run.stored_as == "none"))
        if job.run is self.run:
            return self.run
        return with_config(job.run, replace(job.settings, sample=self.run.request.config.sample))

    def notes(self) -> Iterator[str]:
        """Lines about experts for a plan."""
        if self.run.trains_several:
            names = ", ".join(expert.name for expert in self.run.experts)
            planned = self.largest.expert
            assert planned is not None
            yield f"experts {names} are trained one after the other, with one in memory at a time: this plan is for {planned.name}"


def jobs_of(run: RunContext, init_from: str = "") -> Jobs:
    """The jobs of a run, which may start from the trained weights of another."""
    if not run.trains_several:
        alone = run if run.expert is None else with_config(run, config_of(run, run.expert))
        return Jobs(run=alone, all=(TrainingJob(run=alone, init_from=init_from),))
    runs = [with_config(run, config_of(run, expert)) for expert in run.experts]
    starts = [_start_of_expert(init_from, expert) for expert in run.experts]
    return Jobs(
        run=run,
        all=tuple(TrainingJob(run=r, init_from=s) for r, s in zip(runs, starts, strict=True)),
    )


def config_of(run: RunContext, expert: Expert) -> RunConfig:
    """The configuration that trains one expert of a run, as its folder stores it.

    In a run of several, each has a folder named after it, all share one cache, and none generates
    samples by itself.
    """
    config = own_settings(run.request.config, run.experts, expert)
    if not run.trains_several:
        return config
    prior = config.prior
    # By default class images are in the run's folder; without this each expert would generate its
    # own.
    if prior.class_prompt and not prior.folder:
        prior = replace(prior, folder=str(run.data.prior_folder))
    return replace(
        config,
        run=replace(config.run, folder=str(config.run_folder.path / expert.name)),
        encode=replace(config.encode, cache=str(run.data.cache.folder)),
        prior=prior,
        # sampling needs all experts, so the run of all of them generates samples
        sample=replace(config.sample, prompts=(), captions=0, every_steps=0, device=""),
    )


def _start_of_expert(init_from: str, expert: Expert) -> str:
    """The folder that one expert's run starts from, if `--init-from` names a run of all experts."""
    if not init_from:
        return ""
    source = RunFolder(local_path(init_from))
    inside = RunFolder(source.path / expert.name)
    if inside.has_save:
        return str(inside.path)
    if not source.path.is_dir():
        raise UserError(f"--init-from {init_from} does not exist; {path_remedy(init_from)}")
    if source.has_save:
        raise UserError(
            f"--init-from {init_from} is a run of one transformer, and this run trains both "
            f"experts; name the folder of a run of both, or train "
            f"the one expert that it trained: --experts.train NAME --init-from {init_from}"
        )
    raise UserError(
        f"--init-from {init_from} has no save of the {expert.name} expert (none in "
        f"{inside.state}), and this run trains both experts; name the "
        "folder of a run of both, or train one with --experts.train NAME --init-from ITS_RUN"
    )
