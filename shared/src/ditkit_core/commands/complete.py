"""The train command on a run that is complete: nothing is trained, and what was left behind is
done."""

from collections.abc import Sequence
from dataclasses import replace

from ditkit_core.commands.export import has_expert_adapters
from ditkit_core.config.resolve import resolve
from ditkit_core.config.resume import ConfigChange
from ditkit_core.diagnostics.report.page import write_report
from ditkit_core.distributed.torchrun import current_ranks
from ditkit_core.errors import UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.previews.manager import generate_left
from ditkit_core.previews.queue import queued
from ditkit_core.run.checks import check_listed, check_samples
from ditkit_core.run.config import RunConfig
from ditkit_core.run.encoding import encode_all
from ditkit_core.run.jobs import Jobs
from ditkit_core.run.model import tracked_run
from ditkit_core.training.metrics import log_left_samples


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
