"""The transformers that draw with what a run trained: of a model with several experts each is loaded when its turn comes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ditkit_core.adapters.inject import AdapterConfig, trainable_parameters
from ditkit_core.adapters.read import MixedAdapter
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.io.console import say
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.spec import Expert
from ditkit_core.nn.parameters import copy_values
from ditkit_core.planner.partition import place
from ditkit_core.previews.generate import generate_samples
from ditkit_core.previews.queue import read_weights
from ditkit_core.run.context import RunContext, with_config
from ditkit_core.run.encoding import sample_prompts
from ditkit_core.run.expert_runs import config_of, is_joint, runs_of, saved_step
from ditkit_core.run.model import build_model, engine_of, load_model
from ditkit_core.run.prepare import LoadedModel, MetaModel
from ditkit_core.run.restore import load_trained
from ditkit_core.sampling.denoise import DenoiserStage
from ditkit_core.training.flow_matching import FlowConfig
from ditkit_core.training.validation import HeldOutConfig


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """Where the trained weights of an expert come from; neither is its base alone."""

    folder: Path | None = None
    """A run's folder, whose save is taken."""
    step: int | None = None
    """Which save, if it is still there; None for the latest."""
    file: str = ""
    """An adapter file."""
    preview: Path | None = None
    """The weights of a preview that waits to be drawn."""


def denoiser_stages(run: RunContext, trained: Mapping[str, ExpertWeights]) -> list[DenoiserStage]:
    """All experts of a run's model, each loaded when its turn to take steps comes.

    Args:
        run: The run.
        trained: By name of the expert what was trained of it; the others draw as they are.
    """
    chosen = run.config.sample.guidance
    return [_turn(run, expert, trained.get(expert.name, ExpertWeights()), chosen) for expert in run.experts]


def _turn(run: RunContext, expert: Expert, trained: ExpertWeights, guidance: float) -> DenoiserStage:
    alone = _for_drawing(run, expert, trained)

    @contextmanager
    def opened() -> Iterator[tuple[Any, BlockEngine]]:
        drawing, unloaded = build_with_adapter(alone, trained.file) if trained.file else (alone, build_model(alone))
        prepared = load_model(drawing, unloaded, place(drawing, unloaded))
        what = "as it is"
        if trained.folder is not None:
            folder = RunFolder(trained.folder)
            kept = trained.step is not None and folder.save(trained.step).is_dir()
            what = f"at step {load_trained(prepared, folder, trained.step if kept else None)}"
        elif trained.preview is not None:
            load_preview_weights(prepared, trained.preview)
            what = f"with the weights of {trained.preview.name}"
        elif trained.file:
            what = f"with {trained.file}"
        say(f"drawing with the {expert.name} expert {what}")
        yield prepared.model, engine_of(drawing, prepared)

    return DenoiserStage(opened=opened, guidance=guidance or expert.guidance, min_sigma=expert.min_sigma)


def build_with_adapter(run: RunContext, file: str) -> tuple[RunContext, MetaModel]:
    """A run that draws with an adapter file, and its model before weights are read.

    What the run would train does not matter: rank, scale and layers are the file's. If its modules differ in rank or scale it is merged.

    Raises:
        UserError: If the file is not there, is no adapter, or does not fit the model.
    """
    config = run.config
    drawing = with_config(run, replace(config, adapter=AdapterConfig(init=file)))
    try:
        return drawing, build_model(drawing)
    except MixedAdapter:
        merge = (*config.base.merge, f"{file}@1")  # else an @ in its name would be a strength
        drawing = with_config(run, replace(config, adapter=AdapterConfig(), base=replace(config.base, merge=merge)))
        return drawing, build_model(drawing)


def _for_drawing(run: RunContext, expert: Expert, trained: ExpertWeights) -> RunContext:
    # Which levels are trained and measured is no matter of drawing, and those of one expert may leave nothing to the other.
    config = replace(config_of(run, expert), flow=FlowConfig(), held_out=HeldOutConfig())
    if trained.folder is None and trained.preview is None:  # an adapter at zero, or a file's own
        config = replace(config, adapter=replace(config.adapter, method="lora", init=""))
    if not is_joint(run) and run.expert != expert:  # what is merged is the trained expert's
        config = replace(config, base=replace(config.base, merge=()))
    return with_config(run, config)


def trained_weights_in(run: RunContext, *, without: Expert | None = None) -> tuple[dict[str, ExpertWeights], int]:
    """What a run has saved of its experts, by name, and the step of the latest save.

    Args:
        run: The run.
        without: An expert that is not looked at.

    Raises:
        UserError: If there are saves of an expert, and none can be used.
    """
    trained: dict[str, ExpertWeights] = {}
    newest = 0
    for each in runs_of(run):
        if each.expert in (None, without) or (step := saved_step(each)) is None:
            continue
        trained[each.expert.name] = ExpertWeights(folder=Path(each.config.run.folder), step=step)
        newest = max(newest, step)
    return trained, newest


def load_preview_weights(prepared: LoadedModel, path: Path) -> None:
    """Put the weights of a preview that waits to be drawn into the model.

    Raises:
        UserError: If the file is damaged, or of another model or adapter.
    """
    weights = read_weights(path)
    with prepared.readable():
        parameters = trainable_parameters(prepared.model)
        if {name: value.shape for name, value in weights.items()} != {n: p.shape for n, p in parameters.items()}:
            raise UserError(f"{path} holds the weights of another model or adapter; remove it")
        copy_values(parameters, weights)
    if prepared.streamer is not None:
        prepared.streamer.host_changed()


def generate_trained(run: RunContext, folder: RunFolder, step: int) -> None:
    """Draw what a finished run is to draw, with all experts as they are trained, one loaded at a time."""
    scenes = sample_prompts(run, run.data.dataset.samples)
    if not scenes:
        return
    if lacking := why_no_samples(run):
        say(f"no samples: {lacking}")
    else:
        generate_samples(
            run, denoiser_stages(run, trained_weights_in(run)[0]), scenes, folder.samples, f"step-{step:06d}"
        )


def why_no_samples(run: RunContext) -> str:
    """Why a run of one expert cannot draw: another is not there; empty if all are, here or on the hub."""
    model = run.config.model
    for expert in run.experts:
        try:
            found = model.here(expert.part) or model.fetched_description(expert.part)
        except UserError as error:
            return str(error)
        if found is None:
            return f"drawing takes all experts, and model.{expert.part} ({expert.name}) is not there"
    return ""
