"""The train command: encode → train → export → verify → sample.

A run is a list of jobs that train one transformer each (`run/jobs.py`). The folder of an ordinary
run is the folder of its only job. Where there are several, each job has a folder for its saves,
metrics and exports inside the run's folder, which contains what belongs to all of them: the
configuration, the adapters, the samples.

Each step only does what is missing, so the same command starts a run, continues it, and reports
that it is complete.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from ditkit_core.commands.export import copy_expert_adapters, has_expert_adapters, rename_exports
from ditkit_core.commands.options import TrainOptions
from ditkit_core.commands.report import held_out_lines, say_results
from ditkit_core.commands.train_job import prepare_jobs, train_job
from ditkit_core.config.resolve import resolve
from ditkit_core.config.resume import ConfigChange
from ditkit_core.diagnostics.report.live_page import LivePage
from ditkit_core.diagnostics.report.overview import RANDOM_SAMPLES
from ditkit_core.diagnostics.report.page import write_report
from ditkit_core.distributed.shared_folders import open_run
from ditkit_core.distributed.torchrun import current_ranks
from ditkit_core.errors import UserError
from ditkit_core.io.console import keep_log, say, warn
from ditkit_core.io.memory import release_memory
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.spec import ModelSpec
from ditkit_core.previews.manager import Previews, generate_left, previews_of
from ditkit_core.previews.queue import queued
from ditkit_core.previews.stages import generate_trained
from ditkit_core.run.checks import check_jobs, check_listed, check_samples
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.encoding import encode_all
from ditkit_core.run.jobs import Jobs, TrainingJob, jobs_of
from ditkit_core.run.model import tracked_run
from ditkit_core.training.metrics import log_left_samples
from ditkit_core.training.trainer import TrainResult


def train(spec: ModelSpec, config: RunConfig, options: TrainOptions) -> None:
    """Do everything that is missing between clips and verified exports.

    Raises:
        Interrupted: If a signal ended it early.
    """
    ranks = current_ranks()
    # Only families with experts need the architecture this early; a demo's checkpoint does not
    # exist yet.
    has_experts = any(map(spec.architecture.experts, spec.architecture.presets.values()))
    jobs = jobs_of(
        create_run(spec, config, fetch=has_experts and not options.demo), options.init_from
    )
    check_jobs(jobs, ranks.size)
    with open_run(config.run_folder.path, jobs.settings, ranks) as (folder, changes):
        if ranks.is_first:
            keep_log(folder.log)  # not before the folder is locked: another run's log is not ours
            rename_exports(folder, jobs.run.experts)
        if ranks.broadcast_object(is_complete_run(jobs, folder)):
            leave_complete(jobs, folder)
        else:
            if ranks.is_first:
                folder.store(jobs.settings)
            if options.demo:
                say(f"writing the demo's checkpoint and media into {folder.inputs}")
                ranks.on_first(lambda: spec.demo.write(folder.inputs))
                # Again: the architecture is read from the checkpoint, which did not exist before.
                jobs = jobs_of(create_run(spec, config), options.init_from)
                if jobs.run.has_random_base:
                    say(RANDOM_SAMPLES)
            left = _left(jobs)
            steps = [job.completed_step or 0 for job in jobs]
            on_rank = previews_of(jobs, folder, write_report) if ranks.is_first else nullcontext()
            with on_rank as previews:
                for job in left:
                    with _opened(job, folder, changes) as changes_of_job:
                        page = LivePage([job.folder.path, folder.path])
                        result = train_job(job, jobs, changes_of_job, previews, page)
                        # before the next transformer, and before samples that take all of them
                        release_memory()
                        steps.append(result.step)
                        if ranks.is_first:
                            _finish_job(job, jobs, folder, result)
                _finish(jobs, folder, max(steps), previews)
            if ranks.is_first:
                tracked = tracked_run(jobs.run, folder)
                log_left_samples(folder.path, jobs.run.config.log, tracked, warn, is_said=True)
        if ranks.is_first:
            say_results(jobs, folder)


def _left(jobs: Jobs) -> list[TrainingJob]:
    """The jobs that are not complete, as the first rank sees them; several are checked, and
    everything is encoded, before the first of them is trained."""
    ranks = current_ranks()
    left = [job for job in jobs if ranks.broadcast_object(job.completed_step) is None]
    if jobs.in_folders and left:
        say(
            f"{len(jobs.all)} experts, one in memory at a time: "
            f"{', then '.join(job.name for job in left)}"
        )
        prepare_jobs(jobs, left)
    return left


def _finish_job(job: TrainingJob, jobs: Jobs, folder: RunFolder, result: TrainResult) -> None:
    """Write down that a job is complete, and say its validation loss."""
    if jobs.in_folders:
        job.folder.mark_complete(result.step)
        write_report(job.folder.path)
        write_report(folder.path)
    for line in held_out_lines(result, job.folder):
        say(line)


def _finish(jobs: Jobs, folder: RunFolder, step: int, previews: Previews | None) -> None:
    """Generate the samples that need all transformers, and mark the run complete; its folder is
    locked by this process."""
    run, is_first = jobs.run, current_ranks().is_first
    if is_first:
        for job in jobs.in_folders:
            copy_expert_adapters(job, folder)
    if run.experts:
        generate_trained(jobs, folder, step)
    if not is_first:
        return
    folder.mark_complete(step)
    write_report(folder.path)  # once more, now that it is complete
    if previews is not None:
        # Last, after the run is marked complete: if a signal ends the wait, the same command only
        # generates what is left.
        previews.wait()


@contextmanager
def _opened(
    job: TrainingJob, folder: RunFolder, changes: Sequence[ConfigChange]
) -> Iterator[Sequence[ConfigChange]]:
    """Open the folder of a job: the run's own, or one inside it. Yields the settings that changed
    since the job was last trained."""
    if job.folder.path == folder.path:  # already open and locked by this process
        yield changes
        return
    with open_run(job.folder.path, job.settings, current_ranks()) as (job_folder, changes_of_job):
        if current_ranks().is_first:
            job_folder.store(job.settings)
        yield changes_of_job


def is_complete_run(jobs: Jobs, folder: RunFolder) -> bool:
    """Whether all jobs of a run are complete, and the run's folder has their results."""
    return (
        folder.completed_step() is not None
        and all(job.completed_step is not None for job in jobs)
        and all(has_expert_adapters(job, folder) for job in jobs.in_folders)
    )


def leave_complete(jobs: Jobs, folder: RunFolder) -> None:
    """Say that a run is complete, and generate the previews that are left in its queue."""
    is_first = current_ranks().is_first
    # Someone who set another data.folder expects it to be trained on.
    changes = [change for job in jobs for change in job.changes()]
    if not (is_first and queued(folder.pending) and _takes_moved_data(jobs, folder, changes)):
        for change in dict.fromkeys(map(str, changes)):
            warn(f"not used, because the run is complete: {change}")
    step = "" if jobs.in_folders else f" at step {folder.completed_step()}"
    say(f"{folder.path} is complete{step}; nothing is left to do")
    if is_first:
        generate_left(jobs, folder, write_report)
        log_left_samples(folder.path, jobs.run.config.log, tracked_run(jobs.run, folder), warn)


def _takes_moved_data(jobs: Jobs, folder: RunFolder, changes: Sequence[ConfigChange]) -> bool:
    """Whether all that changed of a complete run is where its data is, which previews in the queue
    may need."""
    if not changes or not all(change.key.startswith("data.") for change in changes):
        return False
    data = jobs.run.data
    try:
        for job in jobs:
            check_listed(job.folder, data)
        encoded = encode_all(data)
        for job in jobs:
            check_samples(job.folder, [*encoded.samples, *encoded.prior])
        # It is the same data, so where it is now is stored: what generates samples later reads that
        # there.
        for run_folder in (folder, *(job.folder for job in jobs.in_folders)):
            # Only that: whatever else was set anew is for a run that goes on.
            stored = resolve(RunConfig, stored=run_folder.path)
            run_folder.store(replace(stored, data=jobs.settings.data))
    except UserError as error:
        warn(str(error))
        return False
    return True
