"""The columns of a sheet, which are the base and saves of runs at strengths, and the transformers
that generate it: each is loaded once, and its adapter is exchanged between samples."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from ditkit_core.adapters.added_adapter import AddedAdapter, adapters_added, at_strength
from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.config.nearest import nearest_word
from ditkit_core.config.schema import config_values
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.engine.placement import Placement
from ditkit_core.errors import UserError
from ditkit_core.io.files import file_hash, local_path
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.loading.model import Model
from ditkit_core.loading.on_meta import loaded_dtype
from ditkit_core.loading.weights import engine_for, exchange_adapter
from ditkit_core.models.encoders import GenerationRequest
from ditkit_core.nn.lora import without_adapters
from ditkit_core.previews.generate import with_adapters
from ditkit_core.previews.stages import denoiser_stages
from ditkit_core.run.context import with_config
from ditkit_core.run.jobs import Jobs, TrainingJob, config_of
from ditkit_core.run.model import build_model, load_model
from ditkit_core.run.plans.planned_step import place_run
from ditkit_core.run.restore import load_trained
from ditkit_core.sampling.denoise import DenoiserStage
from ditkit_core.sampling.render import prompt_slug
from ditkit_core.training.checkpoint import INDEX, best
from ditkit_core.training.config import FlowConfig, HeldOutConfig

SAVE_WORDS = ("best", "latest")
"""Names of saves besides their steps: the lowest validation loss, and the newest."""


@dataclass(frozen=True, kw_only=True)
class SheetSave:
    """A save of the training of one transformer, or the adapter file that such a training would
    start from (`adapter.init`)."""

    job: TrainingJob
    step: int | None
    """Step of the save; None for the file."""

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        """JSON that differs for other weights to sample with."""
        if self.step is None:
            file = local_path(self.job.run.config.adapter.init)
            return {"file": SafetensorsSource.open(file).fingerprint()}
        config = config_values(self.job.run.config)
        deciding = ("adapter.", "ema.", "optim.name")
        return {
            "index": file_hash(self.job.folder.save(self.step) / INDEX),
            **{key: str(value) for key, value in config.items() if key.startswith(deciding)},
        }


@dataclass(frozen=True, kw_only=True)
class SheetColumn:
    """The weights that a column of a sheet is generated with."""

    name: str
    """`base`, `step 400` or `RUN step 400 (best)`."""
    saves: Mapping[str, SheetSave]
    """By component; the base where a component has none."""
    strength: float = 1.0

    @property
    def label(self) -> str:
        """The name, and the strength unless it is 1."""
        return self.name if self.strength == 1 else f"{self.name} @ {self.strength:g}"

    @property
    def stem(self) -> str:
        """The same as the first part of file names."""
        suffix = "" if self.strength == 1 else f"@{self.strength:g}"
        return f"{prompt_slug(self.name)}{suffix}"


def sheet_columns(
    runs: Sequence[Jobs], words: Sequence[str], strengths: Sequence[float]
) -> list[SheetColumn]:
    """The base, then each save of each run at each strength.

    Args:
        words: Steps of saves, or of `SAVE_WORDS`; two that name one save make one column.

    Raises:
        UserError: If a run has no such save.
    """
    names = [jobs.run.config.run_folder.name for jobs in runs]
    columns = [SheetColumn(name="base", saves={})]
    for jobs, name in zip(runs, names, strict=True):
        path = str(jobs.run.config.run_folder.path)
        prefix = "" if len(runs) == 1 else f"{name if names.count(name) == 1 else path} "
        steps = {tuple(step_called(job, word) for job in jobs): None for word in words}
        for of_jobs in steps:
            saves = {
                job.run.component: SheetSave(job=job, step=step)
                for job, step in zip(jobs, of_jobs, strict=True)
            }
            shown = " and ".join(map(str, dict.fromkeys(of_jobs)))
            lowest = [best(save.job.folder.state) for save in saves.values()]
            is_best = [save and save.step for save in lowest] == list(of_jobs)
            title = f"{prefix}step {shown}{' (best)' * is_best}"
            columns += [SheetColumn(name=title, saves=saves, strength=t) for t in strengths]
    return columns


def file_columns(
    jobs: Jobs, files: Mapping[str, Path], strengths: Sequence[float]
) -> list[SheetColumn]:
    """The base, then adapter files at each strength; `files` has a file by component."""
    run, saves = jobs.run, {}
    for component, path in files.items():
        config = run.config
        for expert in run.experts:
            if expert.part == component:
                config = replace(
                    config_of(run, expert), flow=FlowConfig(), held_out=HeldOutConfig()
                )
        alone = with_config(run, replace(config, adapter=AdapterConfig(init=str(path))))
        saves[component] = SheetSave(job=TrainingJob(run=alone), step=None)
    name = " and ".join(path.stem for path in files.values())
    columns = [SheetColumn(name=name, saves=saves, strength=strength) for strength in strengths]
    return [SheetColumn(name="base", saves={}), *columns]


def step_called(job: TrainingJob, word: str) -> int:
    """The step of a job's save by its number, or by a word of `SAVE_WORDS`."""
    folder = job.folder
    steps = sorted(int(path.name.removeprefix("step-")) for path in folder.state.glob("step-*"))
    there = ", ".join(map(str, steps)) or "no save; name a run that was trained"
    if word == "latest" and steps:
        return job.saved_step() or 0
    lowest = best(folder.state)
    if word == "best" and lowest is not None:
        return lowest.step
    if word.isascii() and word.isdigit() and int(word) in steps:
        return int(word)
    if word == "best":
        raise UserError(
            f"{folder.path} has no save with a validation loss; set held_out.clips when you train, "
            f"or name steps: it has {there}"
        )
    if word in SAVE_WORDS or not steps:
        raise UserError(f"{folder.path} has {there}")
    near = nearest_word(word, SAVE_WORDS)
    hint = f"did you mean {near}?" if near else "steps of the scheduler are --sample.steps"
    raise UserError(f"--steps: {folder.path} has no save {word}; it has {there}; {hint}")


def sheet_stages(
    jobs: Jobs,
    columns: Sequence[SheetColumn],
    column_of: Callable[[GenerationRequest], SheetColumn],
) -> list[DenoiserStage]:
    """The transformers of a run's model as stages, which generate each sample with the weights of
    its column. The base comes first: a full fine-tune replaces its weights. All adapters are
    matched with the model here, before anything slow."""
    run = jobs.run
    adapters, dtype_of = run.sample_adapters.opened(), loaded_dtype(run.spec, run.precision)
    transformer = partial(_SheetTransformer, columns, column_of, dtype_of)
    if not run.experts:
        return [transformer("transformer", adapters[0]).stage()]
    stages = []
    plain = with_adapters(run, denoiser_stages(run, {}))
    for expert, base, others in zip(run.experts, plain, adapters, strict=True):
        if any(expert.part in column.saves for column in columns):
            guidance = run.config.sample.guidance or expert.guidance
            stages.append(
                transformer(expert.part, others).stage(
                    guidance=guidance, min_sigma=expert.min_sigma
                )
            )
        else:
            stages.append(base)
    return stages


class _SheetTransformer:
    """A transformer that is open for a sheet, with the weights of the column that is generated."""

    def __init__(
        self,
        columns: Sequence[SheetColumn],
        column_of: Callable[[GenerationRequest], SheetColumn],
        dtype_of: Callable[[str], torch.dtype],
        component: str,
        adapters: Sequence[AddedAdapter],
    ):
        self._column_of, self._dtype_of = column_of, dtype_of
        self._component, self._adapters = component, adapters
        saves = [column.saves[component] for column in columns if component in column.saves]
        self._first = saves[0]
        jobs = {id(save.job): save.job for save in saves}
        self._built = {key: build_model(job.run) for key, job in jobs.items()}
        self._context = ExitStack()
        self._column: SheetColumn | None = None
        self._saved: SheetSave | None = None
        self._opened: tuple[Model, Placement] | None = None

    def stage(self, *, guidance: float = 0.0, min_sigma: float = 0.0) -> DenoiserStage:
        return DenoiserStage(
            opened=self.opened, before=self.before, guidance=guidance, min_sigma=min_sigma
        )

    @contextmanager
    def opened(self) -> Iterator[tuple[Any, BlockEngine]]:
        sampling = self._first.job.run
        unloaded = self._built[id(self._first.job)]
        placement = place_run(sampling, unloaded)
        model = load_model(unloaded, placement, sampling.config.train.seed)
        self._opened = model, placement
        try:
            yield model.module, engine_for(model, sampling.execution)
        finally:
            self._context.close()
            self._opened = self._column = self._saved = None
            del model, unloaded  # before the stage closes: another may come into this memory

    def before(self, job: GenerationRequest) -> None:
        """Exchange the weights if a sample is of another column."""
        column = self._column_of(job)
        if column is self._column:
            return
        assert self._opened is not None, "called within `opened`"
        model, placement = self._opened
        self._context.close()
        save = column.saves.get(self._component)
        if save is not None and save is not self._saved:
            other = self._built[id(save.job)]
            if save.job is not (self._saved or self._first).job and (
                other.origin.trained != model.origin.trained
            ):
                exchange_adapter(model, other, placement)
            if save.step is not None:
                load_trained(model, save.job.folder, save.step)
            self._saved = save
        module: Any = model.module
        module.eval()  # adapters that were just made are in training mode
        if self._adapters:
            self._context.enter_context(adapters_added(module, self._adapters, self._dtype_of))
        self._context.enter_context(
            without_adapters(module) if save is None else at_strength(module, column.strength)
        )
        self._column = column
