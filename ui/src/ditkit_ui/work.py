"""What the worker process does for the page: the commands' functions, with plain values in and
out."""

import io
import os
from collections import defaultdict
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ditkit_core.commands.cli import start
from ditkit_core.config.resolve import resolve
from ditkit_core.config.sizes import GIB
from ditkit_core.data.dataset import NothingToTrain
from ditkit_core.data.discovery import CAPTION_SUFFIXES, lists_of, media_files
from ditkit_core.data.media.clip import kind_by_name
from ditkit_core.diagnostics.doctor.dataset import examine_dataset
from ditkit_core.io.files import local_path
from ditkit_core.planner.gpus import KNOWN_GPUS, parse_gpus
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run
from ditkit_core.run.jobs import jobs_of
from ditkit_core.run.plans.fit import gpus_to_fit
from ditkit_core.run.plans.hours import PlannedRun, hours_in_words, run_of_recipe
from ditkit_core.run.recipes import read_recipes
from ditkit_ui.families import installed_families


def command(family: str, name: str, arguments: list[str]) -> dict[str, Any]:
    """Call a command in this process: its exit status, and what it printed to stdout and stderr."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        status = start(installed_families()[family], name, arguments)
    return {"status": status, "out": out.getvalue(), "err": errors.getvalue().strip()}


def machine() -> dict[str, Any]:
    """The GPUs of this machine, as `--gpus` takes them, and those that have a name."""
    gpus = ""
    if torch.cuda.is_available():
        gpus = ", ".join(gpu.name for gpu in gpus_to_fit(RunConfig(), "")[0])
    return {"gpus": gpus, "names": sorted(gpu.name for gpu, _ in KNOWN_GPUS)}


def recipe(family: str, name: str, gpus: str) -> dict[str, Any]:
    """Memory and hours of a recipe on GPUs; empty where it is for more GPUs or larger ones."""
    known = installed_families()[family]
    spec = known.spec()
    (chosen,) = (recipe for recipe in read_recipes(known.recipes) if recipe.name == name)
    here, _ = gpus_to_fit(RunConfig(), gpus)
    here = tuple(sorted(here, key=lambda gpu: -gpu.total))
    promised = parse_gpus(chosen.gpus)
    if len(promised) > len(here) or any(
        one.total > gpu.total for one, gpu in zip(promised, here, strict=False)
    ):
        return {}
    used = here[: len(promised)]
    with run_of_recipe(spec, chosen) as run:
        planned = PlannedRun.of(jobs_of(run))
    devices = planned.devices(used)
    host = planned.host + sum(device.host for device in devices)
    return {
        "fits": all(device.fits for device in devices),
        "peaks": [device.peak / GIB for device in devices],
        "host": host / GIB,
        "hours": hours_in_words(planned.hours(used)),
    }


def write_demo(family: str, folder: str) -> None:
    """Write the inputs of a family's demo, the tiny model among them, where its run has them."""
    config = resolve(
        RunConfig,
        demo=installed_families()[family].demo,
        flags={"run.folder": folder},
        name=family,
    )
    installed_families()[family].spec().demo.write(config.run_folder.inputs)


def dataset(family: str, file: str) -> dict[str, Any]:
    """The media files of a run's dataset, with what training makes of each.

    Returns:
        `folders`; `list`, the file that has the captions, or empty; and `rows`, one for each file:
        its path and its caption's, its kind, the size that it is trained in, its own size, and why
        it is left out.
    """
    run = _run(family, file)
    config, data = run.config, run.data  # with the model's own size where the file sets none
    folders = [local_path(folder) for folder in config.data.folders or (config.data.folder,)]
    reasons: dict[str, str]
    try:
        scan = data.scanned(replace(config.data, on_bad="skip", short_clips="skip"))
        samples, reasons = scan.samples, dict(scan.excluded)
    except NothingToTrain as error:
        samples, reasons = [], dict(error.excluded)
    masks = {os.path.abspath(sample.mask) for sample in samples if sample.mask}
    trained = defaultdict(list)
    for sample in samples:
        trained[os.path.abspath(sample.media)].append(sample)
    listed = config.data.metadata or next(
        (str(folder / name) for folder in folders for name in lists_of(folder)), ""
    )
    rows = []
    for folder in folders:
        for name in sorted(media_files(folder, skip=[], image_folders=config.data.image_folders)):
            path = Path(os.path.abspath(folder / name))
            if str(path) in masks:
                continue
            captions = [path.with_suffix(suffix) for suffix in CAPTION_SUFFIXES]
            caption = next((file for file in captions if file.is_file()), captions[0])
            row: dict[str, Any] = {"path": str(path), "name": name, "caption": str(caption)}
            row |= {"kind": kind_by_name(path), "reason": ""}
            if of_file := trained.get(str(path)):
                first = of_file[0]
                row |= {"ids": [sample.id for sample in of_file], "text": first.captions[0]}
                row |= {"trained": [first.height, first.width], "stored": first.file_size}
            else:
                row["reason"] = reasons.get(name, "")
            rows.append(row)
    return {"folders": list(map(str, folders)), "list": listed, "rows": rows}


def findings(family: str, file: str) -> list[dict[str, str]]:
    """What the doctor finds in a run's dataset."""
    report = examine_dataset(_run(family, file).data).checkup
    return [
        {
            "code": finding.code,
            "severity": finding.severity,
            "where": finding.where,
            "text": str(finding),
        }
        for finding in report.findings
    ]


def _run(family: str, file: str) -> RunContext:
    config = resolve(RunConfig, file=local_path(file))
    return create_run(installed_families()[family].spec(), config)
