"""The transformers that sample with a run's trained weights; an expert is loaded when its denoising
steps begin."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.files.entry import parse_merge
from ditkit_core.adapters.files.start import MixedAdapter
from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.distributed.torchrun import current_ranks
from ditkit_core.errors import UserError
from ditkit_core.io.console import say
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.loading.model import Model
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.protocol import Engine
from ditkit_core.models.spec import Expert
from ditkit_core.nn.parameters import copy_values
from ditkit_core.previews.generate import generate_samples
from ditkit_core.previews.queue import read_weights
from ditkit_core.run.context import RunContext, with_config
from ditkit_core.run.encoding import sample_prompts
from ditkit_core.run.jobs import Jobs, config_of
from ditkit_core.run.model import build_model, load_to_sample
from ditkit_core.run.restore import load_trained
from ditkit_core.sampling.denoise import DenoiserStage
from ditkit_core.sampling.shares import SampleShares
from ditkit_core.training.config import FlowConfig, HeldOutConfig


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """Source of the trained weights of an expert; without any it samples with its base weights."""

    folder: Path | None = None
    """A run's folder, whose save is loaded."""
    step: int | None = None
    """Step of the save, if it still exists; None, or a save that is gone, means the latest."""
    file: str = ""
    """An adapter file."""
    preview: Path | None = None
    """A queued preview, whose weights are loaded."""


def denoiser_stages(run: RunContext, trained: Mapping[str, ExpertWeights]) -> list[DenoiserStage]:
    """All experts of a run's model as stages; each is loaded when its denoising steps begin.

    Ranks that divide the weights load and run each of them together. So they need samples that take
    equally many steps of each: no family with experts has noise levels that depend on the size of a
    sample.

    Args:
        trained: Maps the name of an expert to its trained weights; experts that are missing use
            their base weights.
    """
    chosen = run.config.sample.guidance
    return [
        _stage(run, expert, trained.get(expert.name, ExpertWeights()), chosen)
        for expert in run.experts
    ]


def _stage(
    run: RunContext, expert: Expert, trained: ExpertWeights, guidance: float
) -> DenoiserStage:
    # Defaults for the noise levels of training and validation: sampling does not use them, and
    # those set for one expert may leave no level to the other, which its checks would refuse.
    config = replace(config_of(run, expert), flow=FlowConfig(), held_out=HeldOutConfig())
    # the adapter is zero, or comes from a file
    if trained.folder is None and trained.preview is None:
        method = "lora" if config.adapter.method == "full" else config.adapter.method
        config = replace(config, adapter=replace(config.adapter, method=method, init=""))
    alone = with_config(run, config)

    @contextmanager
    def opened() -> Iterator[tuple[Any, Engine]]:
        sampling, unloaded = build_with_adapter(alone, trained.file)
        prepared = load_to_sample(sampling, unloaded, current_ranks())
        origin = "with its base weights"
        if trained.folder is not None:
            folder = RunFolder(trained.folder)
            # A preview may be generated long after it was queued, when the other expert's save has
            # been replaced.
            has_save = trained.step is not None and folder.save(trained.step).is_dir()
            origin = f"at step {load_trained(prepared, folder, trained.step if has_save else None)}"
        elif trained.preview is not None:
            load_preview_weights(prepared, trained.preview)
            origin = f"with the weights of {trained.preview.name}"
        elif trained.file:
            origin = f"with {trained.file}"
        say(f"sampling with the {expert.name} expert {origin}")
        yield prepared.module, prepared.engine

    return DenoiserStage(
        opened=opened, guidance=guidance or expert.guidance, min_sigma=expert.min_sigma
    )


def build_with_adapter(run: RunContext, file: str) -> tuple[RunContext, Model]:
    """A run that samples with an adapter, and its model on `meta`.

    The run's own [adapter] section is ignored: rank, scale and layers come from the file. If its
    modules differ in rank or scale, or the strength is not 1, the file is merged into the base
    instead.

    Args:
        file: `FILE` or `FILE@strength`; empty for none, or for trained weights that are loaded
            later.
    """
    if not file:
        return run, build_model(run)
    config = run.config
    path, strength = parse_merge(file, "--adapter")
    sampling = with_config(run, replace(config, adapter=AdapterConfig(init=str(path))))
    if strength == 1:
        with suppress(MixedAdapter):
            return sampling, build_model(sampling)
    # With its strength: an @ in the file's name would be read as one.
    base, entry = config.base, f"{path}@{strength:g}"
    if run.component == "transformer_2":
        base = replace(base, merge_low=(*base.merge_low, entry))
    else:
        base = replace(base, merge=(*base.merge, entry))
    sampling = with_config(run, replace(config, adapter=AdapterConfig(), base=base))
    return sampling, build_model(sampling)


def trained_weights_in(
    jobs: Jobs, *, without: str | None = None
) -> tuple[dict[str, ExpertWeights], int]:
    """The saved weights of a run's experts.

    Returns:
        The weights by name of the expert, and the step of the latest save.
    """
    trained: dict[str, ExpertWeights] = {}
    newest = 0
    for job in jobs:
        if job.name in ("", without) or (step := job.saved_step()) is None:
            continue
        trained[job.name] = ExpertWeights(folder=job.folder.path, step=step)
        newest = max(newest, step)
    return trained, newest


def load_preview_weights(prepared: Model, path: Path) -> None:
    """Load the weights of a queued preview into the model."""
    weights = read_weights(path)
    with prepared.readable():
        parameters = trainable_parameters(prepared.module)
        if {name: value.shape for name, value in weights.items()} != {
            n: p.shape for n, p in parameters.items()
        }:
            raise UserError(f"{path} contains the weights of another model or adapter; remove it")
        copy_values(parameters, weights)
    if prepared.streamer is not None:
        # streamed blocks are copied from page-locked buffers, which must be refilled
        prepared.streamer.host_changed()


def generate_trained(jobs: Jobs, folder: RunFolder, step: int) -> None:
    """Generate the samples of a finished run with all trained experts, one loaded at a time; all
    ranks call it."""
    run, ranks = jobs.run, current_ranks()
    prompts = sample_prompts(run.data, run.data.dataset.samples)
    if not prompts:
        return
    # Decided together: machines may have different files.
    if obstacle := next(
        filter(None, ranks.all_gather_object(why_no_samples(run.config.model, run.experts))), ""
    ):
        say(f"no samples: {obstacle}")
        return
    stages, shares = denoiser_stages(run, trained_weights_in(jobs)[0]), SampleShares.of(ranks)
    generate_samples(run, stages, prompts, folder.samples, f"step-{step:06d}", shares)


def why_no_samples(model: ModelPaths, experts: Sequence[Expert]) -> str:
    """Why a run of one expert cannot sample: another expert is missing. Empty if all are here or in
    the hub's cache."""
    for expert in experts:
        try:
            location = model.here(expert.part) or model.fetched_description(expert.part)
        except UserError as error:
            return str(error)
        if location is None:
            return f"sampling needs all experts, and model.{expert.part} ({expert.name}) is missing"
    return ""
