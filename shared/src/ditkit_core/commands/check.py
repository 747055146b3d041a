"""`train --check`: check data and model of a run before its first step."""

import sys
import time
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import replace

from ditkit_core.commands.options import TrainOptions
from ditkit_core.diagnostics.doctor.dataset import examine_dataset
from ditkit_core.diagnostics.doctor.findings import CheckReport
from ditkit_core.diagnostics.doctor.render import check_document
from ditkit_core.diagnostics.doctor.trial import plan_memory, try_step
from ditkit_core.distributed.torchrun import current_ranks
from ditkit_core.errors import UserError
from ditkit_core.io.console import say
from ditkit_core.io.memory import release_memory
from ditkit_core.io.run_dir import CHECKS
from ditkit_core.models.paths import nothing_fetched
from ditkit_core.models.spec import ModelSpec
from ditkit_core.run.checks import check_preview_device, check_ranks, check_run, check_training
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.jobs import Jobs, jobs_of


def run_checks(spec: ModelSpec, config: RunConfig, options: TrainOptions) -> int:
    """Check a run, print the findings and write them into its folder; no training state is kept.

    Returns:
        The exit status: 0 if it can be trained, 1 if not.
    """
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        folder = config.run_folder
        run = create_run(spec, config)
        check_run(run)
        # here and not per expert: only the run of all experts generates previews
        check_preview_device(run)
        # One process checks what several will train, as a plan is of many: what no number of them
        # could train is refused.
        several = config.ranks.group_size
        lacks_processes = current_ranks().size % several != 0
        for job in jobs_of(run):
            check_training(job.run)
            check_ranks(job.run, several if lacks_processes else current_ranks().size)
        # The configuration is not stored in the folder: a check must not count as the start of a
        # run.
        if options.demo:
            spec.demo.write(folder.inputs)
            # Again: the demo's checkpoint, which has the architecture, did not exist before.
            run = create_run(spec, config)
        with nothing_fetched():  # a check must not start a download of many gigabytes
            with suppress(UserError):  # the trial of the model reports it as a finding
                run = create_run(spec, config, fetch=True)
            checkup = examine_run(jobs_of(run))
        document = check_document(checkup, folder.path)
        files = document.write(folder.path / CHECKS[0])
        document.show()
        if lacks_processes:
            say(
                f"start it with torchrun: ranks.shard and ranks.context need a multiple of "
                f"{several} processes"
            )
        for file in files:
            say(f"written:  {file}")
    if options.json:
        say(document.json())
    return 0 if checkup.trainable else 1


def examine_run(jobs: Jobs) -> CheckReport:
    """Check the dataset, plan the memory and try two steps of each trained transformer."""
    began, run = time.monotonic(), jobs.run
    examined = examine_dataset(run.data)
    checkup = examined.checkup
    if examined.samples:
        memory, lacking = plan_memory(run, examined.samples, examined.class_images)
        checkup = replace(checkup, memory=memory, findings=(*checkup.findings, *lacking))
    for job in jobs if examined.samples else ():  # class images alone are no training data
        step, step_findings = try_step(job, examined)
        findings = [finding for finding in step_findings if finding not in checkup.findings]
        # two experts do not fit at once: free the first before the second is loaded
        release_memory()
        steps = () if step is None else (step,)
        checkup = replace(
            checkup, steps=(*checkup.steps, *steps), findings=(*checkup.findings, *findings)
        )
    return replace(checkup, seconds=time.monotonic() - began)
