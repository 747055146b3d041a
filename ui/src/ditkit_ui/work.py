"""What the worker process does for the page: the commands' functions, with plain values in and
out."""

import io
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ditkit_core.commands.cli import start
from ditkit_core.commands.comfyui import find_files
from ditkit_core.commands.recipe import gpus_for
from ditkit_core.config.resolve import resolve
from ditkit_core.config.sizes import GIB
from ditkit_core.data.caption_files import caption_folders
from ditkit_core.data.captions import captions_of
from ditkit_core.data.config import UnknownNames
from ditkit_core.data.dataset import NothingToTrain, Sample
from ditkit_core.data.discovery import lists_of, media_files, names_of
from ditkit_core.data.media.clip import kind_by_name
from ditkit_core.diagnostics.doctor.captions import shortened_caption
from ditkit_core.diagnostics.doctor.dataset import examine_dataset
from ditkit_core.diagnostics.doctor.findings import CutsCaptions
from ditkit_core.errors import UserError, printable
from ditkit_core.io.console import say
from ditkit_core.io.files import local_path
from ditkit_core.models.paths import ModelPaths
from ditkit_core.planner.gpus import KNOWN_GPUS
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run
from ditkit_core.run.jobs import jobs_of
from ditkit_core.run.plans.fit import gpus_to_fit
from ditkit_core.run.plans.hours import PlannedRun, hours_in_words, launch_of, run_of_recipe
from ditkit_core.run.recipes import read_recipes
from ditkit_ui import texts
from ditkit_ui.families import installed_families


def command(family: str, name: str, arguments: list[str]) -> dict[str, Any]:
    """Call a command in this process: its exit status, and what it printed to stdout and stderr."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        status = start(installed_families()[family], name, arguments)
    return {"status": status, "out": out.getvalue(), "err": errors.getvalue().strip()}


def caption(family: str, arguments: list[str], log: str) -> int:
    """Call the caption command; what it prints is in the log while it works."""
    with _printed_into(log):
        return start(installed_families()[family], "caption", arguments)


def missing(family: str, comfyui: str = "", **run: str) -> list[str]:
    """The model files that a recipe (`name`) or run file (`file`) needs and neither this machine
    nor a folder of ComfyUI has: a line about each part."""
    paths, parts = _model_files(family, comfyui, **run)
    return list(filter(None, map(paths.to_fetch, parts)))


def in_comfyui(family: str, comfyui: str, **run: str) -> dict[str, str]:
    """The files in a folder of ComfyUI that do for a recipe or run file, by key."""
    spec = installed_families()[family].spec()
    with _run_of(family, **run) as context:
        files = find_files(spec, context.config.model, local_path(comfyui))
    return {f"model.{key}": str(path) for key, path in files.items()}


def fetch(family: str, log: str, comfyui: str = "", **run: str) -> int:
    """Fetch the model files that `missing` names; the exit status."""
    paths, parts = _model_files(family, comfyui, **run)
    with _printed_into(log):
        try:
            for part in filter(paths.is_to_be_fetched, parts):
                paths.locate(part)
        except UserError as error:
            say(f"error: {error}")
            return 1
    return 0


@contextmanager
def _run_of(family: str, name: str = "", file: str = "") -> Iterator[RunContext]:
    """A recipe, or a run file, as a run."""
    if file:
        yield _run(family, file)
        return
    entry = installed_families()[family]
    (chosen,) = (recipe for recipe in read_recipes(entry.recipes) if recipe.name == name)
    with run_of_recipe(entry.spec(), chosen) as run:
        yield run


def _model_files(family: str, comfyui: str, **of: str) -> tuple[ModelPaths, list[str]]:
    """The paths of a run's model, and the parts that it reads, but for those in ComfyUI."""
    there = in_comfyui(family, comfyui, **of) if comfyui else {}
    with _run_of(family, **of) as run:
        parts = [expert.part for expert in run.experts] or [run.component]
        parts += ["vae", "text_encoder", "tokenizer"]
        parts += () if run.arch is None else run.spec.auxiliary.components(run.arch)
        return run.config.model, [p for p in dict.fromkeys(parts) if f"model.{p}" not in there]


@contextmanager
def _printed_into(log: str) -> Iterator[None]:
    """Inside the block what is printed goes into a file, line by line."""
    with (
        open(log, "w", encoding="utf-8", errors="replace", buffering=1) as file,
        redirect_stdout(file),
        redirect_stderr(file),
    ):
        yield


def machine() -> dict[str, Any]:
    """The GPUs of this machine, as `--gpus` takes them, and those that have a name."""
    gpus = ""
    if torch.cuda.is_available():
        gpus = ", ".join(gpu.name for gpu in gpus_to_fit(RunConfig(), "")[0])
    return {"gpus": gpus, "names": sorted(gpu.name for gpu, _ in KNOWN_GPUS)}


def recipe(family: str, name: str, gpus: str) -> dict[str, Any]:
    """Memory and hours of a recipe on GPUs; empty where it is for more GPUs or larger ones."""
    entry = installed_families()[family]
    spec = entry.spec()
    (chosen,) = (recipe for recipe in read_recipes(entry.recipes) if recipe.name == name)
    here, _ = gpus_to_fit(RunConfig(), gpus)
    if not (used := gpus_for(chosen, here)):
        return {}
    with run_of_recipe(spec, chosen) as run:
        planned = PlannedRun.of(jobs_of(run), launch_of(chosen))
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
        `folders`; `notes` about captions that are not written here; `stale`, why the run file names
        files that are not there, and the settings without them, or None; and `rows`, one for each
        file. Its `names` are all by which a finding may call it, and `id` is the one in
        `data.exclude`. Its caption is in the file `caption`, or in the `row` of that list, which
        calls it `item`; `text` has it as it was read. If it is trained, `trained` is the size,
        `stored` its own, `crop` where it is cropped, which is `movable` or not, and `extras` are
        the other files of the sample; else `reason` says why not.
    """
    run = _run(family, file)
    config, data = run.config, run.data  # with the model's own size where the file sets none
    folders = [local_path(folder) for folder in config.data.folders or (config.data.folder,)]
    reasons: dict[str, str]
    lenient, stale = replace(config.data, on_bad="skip", short_clips="skip"), None
    try:
        try:
            scan = data.scanned(lenient)
        except UnknownNames as error:
            settings = {"data.exclude": [*error.exclude], "data.crops": [*error.crops]}
            stale = {"reason": str(error), "settings": {k: v or None for k, v in settings.items()}}
            scan = data.scanned(replace(lenient, exclude=error.exclude, crops=error.crops))
        samples, reasons = scan.samples, dict(scan.excluded)
    except NothingToTrain as error:
        samples, reasons = [], dict(error.excluded)
    kinds = {column.name: column.kind for column in run.auxiliary.columns}
    trained = defaultdict(list)
    for sample in samples:
        trained[os.path.abspath(sample.media)].append(sample)
    extras = {path: _extras(of_file[0], kinds) for path, of_file in trained.items()}
    extra_paths = {extra["path"] for some in extras.values() for extra in some}
    notes: list[str] = []
    rows: dict[str, dict[str, Any]] = {}
    for folder, prefix in zip(folders, names_of(list(map(str, folders))), strict=True):
        for row in _stored_captions(run, folder, notes):
            path = row["path"] = os.path.abspath(folder / row["name"])
            if path in extra_paths or path in rows or not os.path.lexists(path):
                continue
            of_file = trained.get(path, [])
            names = [path, row["name"], str(folder / row["name"]), prefix + row["name"]]
            row["id"] = prefix + row["name"]
            row["names"] = [*dict.fromkeys(names), *(sample.id for sample in of_file)]
            row["kind"], row["extras"] = _kind(path), extras.get(path, [])
            row["excluded"] = row["id"] in config.data.exclude
            row["reason"] = "" if of_file else reasons.get(printable(row["id"]), "")
            if row["excluded"]:
                row["reason"] = texts.LEFT_OUT
            if of_file:
                first = of_file[0]
                row |= {"trained": [first.height, first.width], "stored": first.file_size}
                # A table of camera poses is about the middle of the picture.
                has_table = any(kinds[name] == "table" for name in first.controls)
                row |= {"crop": first.crop, "movable": not has_table}
                row["text"] = row["text"] or first.captions[0]
            if _is_sendable(row):
                rows[path] = row
            else:
                notes.append(texts.NOT_UTF8.format(file=printable(str(folder / row["name"]))))
    return {
        "folders": list(map(str, folders)),
        "notes": notes,
        "stale": stale,
        "rows": list(rows.values()),
    }


def _is_sendable(row: Mapping[str, Any]) -> bool:
    """Whether a browser can show a row: no name and no text of it has half of a character."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _stored_captions(run: RunContext, folder: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Where the captions of a folder are, and those of files that no list names; a reason why they
    cannot be written is added to the notes."""
    named = set()
    data = replace(run.config.data, exclude=(), crops=())  # as the dataset names its files
    config = replace(data, folder=str(folder), folders=(), repeats=())
    try:
        edits = run.spec.data.reference_size is not None
        (files,) = caption_folders(config, run.auxiliary.columns, edits=edits)
    except UserError as error:
        if listed := config.metadata or next(iter(lists_of(folder)), ""):
            notes.append(texts.IN_A_LIST.format(file=folder / listed, reason=error))
    else:
        for item in files.items:
            file = files.list_path or folder / files.side_files[item.name]
            named.add(item.name)
            yield {
                "name": item.name,
                "item": item.name,
                "caption": os.path.abspath(file),
                "row": item.row,
                "text": item.text,
            }
    skipped = [config.references, config.masks, *(c.partition("=")[2] for c in config.controls)]
    skip = [local_path(path) for path in skipped if path]
    for name in media_files(folder, skip=skip, image_folders=config.image_folders):
        if name not in named:
            yield {"name": name, "item": name, "caption": "", "row": None, "text": ""}


def _kind(path: str) -> str:
    """Whether a file is an image or a video; a folder of images is shown as its first."""
    return "image" if os.path.isdir(path) else kind_by_name(Path(path))


def _extras(sample: Sample, kinds: Mapping[str, str]) -> list[dict[str, str]]:
    """The other files and texts of a sample: what each is, its kind, and its path or text."""
    files = [(texts.MASK, "video", str(sample.mask))] if sample.mask else []
    files += [(texts.REFERENCE, "image", str(path)) for path in sample.references]
    files += [(name, kinds[name], value) for name, value in sample.controls.items()]
    extras = []
    for name, kind, value in files:
        extra = {"name": name, "kind": kind, "text": "", "path": ""}
        if kind == "text":
            extra["text"] = value
        else:
            extra["path"] = os.path.abspath(value)
        if kind in ("image", "video"):  # of a video a still image does, too
            extra["kind"] = _kind(value)
        extras.append(extra)
    return extras


def findings(family: str, file: str) -> list[dict[str, Any]]:
    """What the doctor finds in a run's dataset."""
    report = examine_dataset(_run(family, file).data).checkup
    return [
        {
            "code": finding.code,
            "severity": finding.severity,
            "where": finding.where,
            "text": str(finding),
            "settings": finding.settings,
        }
        for finding in report.findings
    ]


def shortened(family: str, file: str, text: str, num_pictures: int) -> str:
    """A caption without the end that a run's text encoder would not read behind the references of
    its sample."""
    run = _run(family, file)
    config, encoder = run.config.data, run.auxiliary.encoders[1]
    if not isinstance(encoder, CutsCaptions):
        return text
    lines = text.split("\n") if config.captions == "lines" else [text]

    def is_read(part: str) -> bool:
        captions = captions_of((part,), config)
        return all(encoder.cut_of(caption, num_pictures) is None for caption in captions)

    return "\n".join(shortened_caption(line, is_read) for line in lines)


def _run(family: str, file: str) -> RunContext:
    config = resolve(RunConfig, file=local_path(file))
    return create_run(installed_families()[family].spec(), config)
