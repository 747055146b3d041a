"""Previews of a model of two experts on the GPUs that train one of them: the other takes its place for its denoising steps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ditkit_core.engine.parked_weights import parked, parked_bytes
from ditkit_core.errors import UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.protocol import Engine
from ditkit_core.previews.callbacks import SamplesInPlace
from ditkit_core.previews.stages import denoiser_stages, trained_weights_in, why_no_samples
from ditkit_core.run.context import RunContext
from ditkit_core.run.model import engine_of
from ditkit_core.run.prepare import LoadedModel
from ditkit_core.sampling.denoise import DenoiserStage, single_stage
from ditkit_core.weights.layer_streaming import free_memory_bytes


def samples_in_place(
    run: RunContext, sampled: RunContext, prepared: LoadedModel, folder: RunFolder, on_written: Callable[[Path], object]
) -> SamplesInPlace:
    """The callback that generates samples with the model that trains.

    Args:
        run: The run of one transformer.
        sampled: The run whose [sample] section counts: of several experts, that of all of them.
        prepared: The model.
        folder: The folder of the samples.
        on_written: As for `SamplesInPlace`.
    """
    sample = sampled.config.sample
    every_steps = sample.every_steps if not sample.device and (sample.prompts or sample.captions) else 0
    if run.expert is None:
        return SamplesInPlace(
            run,
            lambda: single_stage(prepared.model, engine_of(run, prepared)),
            folder,
            on_written,
            every_steps=every_steps,
        )
    stages: Callable[[], Sequence[DenoiserStage]] = tuple
    if every_steps:
        try:
            stages = _exchanged(run, sampled, prepared)
        except UserError as error:
            warn(f"no previews of the {run.expert.name} expert: {error}")
            every_steps = 0
    return SamplesInPlace(run, stages, folder, on_written, every_steps=every_steps, sampled=sampled)


def _exchanged(run: RunContext, sampled: RunContext, prepared: LoadedModel) -> Callable[[], Sequence[DenoiserStage]]:
    """A function that gives all experts as stages: the one that trains as it is, the others with their saves.

    Raises:
        UserError: If they cannot be exchanged.
    """
    if prepared.shards is not None:
        raise UserError("ranks divide its weights, and the other expert is loaded whole; set sample.device")
    if lacking := why_no_samples(sampled):
        raise UserError(lacking)
    # Read once: the saves of the others do not change while this expert trains.
    others, own = trained_weights_in(sampled, without=run.expert)[0], run.expert
    if own is not None and (moved := parked_bytes(prepared.model)):
        # The other one streams as many blocks, from page-locked memory of its own.
        needed = moved if prepared.streamer is None else sum(tensor.nbytes for tensor in prepared.model.parameters())
        free = free_memory_bytes(torch.device("cpu"))
        if free < needed:
            raise UserError(
                f"to exchange the experts, the host needs {needed / 2**30:.1f} GiB and has {free / 2**30:.1f} GiB; set sample.device"
            )
        say(
            f"previews: the {own.name} expert waits on the host ({moved / 2**30:.1f} GiB) while the other one takes its steps"
        )

    def in_place() -> AbstractContextManager[tuple[Any, Engine]]:
        return nullcontext((prepared.model, engine_of(run, prepared)))

    def stages() -> Sequence[DenoiserStage]:
        found = denoiser_stages(sampled, others)
        return [
            replace(stage, opened=in_place) if expert == own else _instead_of(prepared, stage)
            for expert, stage in zip(sampled.experts, found, strict=True)
        ]

    return stages


def _instead_of(prepared: LoadedModel, stage: DenoiserStage) -> DenoiserStage:
    """A stage for which the model that trains gives away its memory."""

    @contextmanager
    def opened() -> Iterator[tuple[Any, Engine]]:
        with parked(prepared.model), stage.opened() as found:
            yield found
            del found  # before the weights come back

    return replace(stage, opened=opened)
