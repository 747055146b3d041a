"""`train --plan`: print the peak memory of a run on each device, before anything is loaded or written."""

import json
import sys
from contextlib import nullcontext, redirect_stdout

from ditkit_core.commands.options import TrainOptions
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.plan import make_report
from ditkit_core.planner.report import plan_json, print_plan
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run

DOES_NOT_FIT = 3
"""Exit status of a plan that does not fit."""


def plan(spec: ModelSpec, config: RunConfig, options: TrainOptions) -> int:
    """Print the plan of a run.

    Returns:
        0 if the run fits its devices, `DOES_NOT_FIT` if not.

    Raises:
        UserError: If the run could not start as it is configured.
    """
    # JSON alone goes to stdout, so that a script can pipe it; progress and notes go to stderr.
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        report = make_report(create_run(spec, config), options.gpus, options.host)
    if options.json:
        print(json.dumps(plan_json(report), indent=1, allow_nan=False), flush=True)
    else:
        print_plan(report)
    return 0 if report.fits else DOES_NOT_FIT
