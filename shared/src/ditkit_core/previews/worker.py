"""The process that generates previews: `python -m ditkit_core.previews.worker SPEC FOLDER DEVICE
STREAMED [FILE…]`, started by `manager.py`.

It generates the previews of a run's queue, in order, and ends when none is left or when its parent
ends.
"""

import os
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from ditkit_core.config.resolve import resolve
from ditkit_core.errors import UserError
from ditkit_core.io.console import say
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.io.worker_process import work
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import compute_fp32_in_fp32
from ditkit_core.models.spec import ModelSpec
from ditkit_core.previews.generate import generate_samples
from ditkit_core.previews.queue import GENERATES, queued, read_preview
from ditkit_core.previews.stages import ExpertWeights, denoiser_stages, load_preview_weights
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.encoding import sample_prompts
from ditkit_core.run.gpus import with_kernels
from ditkit_core.run.jobs import Jobs, jobs_of
from ditkit_core.run.model import build_model, load_to_sample
from ditkit_core.sampling.denoise import DenoiserStage, single_stage
from ditkit_core.sampling.prompts import SamplePrompt


def main(arguments: Sequence[str]) -> int:
    """Generate all previews of a queue.

    Args:
        arguments: `ModelSpec.import_path`; the run's folder; `cpu` or `cuda`; number of streamed
            blocks; names of queue files to skip.

    Returns:
        The exit status of `work`.
    """
    import_path, folder, device, streamed, *skipped = arguments
    compute_fp32_in_fp32()
    return work(
        lambda: generate_waiting(
            ModelSpec.at(import_path), Path(folder), device, int(streamed), skipped
        )
    )


def generate_waiting(
    spec: ModelSpec, path: Path, device: str, streamed: int, left_out: Collection[str] = ()
) -> None:
    """Generate the queued previews of a run's folder, including those that are added meanwhile;
    each file is removed when it is done.

    A file that somebody else removes meanwhile is no error.

    Args:
        streamed: Number of blocks whose weights stay in host memory.
        left_out: Names of queue files to skip.
    """
    # The stored configuration: the parent has written what it resolved, flags included.
    config = with_kernels(resolve(RunConfig, stored=path).on_device(device, streamed))
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    jobs = jobs_of(create_run(spec, config, fetch=True))
    run = jobs.run
    prompts = sample_prompts(
        run.data, [] if run.config.sample.prompts else run.data.dataset.samples
    )
    prepared: Model | None = None
    while waiting := [
        file for file in queued(RunFolder(path).pending) if file.name not in left_out
    ]:
        file = waiting[0]
        # first: the parent reads here which file failed
        say(f"process {os.getpid()}{GENERATES}{file.name}")
        try:
            written = file.stat().st_mtime_ns
            prepared = _generate(jobs, prepared, file, prompts)
        except (UserError, FileNotFoundError):
            if file.exists():
                raise
            say(f"{file.name} was removed")
            continue
        with suppress(FileNotFoundError):
            # A run that was set back to an earlier save may have queued this step again: then its
            # file stays.
            if file.stat().st_mtime_ns == written:
                file.unlink()


def _generate(
    jobs: Jobs, prepared: Model | None, file: Path, prompts: Sequence[SamplePrompt]
) -> Model | None:
    """Generate the preview of one file.

    Args:
        jobs: The run, configured for this device.
        prepared: The model, if it has one transformer and is loaded already.

    Returns:
        The loaded model for the next file; None for a model with experts, which are loaded for each
        preview.
    """
    preview, run = read_preview(file), jobs.run
    job = jobs.named(preview.expert)
    if job is None:
        raise UserError(f"{file} contains weights of no expert that this run trains; remove it")
    stages: Sequence[DenoiserStage]
    if run.experts:
        # The expert of the preview with its weights, the others with their saves at the time it was
        # queued.
        trained = {
            other.name: ExpertWeights(folder=other.folder.path, step=preview.others[other.name])
            for other in jobs
            if other.name in preview.others
        }
        stages = denoiser_stages(run, {**trained, preview.expert: ExpertWeights(preview=file)})
    else:
        if prepared is None:
            prepared = load_to_sample(run, build_model(run))
        load_preview_weights(prepared, file)
        stages = single_stage(prepared.module, prepared.engine)
    generate_samples(run, stages, prompts, job.folder.samples, f"step-{preview.step:06d}")
    return prepared


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
