"""Previews of a model of two experts on the GPUs that train one of them: the other takes its place
for its denoising steps."""

import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ditkit_core.distributed.ranks import Ranks
from ditkit_core.distributed.torchrun import current_ranks
from ditkit_core.engine.parked_weights import parked, parked_bytes
from ditkit_core.errors import UserError
from ditkit_core.io.console import say, warn
from ditkit_core.loading.model import Model
from ditkit_core.loading.weights import engine_for
from ditkit_core.models.protocol import Engine
from ditkit_core.models.spec import Expert
from ditkit_core.previews.callbacks import SamplesInPlace
from ditkit_core.previews.stages import denoiser_stages, trained_weights_in, why_no_samples
from ditkit_core.run.jobs import Jobs, TrainingJob
from ditkit_core.sampling.denoise import DenoiserStage, single_stage
from ditkit_core.sampling.shares import SampleShares
from ditkit_core.weights.layer_streaming import free_memory_bytes


def samples_in_place(
    job: TrainingJob, jobs: Jobs, prepared: Model, on_written: Callable[[Path], object]
) -> SamplesInPlace:
    """The callback that generates samples with the model that trains.

    Args:
        job: The training of that model; samples go into its folder.
        jobs: All of the run, whose [sample] section counts.
        on_written: As for `SamplesInPlace`.
    """
    run, ranks = job.run, current_ranks()
    sampled = run if run.expert is None else jobs.run
    sample = sampled.config.sample
    every_steps = 0 if sample.device else sample.preview_steps
    shares = SampleShares.of(ranks)
    stages: Callable[[], Sequence[DenoiserStage]] = tuple
    if run.expert is None:
        stages = lambda: single_stage(prepared.module, engine_for(prepared, run.execution))
    elif every_steps:
        try:
            stages, obstacle = _exchanged(job, jobs, prepared), ""
        except UserError as error:
            obstacle = str(error)
        # Decided together: machines may have different files, and different room.
        obstacle = next(filter(None, ranks.all_gather_object(obstacle)), "")
        if not obstacle:
            num, obstacle = _ranks_with_room(
                run.expert, prepared, ranks, num_samples=sample.most_samples
            )
            shares = replace(shares, num=num)
        if obstacle:
            warn(f"no previews of the {run.expert.name} expert: {obstacle}")
            every_steps = 0
    when_asked = not sample.device and (run.expert is None or every_steps > 0)
    return SamplesInPlace(
        job,
        sampled,
        stages,
        on_written,
        every_steps=every_steps,
        when_asked=when_asked,
        shares=shares,
    )


def _exchanged(
    job: TrainingJob, jobs: Jobs, prepared: Model
) -> Callable[[], Sequence[DenoiserStage]]:
    """A function that gives all experts as stages: the one that trains as it is, the others with
    their saves."""
    run, sampled = job.run, jobs.run
    if obstacle := why_no_samples(sampled.config.model, sampled.experts):
        raise UserError(obstacle)
    # Read once: the saves of the others do not change while this expert trains.
    others = trained_weights_in(jobs, without=job.name)[0]

    def in_place() -> AbstractContextManager[tuple[Any, Engine]]:
        return nullcontext((prepared.module, engine_for(prepared, run.execution)))

    def stages() -> Sequence[DenoiserStage]:
        expert_stages = denoiser_stages(sampled, others)
        return [
            replace(stage, opened=in_place)
            if expert == run.expert
            else _instead_of(prepared, stage)
            for expert, stage in zip(sampled.experts, expert_stages, strict=True)
        ]

    return stages


def _ranks_with_room(
    expert: Expert, prepared: Model, ranks: Ranks, *, num_samples: int
) -> tuple[int, str]:
    """How many ranks, the first ones, can exchange the experts at the same time; and if none can,
    what they lack.

    Ranks that divide the weights can all do it, or none.

    Args:
        num_samples: Samples of a preview, at most.
    """
    moved, free = parked_bytes(prepared.weights()), free_memory_bytes(torch.device("cpu"))
    # The other one streams as many blocks, from page-locked memory of its own.
    streamed = prepared.streamer is not None
    needed = (
        sum(tensor.nbytes for tensor in prepared.module.parameters())
        if moved and streamed
        else moved
    )
    most = ranks.size if ranks.shard > 1 else min(ranks.size, num_samples)
    demands = ranks.all_gather_object(
        {"host": socket.gethostname(), "needed": needed, "free": free}
    )
    num = num_with_room(demands[:most])
    if not num or (ranks.shard > 1 and num < most):
        suffix = " for each rank" if most > 1 else ""
        shortage = f"the host needs {needed / 2**30:.1f} GiB{suffix} and has {free / 2**30:.1f} GiB"
        return 0, f"to exchange the experts, {shortage}; set sample.device"
    if moved:
        where = (
            "the host" if num == most else f"the host, which has room for {num} of {most} ranks,"
        )
        say(
            f"previews: the {expert.name} expert waits on {where} ({moved / 2**30:.1f} "
            f"GiB{' each' * (num > 1)}) while the other one takes its steps"
        )
    return num, ""


def num_with_room(demands: Sequence[Mapping[str, Any]]) -> int:
    """The largest number of ranks, the first ones, that their hosts have room for at the same time.

    Args:
        demands: Of each rank its `host`, the bytes `needed` there, and those that are `free`.
    """
    used: Counter[str] = Counter()
    for num, demand in enumerate(demands):
        used[demand["host"]] += demand["needed"]
        if used[demand["host"]] > demand["free"]:
            return num
    return len(demands)


def _instead_of(prepared: Model, stage: DenoiserStage) -> DenoiserStage:
    """A stage for which the model that trains gives away its memory."""

    @contextmanager
    def opened() -> Iterator[tuple[Any, Engine]]:
        with parked(prepared.weights()), stage.opened() as model_and_engine:
            yield model_and_engine
            del model_and_engine  # before the weights come back

    return replace(stage, opened=opened)
