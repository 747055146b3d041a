"""The train command: one transformer, or the experts of a model one after the other, each as a run of its own.

Experts share no trained weight, so what comes of training both in one run is to the bit what comes of training each alone. Each has its
folder with saves, metrics and exports; the run's own folder holds what is of all: the configuration, the adapters, the samples.
"""

import filecmp
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ditkit_core.commands.options import TrainOptions
from ditkit_core.commands.train import train as train_one
from ditkit_core.diagnostics.report.page import write_report
from ditkit_core.errors import UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.files import atomic_write
from ditkit_core.io.memory import release_memory
from ditkit_core.io.run_dir import RunFolder, open_run
from ditkit_core.models.spec import Expert, ModelSpec
from ditkit_core.previews.class_images import draw_class_pictures, num_to_draw
from ditkit_core.previews.manager import draw_left, previews_of
from ditkit_core.previews.stages import draw_trained, turns_of
from ditkit_core.run.checks import check, check_parts, check_preview_device
from ditkit_core.run.config import RunConfig
from ditkit_core.run.encoding import encode_all
from ditkit_core.run.expert_runs import is_joint, known, runs_of
from ditkit_core.run.experts import described
from ditkit_core.run.model import build_model
from ditkit_core.run.run import Run, create_run


def train(spec: ModelSpec, config: RunConfig, options: TrainOptions) -> None:
    """Do everything that is missing between clips and verified adapters.

    Raises:
        UserError: For whatever the person can mend, before anything slow where that is possible.
        Stopped: If a signal ended it early.
    """
    run = create_run(spec, config)
    if not options.demo and any(map(spec.architecture.experts, spec.architecture.presets.values())):
        run = known(run)
    if run.experts and config.sample.every_steps and not config.sample.device:
        warn(
            "sample.every_steps: no previews while an expert trains, which would need the other beside it; samples are drawn at the end "
            "(sample.device names a device to draw previews on meanwhile)"
        )
    runs = runs_of(run)
    if is_joint(run):
        _train_all(run, runs, options)
    else:
        if run.expert is not None:
            _check_alone(run)
            say(described(run.expert, run.config.flow, run.config.held_out))
        train_one(runs[0], options)


def _check_alone(run: Run) -> None:
    """Refuse the folder of a run of several experts for one of them: its own is inside."""
    path = Path(run.config.run.folder)
    inside = [path / expert.name for expert in run.experts if RunFolder(path / expert.name).config_file.exists()]
    if inside:
        raise UserError(
            f"{path} is a run of several experts; go on with one of them by --run {inside[0]}, or name a new run.folder"
        )


def _train_all(run: Run, runs: list[Run], options: TrainOptions) -> None:
    config = run.given.config
    check(run)
    check_preview_device(run)
    if config.adapter.init:
        raise UserError(
            f"adapter.init = {config.adapter.init!r} is of one expert and would start both; train each in a run of its own, with "
            "experts.train = high_noise and low_noise"
        )
    starts = {each.config.run.folder: _start(options.init_from, _expert(each)) for each in runs}
    with open_run(Path(config.run.folder), config) as (folder, _):
        for each in runs:  # of which the folder of both, without a save, knows nothing
            RunFolder(Path(each.config.run.folder)).check(each.given.config)
        left = [each for each in runs if not _is_complete(each)]
        # One that was gone on with alone since has another adapter than was drawn with and stands among the exports.
        is_handed_over = all(
            copy.is_file() and filecmp.cmp(file, copy, shallow=False)
            for each in runs
            for file, copy in _to_hand_over(each, folder)
        )
        if not left and folder.completed_step() is not None and is_handed_over:
            say(f"{folder.path} is complete; nothing is left to do")
            draw_left(run, folder, write_report)
            _say_results(run, folder)
            return
        folder.store(config)
        names = ", then ".join(_expert(each).name for each in left)
        if left:
            say(f"{len(runs)} experts, one in memory at a time: {names}")
            _prepare(run, left)
        with previews_of(run, folder, write_report) as previews:
            for each in left:
                say(described(_expert(each), each.config.flow, each.config.held_out))
                start = replace(options, init_from=starts[each.config.run.folder])
                train_one(each, start, in_turn=True, shared_previews=previews)
                write_report(folder.path)
                release_memory()
            for each in runs:
                _hand_over(each, folder)
            step = max(RunFolder(Path(each.config.run.folder)).completed_step() or 0 for each in runs)
            draw_trained(run, folder, step)
            folder.mark_complete(step)
            write_report(folder.path)
            if previews is not None:
                previews.wait()  # last: what a signal leaves of these the same command draws, and does nothing else again
        _say_results(run, folder)


def _prepare(run: Run, left: list[Run]) -> None:
    """Find what is wrong with either expert, then encode for both, before the first is trained."""
    assert run.data.dataset.samples
    is_started = any(any(RunFolder(Path(each.config.run.folder)).state.glob("step-*")) for each in runs_of(run))
    num_class_pictures = num_to_draw(run, started=is_started)
    for each in left:
        build_model(each)
    check_parts(run, run.data.dataset.samples, drawing=num_class_pictures > 0)
    encode_all(run, run.config.prior.prompt if num_class_pictures else "")
    if num_class_pictures:
        draw_class_pictures(run, turns_of(run, {}), num_class_pictures)


def _expert(run: Run) -> Expert:
    assert run.expert is not None
    return run.expert


def _is_complete(run: Run) -> bool:
    done = RunFolder(Path(run.config.run.folder)).completed_step()
    return done is not None and done >= run.config.train.steps


def _start(init_from: str, expert: Expert) -> str:
    """The run that an expert's run starts from, of what `--init-from` names."""
    if not init_from:
        return ""
    inside = RunFolder(Path(init_from) / expert.name)
    if any(inside.state.glob("step-*")):
        return str(inside.path)
    if not Path(init_from).is_dir():
        raise UserError(f"--init-from {init_from} is not there; correct the path")
    if any(RunFolder(Path(init_from)).state.glob("step-*")):
        raise UserError(
            f"--init-from {init_from} is a run of one transformer, and here both experts are trained; name the folder of a run of both, or start "
            f"the one that it is of by itself: --experts.train NAME --init-from {init_from}"
        )
    raise UserError(
        f"--init-from {init_from} has no save of the {expert.name} expert (none in {inside.state}), and here both experts are trained; name the "
        "folder of a run of both, or train one with --experts.train NAME --init-from ITS_RUN"
    )


def _hand_over(run: Run, folder: RunFolder) -> None:
    """Put an expert's adapter among the exports of the whole run, under a name that tells which it is."""
    for file, copy in _to_hand_over(run, folder):
        with atomic_write(copy) as temporary:
            shutil.copyfile(file, temporary)


def _to_hand_over(run: Run, folder: RunFolder) -> Iterator[tuple[Path, Path]]:
    """An expert's finished adapters, and where each belongs among the exports of the whole run."""
    for file in sorted(RunFolder(Path(run.config.run.folder)).exports.glob("adapter*.safetensors")):
        if not file.name.startswith("adapter-"):  # of a save
            yield file, folder.exports / f"adapter_{_expert(run).name}{file.name.removeprefix('adapter')}"


def _say_results(run: Run, folder: RunFolder) -> None:
    """The last lines: where everything is, and what to type next."""
    for file in sorted(folder.exports.glob("adapter_*.safetensors")):
        say(f"adapter:  {file}")
    for each in runs_of(run):
        own = RunFolder(Path(each.config.run.folder))
        for model in sorted(own.exports.glob("transformer_*")):
            say(f"model:    {model} ({_expert(each).name})")
        say(f"metrics:  {own.metrics} ({_expert(each).name})")
    if folder.samples.exists():
        say(f"samples:  {folder.samples}")
    say(f"report:   {folder.report}")
    say(f'next:     {run.spec.name}-sample --run {folder.path} --prompt "..." draws another sample')
