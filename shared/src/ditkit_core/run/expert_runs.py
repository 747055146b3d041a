"""The runs of single experts that make up a run of several."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ditkit_core.io.console import warn
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.loading.architecture import arch_here
from ditkit_core.models.spec import Expert
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, with_arch, with_config
from ditkit_core.run.experts import own_settings
from ditkit_core.run.init_from import start_of_expert
from ditkit_core.training.checkpoint import latest


def resolve_arch(run: RunContext) -> RunContext:
    """The run with its architecture known: its description is downloaded if necessary, weights never are."""
    model = run.config.model
    if run.arch is not None or not (model.base or model.transformer or model.transformer_2):
        return run
    return with_arch(run, arch_here(run.spec, model, fetch=True)[1])


def is_joint(run: RunContext) -> bool:
    """Whether a run trains several experts, each in a folder of its own."""
    return bool(run.experts) and run.expert is None


def runs_of(run: RunContext) -> list[RunContext]:
    """One run for each transformer that is trained: the run itself, or one for each expert."""
    if not run.experts:
        return [run]
    return [with_config(run, config_of(run, expert)) for expert in run.experts if run.expert in (None, expert)]


def config_of(run: RunContext, expert: Expert) -> RunConfig:
    """The configuration that trains one expert of a run, as its folder stores it.

    In a run of several, each has a folder named after it, all share one cache, and none generates samples by itself.
    """
    config = own_settings(run.request.config, run.experts, expert)
    if not is_joint(run):
        return config
    prior = config.prior
    # By default class images are in the run's folder; without this each expert would generate its own.
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


def largest_expert_run(run: RunContext) -> RunContext:
    """The run of the expert that needs most memory to train, since one is in memory at a time. It generates the samples of the whole run."""
    # Experts have equal shapes, so only the adapter's rank and the format of the base make a difference.
    largest = max(
        runs_of(run), key=lambda component_run: (component_run.config.adapter.rank, component_run.stored_as == "none")
    )
    if largest is run:
        return run
    return with_config(largest, replace(largest.request.config, sample=run.request.config.sample))


def notes_on(run: RunContext) -> Iterator[str]:
    """Lines about experts for a plan."""
    if is_joint(run):
        names = ", ".join(expert.name for expert in run.experts)
        planned = largest_expert_run(run).expert
        assert planned is not None
        yield f"experts {names} are trained one after the other, with one in memory at a time: this plan is for {planned.name}"


def saved_step(run: RunContext, passed_over: Callable[[str], None] = warn) -> int | None:
    """The step of the latest save of a run that trains one transformer, after checking all its files; None without a save.

    Args:
        passed_over: Called with one line for each save that is damaged.

    Raises:
        UserError: If there are saves, and none can be used.
    """
    save = latest(run.config.run_folder.state, passed_over)
    return None if save is None else int(save.name.removeprefix("step-"))


def folder_of(run: RunContext, expert: Expert | None) -> RunFolder:
    """The folder that an expert is trained in; for a model with one transformer the run's folder."""
    return run.config.run_folder if expert is None else config_of(run, expert).run_folder


@dataclass(frozen=True)
class Component:
    """A run of one transformer."""

    run: RunContext
    init_from: str
    """Another run whose trained weights initialize this one; empty for none."""

    @property
    def completed_step(self) -> int | None:
        """Number of optimizer steps if the component is complete, else None."""
        done = self.run.config.run_folder.completed_step()
        return done if done is not None and done >= self.run.config.train.steps else None


@dataclass(frozen=True)
class ComponentRuns:
    """The run that was asked for, with its components."""

    run: RunContext
    """The run of all components; if there is only one, the run of that one."""
    components: list[Component]

    @property
    def experts(self) -> list[RunContext]:
        """The component runs whose results are collected in the run's folder; none if the only component is the run itself."""
        return [component.run for component in self.components] if is_joint(self.run) else []


def components_of(run: RunContext, init_from: str) -> ComponentRuns:
    """The component runs of a run, each with the run that initializes it."""
    if not is_joint(run):
        alone, *_ = runs_of(run)
        return ComponentRuns(alone, [Component(alone, init_from)])
    starts = [(component_run, component_run.expert) for component_run in runs_of(run)]
    return ComponentRuns(
        run,
        [Component(component_run, start_of_expert(init_from, expert)) for component_run, expert in starts if expert],
    )
