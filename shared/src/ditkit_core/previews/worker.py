"""The process that draws previews: `python -m ditkit_core.previews.worker SPEC FOLDER DEVICE STREAMED [FILE…]`, started by `manager.py`.

It draws what waits in a run's queue, in order, and ends when nothing is left or when its parent does.
"""

import _thread
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from ditkit_core.config.resolve import resolve
from ditkit_core.errors import UserError
from ditkit_core.io.console import hush_libraries, prepare_streams, say, warn
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.precision import compute_fp32_in_fp32
from ditkit_core.models.spec import Expert, ModelSpec
from ditkit_core.planner.partition import place
from ditkit_core.previews.generate import generate_samples
from ditkit_core.previews.queue import DRAWS, Preview, read_preview, waiting
from ditkit_core.previews.stages import ExpertWeights, denoiser_stages, load_preview_weights
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run
from ditkit_core.run.encoding import sample_prompts
from ditkit_core.run.expert_runs import folder_of, resolve_arch
from ditkit_core.run.model import build_model, engine_of, load_model
from ditkit_core.run.prepare import LoadedModel
from ditkit_core.sampling.denoise import DenoiserStage, single_stage
from ditkit_core.sampling.prompts import SamplePrompt

_GRACE_SECONDS = 10.0
"""Between the end of the parent and that of this process, if what it is at cannot be interrupted."""
_NICENESS = 10
"""Where it shares processors with training, training has them first."""


def main(arguments: Sequence[str]) -> int:
    """Draw.

    Args:
        arguments: `ModelSpec.found_at`; the run's folder; `cpu` or `cuda`; blocks whose weights are streamed; names of files of the queue
            that are left where they are.

    Returns:
        The exit status: 0; 1 for what a person can mend, said in the last line; 130 when the parent is gone.
    """
    prepare_streams()
    hush_libraries()
    compute_fp32_in_fp32()
    if lower := getattr(os, "nice", None):  # not on Windows
        lower(_NICENESS)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which may have been inherited as ignored
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import_path, folder, device, streamed, *left_out = arguments
    try:
        generate_waiting(spec_at(import_path), Path(folder), device, int(streamed), left_out)
    except UserError as error:
        warn(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def spec_at(import_path: str) -> ModelSpec:
    """The spec that says it is found here."""
    module, _, name = import_path.partition(":")
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, ModelSpec), import_path
    return found


def generate_waiting(spec: ModelSpec, path: Path, device: str, streamed: int, left_out: Collection[str] = ()) -> None:
    """Draw the previews that wait in a run's folder, those too that come meanwhile; each file goes when it is drawn.

    One that somebody removes meanwhile is not missed.

    Args:
        spec: The model family.
        path: The run's folder.
        device: Where to draw.
        streamed: Blocks whose weights stay in host memory.
        left_out: Names of files that are not tried.

    Raises:
        UserError: For whatever the person can mend; what is not drawn stays.
    """
    config = elsewhere(resolve(RunConfig, stored=path), device, streamed)
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    run = resolve_arch(create_run(spec, config))
    scenes = sample_prompts(run, [] if run.config.sample.prompts else run.data.dataset.samples)
    prepared: LoadedModel | None = None
    while left := [file for file in waiting(RunFolder(path).pending) if file.name not in left_out]:
        file = left[0]
        say(f"process {os.getpid()}{DRAWS}{file.name}")  # before anything of it can fail
        try:
            written = file.stat().st_mtime_ns
            prepared = _draw(run, prepared, file, scenes)
        except (UserError, FileNotFoundError):
            if file.exists():
                raise
            say(f"{file.name} was removed")
            continue
        with suppress(FileNotFoundError):
            # A run that was put back to a save may have asked for this step anew.
            if file.stat().st_mtime_ns == written:
                file.unlink()


def _draw(
    run: RunContext, prepared: LoadedModel | None, file: Path, scenes: Sequence[SamplePrompt]
) -> LoadedModel | None:
    """Draw one file.

    Args:
        run: The run as it draws here.
        prepared: The model, if it has one transformer and that was loaded.
        file: Of the queue.
        scenes: What to draw.

    Returns:
        The model for the next one; None if each expert is loaded when its turn comes.
    """
    preview = read_preview(file)
    expert: Expert | None = None
    turns: Sequence[DenoiserStage]
    if run.experts:
        expert = _expert(run, file, preview)
        turns = _turns(run, file, preview)
    else:
        if prepared is None:
            unloaded = build_model(run)
            prepared = load_model(run, unloaded, place(run, unloaded))
        load_preview_weights(prepared, file)
        turns = single_stage(prepared.model, engine_of(run, prepared))
    generate_samples(run, turns, scenes, folder_of(run, expert).samples, f"step-{preview.step:06d}")
    return prepared


def elsewhere(config: RunConfig, device: str, streamed: int) -> RunConfig:
    """A run's configuration for drawing on one device that need not be of those it trains on.

    Args:
        config: The run's.
        device: Where to draw, and to encode what the cache has lost meanwhile.
        streamed: Blocks whose weights stay in host memory.
    """
    train = replace(
        config.train, device=device, devices=(), split_points=(), reserve=(), pipelined=False, checkpointing="none",
        swap_blocks=(streamed,) if streamed else (),
    )  # fmt: skip
    return replace(
        config, train=train, encode=replace(config.encode, device=device), sample=replace(config.sample, device="")
    )


def _expert(run: RunContext, file: Path, preview: Preview) -> Expert:
    for expert in run.experts:
        if expert.name == preview.expert:
            return expert
    raise UserError(f"{file} holds weights of no expert of this model; remove it")


def _turns(run: RunContext, file: Path, preview: Preview) -> Sequence[DenoiserStage]:
    """All experts, the one of the preview with its weights, the others as they were trained when it was asked for."""
    others = {each.name: each for each in run.experts if each.name in preview.others}
    trained = {
        name: ExpertWeights(folder=folder_of(run, each).path, step=preview.others[name])
        for name, each in others.items()
    }
    return denoiser_stages(run, {**trained, preview.expert: ExpertWeights(preview=file)})


def _end_with_parent() -> None:
    """Interrupt the main thread when the pipe from the parent is closed, and end the process if that does not."""
    while os.read(0, 1):
        pass
    _thread.interrupt_main()
    time.sleep(_GRACE_SECONDS)
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
