"""`train --plan`: print the peak memory of a run on each device, before anything is loaded or
written."""

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from itertools import chain, count, pairwise
from pathlib import Path

from ditkit_core.commands.options import TYPED, TrainOptions, command_line
from ditkit_core.errors import UserError
from ditkit_core.io.console import say
from ditkit_core.io.files import local_path
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.rank_layout import PlannedLaunch
from ditkit_core.planner.report import plan_json, print_plan
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.plans.plan import make_report

FITTED = Path("fitted.toml")
"""File that the suggested command writes."""
DOES_NOT_FIT = 3
"""Exit status of a plan that does not fit."""


def plan_run(spec: ModelSpec, config: RunConfig, options: TrainOptions) -> int:
    """Print the plan of a run. Returns 0 if the run fits its devices, `DOES_NOT_FIT` if not."""
    # JSON alone goes to stdout, so that a script can pipe it; progress and notes go to stderr.
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        run = create_run(spec, config)
        report = make_report(run, options.gpus, options.host, launch_from(options))
    if options.json:
        say(json.dumps(plan_json(report), indent=1, allow_nan=False))
    else:
        searched = report.is_cuda and not report.step.fits
        print_plan(
            report,
            fit_command(f"{spec.name}-train", TYPED.get()) if searched else "",
            why=options.why,
        )
    return 0 if report.fits else DOES_NOT_FIT


def launch_from(options: TrainOptions) -> PlannedLaunch:
    """The ranks that the flags plan for."""
    return PlannedLaunch(nproc=options.nproc, nodes=options.nodes, link=options.link)


def file_to_write(options: TrainOptions) -> Path | None:
    """The file of `--write`, which must not exist; None without the flag."""
    file = local_path(options.write) if options.write else None
    if file is not None and file.exists():
        raise UserError(
            f"--write {file} exists, and nothing is overwritten; give another name, or remove it"
        )
    return file


def fit_command(program: str, typed: Sequence[str]) -> str:
    """The `--plan` command line of the train command as it was typed, with `--fit` in place of
    `--plan`."""
    arguments = [
        text
        for before, text in pairwise(("", *typed))
        if text.partition("=")[0] != "--plan" and (before, text) != ("--plan", "true")
    ]
    # --write overwrites nothing.
    numbered = (FITTED.with_stem(f"{FITTED.stem}-{number}") for number in count(2))
    out = next(path for path in chain((FITTED,), numbered) if not path.exists())
    return command_line(program, *arguments, "--fit", "--write", str(out))
