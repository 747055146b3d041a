"""Looks at the files and folders that a configuration and its options name, before torch is
imported, which takes seconds.

It only finds missing files. The code that reads an existing file reports what is wrong with it.
"""

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ditkit_core.adapters.files.entry import parse_merge
from ditkit_core.config.foreign_files import is_safetensors
from ditkit_core.config.nearest import path_remedy
from ditkit_core.data.config import folder_error
from ditkit_core.errors import UserError
from ditkit_core.io.files import head_of, json_part, local_path
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.paths import is_hub_id, not_there
from ditkit_core.run.config import RunConfig

_UNUSED = {"train": (), "encode": ("transformer",), "sample": ()}
"""Keys of `[model]` whose files a command does not read. Commands that are not here read none of
them in every case."""


def check_paths(
    command: str,
    verb: str,
    config: RunConfig,
    options: Any,
    components: Sequence[str],
    *,
    run_file: Path | None = None,
) -> None:
    """Refuse a file or folder that is needed and does not exist. `verb` is the option that selects
    other work of the command, or empty; `components` are keys of `[model]` whose files every
    architecture of the family reads. People write paths as if they began at the run file's folder.
    """
    folder, starts = config.run_folder, [] if run_file is None else [run_file.parent]
    if command == "train" and not verb:
        folder.check_name()
    # A run that has a save continues from it and does not read --init-from.
    ignored = ("init_from",) if folder.has_save else ()
    for field in fields(options):
        path, message = getattr(options, field.name), field.metadata.get("missing", "")
        if field.name.startswith("adapter") and path and _is_missing(path):
            path = str(parse_merge(path, f"--{field.name.replace('_', '-')}")[0])
        if message and path and field.name not in ignored and _is_missing(path):
            raise UserError(message.format(path=path, remedy=path_remedy(path)))
    if (
        verb in ("plan", "fit")
        and options.demo
        and not config.model.preset
        and _is_missing(config.model.base)
    ):
        raise UserError(
            f"--{verb} writes nothing, and the demo is not in {folder.inputs} yet; write it with "
            f"--demo --check, or plan a run file"
        )
    reads_base = command in ("train", "encode", "sample") and verb not in ("plan", "fit")
    if reads_base and options.demo and config.model.preset and config.is_on_demo_base:
        raise UserError(
            f"--demo works on a tiny checkpoint of its own, which is no {config.model.preset}: "
            "leave out model.preset, or name that model's weights with model.base"
        )
    # Plans need no files, a check reports what is missing, and the demo writes its own.
    if verb not in ("", "on_sheet") or options.demo:
        return
    is_complete = command == "train" and folder.completed_step() is not None
    if command in ("train", "encode", "caption") and not is_complete:
        _check_data(config, starts)
    if is_complete or command not in _UNUSED:
        return
    parts = [component for component in components if component not in _UNUSED[command]]
    # The base folder is not read if every component has a path of its own.
    for part in (
        parts if all(getattr(config.model, component) for component in parts) else ("base", *parts)
    ):
        # One expert trains without the other, whose file is only missed by previews, with a
        # warning.
        one_expert = part == "transformer" and config.experts.train != "both"
        path = "" if one_expert else getattr(config.model, part)
        if path and not is_hub_id(path) and _is_missing(path):
            raise not_there(f"model.{part}", path, folders=starts)


_FOR_WEIGHTS = {
    "train": "--adapter.init {path} trains a LoRA further, and --model.transformer {path} trains on a transformer",
    "encode": "--model.transformer {path} names a transformer",
    "sample": "--adapter {path} samples with a LoRA, and --model.transformer {path} with a transformer",
    "export": "--inspect {path} describes it",
    "watch": "name the folder of a run",
    "caption": "--model names the folder of a model",
}
"""What a file of weights can be given as, by command."""


def check_run_file(command: str, path: Path) -> None:
    """Refuse what is given as the run file and is something else that a command takes, before it is
    read as TOML."""
    refused = f"{path} is no run file"
    if path.is_dir():
        if RunFolder(path).config_file.is_file():
            raise UserError(f"{refused}, but the folder of a run: --run {path}")
        if (path / "model_index.json").is_file():
            raise UserError(f"{refused}, but a model in diffusers layout: --model.base {path}")
        raise UserError(
            f"{refused}, but a folder; a folder of clips and captions is --data.folder {path}"
        )
    if is_safetensors(head_of(path)):
        raise UserError(
            f"{refused}, but a file of weights: {_FOR_WEIGHTS[command].format(path=path)}"
        )


def check_family(command: str, folder: RunFolder, name: str) -> None:
    """Refuse the run of another family than the command's, whose weights and settings it would
    misread; in the folder there may be no run."""
    # no run yet, or a damaged file, which its reader reports
    family = json_part(folder.about, "model").get("family", name)
    if family != name:
        raise UserError(
            f"{folder.path} is a run of {family}: use {family}-{command}, or choose another "
            f"run.folder"
        )


def _check_data(config: RunConfig, starts: Sequence[Path]) -> None:
    for folder in config.data.folders or (config.data.folder,):
        if not folder or _is_missing(folder) or os.path.isfile(local_path(folder)):
            raise folder_error(
                folder, "data.folders" if config.data.folders else "data.folder", folders=starts
            )


def _is_missing(path: str) -> bool:
    try:
        os.stat(local_path(path))
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):  # unreadable, or not a path: the code that reads it reports that
        return False
    return False
