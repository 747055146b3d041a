"""A package's commands: `train, encode, sample, export, watch, caption = commands(FAMILY)`.

Help, versions and mistakes in flags, files and folders are answered before torch is imported, which
takes seconds: nothing that this module imports needs torch.
"""

import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import ditkit_core
from ditkit_core.commands.options import (
    OPTIONS,
    TYPED,
    ExportOptions,
    TrainOptions,
    check_combination,
    verb_of,
)
from ditkit_core.commands.preflight import check_family, check_paths, check_run_file
from ditkit_core.config.cli_args import CommonOptions, Flags, read_flags
from ditkit_core.config.help import format_help
from ditkit_core.config.resolve import resolve
from ditkit_core.config.schema import json_schema
from ditkit_core.config.toml import changes_to_toml, to_toml
from ditkit_core.distributed.launch import check_launch, launched
from ditkit_core.distributed.torchrun import complain_once
from ditkit_core.errors import UserError, keys_shown
from ditkit_core.io.allocator import allocator_settings
from ditkit_core.io.console import prepare_streams, say, warn
from ditkit_core.io.files import local_path
from ditkit_core.io.run_requests import ask
from ditkit_core.io.signals import terminated_like_interrupted
from ditkit_core.io.trackers import check_installed
from ditkit_core.models.paths import check_preset
from ditkit_core.nn.attention.support import support_matrix
from ditkit_core.run.config import KEYS_THAT_MATTER, RunConfig
from ditkit_core.run.recipes import read_recipes, recipes_called

if TYPE_CHECKING:
    from ditkit_core.models.spec import ModelSpec

ABOUT = {
    "train": "Train an adapter or all weights on media files: encodes samples that are not cached, trains, samples, exports.",
    "encode": "Encode media and captions into the cache that training reads.",
    "sample": "Generate samples with a trained adapter.",
    "export": "Write a run's adapter for other programs; or inspect, convert, reduce, merge or extract adapter files.",
    "watch": "Serve the page of a run on this machine, renewed while the run trains: {prog} RUN.",
    "caption": "Write a caption for each image and clip of a folder that has none, with a model that sees: {prog} FOLDER.",
}

_STARTS = dict.fromkeys(
    ("train", "encode"), "give a run file ({prog} run.toml), or try {prog} --demo"
) | {
    "sample": "name a run ({prog} --run RUN --prompt TEXT), or a model and an adapter ({prog} --model.base BASE --adapter FILE "
    "--prompt TEXT), or try {prog} --demo",
    "export": "name a run ({prog} --run RUN), or an adapter file ({prog} --adapter FILE --to FORM, or --inspect FILE), or try {prog} --demo",
    "watch": "name the folder of a run ({prog} RUN), or try {prog} --demo",
    "caption": "name a folder of images or clips ({prog} FOLDER), or a run file ({prog} run.toml)",
}
"""What each command can start from, for a call that names nothing."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family, as far as its commands need it before they import torch."""

    name: str
    """Prefix of its commands: `name` for name-train; `ModelSpec.name`."""
    presets: tuple[str, ...]
    """Names of its architectures."""
    demo: Path
    """The run file of its demo; `DemoSpec.config`."""
    spec: "Callable[[], ModelSpec]"
    """Imports the family's spec, and with it torch."""
    components: tuple[str, ...] = ("vae", "text_encoder", "tokenizer", "transformer")
    """Keys of `[model]` whose files all its architectures read."""

    @property
    def recipes(self) -> Path:
        """The folder of its recipes, next to its demo's."""
        return self.demo.parent.parent / "recipes"


def commands(family: Family) -> tuple[Callable[[], int], ...]:
    """The functions that a package's console scripts call: train, encode, sample, export, watch and
    caption, in this order; new ones come behind them."""
    return tuple(partial(start, family, command) for command in OPTIONS)


def run(spec: "ModelSpec", command: str, argv: Sequence[str]) -> int:
    """Run a command of a family whose spec is already imported; as `start`."""
    presets = tuple(spec.architecture.presets)
    # The work says what is missing: torch is imported, so an early look saves nothing.
    family = Family(
        name=spec.name, presets=presets, demo=spec.demo.config, spec=lambda: spec, components=()
    )
    return start(family, command, argv)


def start(family: Family, command: str, argv: Sequence[str] | None = None) -> int:
    """Run a command: read the command line, resolve the configuration, look at its files, do the
    work.

    Args:
        command: `train`, `encode`, `sample`, `export`, `watch` or `caption`.
        argv: Arguments after the program's name; None takes this process's arguments.

    Returns:
        The exit status: 0 for success; 1 for a user's mistake found while working; 2 for one in the
        command line or the run file; 3 for a plan that does not fit; 130 when interrupted. Other
        exceptions are bugs of ours and propagate.
    """
    prepare_streams()
    os.environ |= allocator_settings(os.environ)
    if launched() is not None:
        # torch would print a page of its frames whenever a connection breaks, which hides the line
        # that says why.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    typed = tuple(sys.argv[1:] if argv is None else argv)
    token = TYPED.set(typed)
    try:
        with terminated_like_interrupted(), keys_shown():
            work = _work(family, command, typed)
            if isinstance(work, int):
                return work
            # here, and not above: from now on torch is needed
            from ditkit_core.commands.stage import run_stage

            config, flags = work
            return run_stage(family.spec(), command, config, flags.options)
    except KeyboardInterrupt:
        warn("interrupted")
        return 130
    finally:
        TYPED.reset(token)


def _work(family: Family, command: str, argv: Sequence[str]) -> tuple[RunConfig, Flags] | int:
    """What takes torch of a command, by configuration and flags; or an exit status, where nothing
    is left to do."""
    prog = f"{family.name}-{command}"
    try:
        flags = read_flags(argv, RunConfig, OPTIONS[command], section=command)
        if topic := flags.common.help:
            kinds = OPTIONS[command], CommonOptions
            say(
                format_help(
                    prog,
                    ABOUT[command].format(prog=prog),
                    RunConfig,
                    kinds,
                    topic=topic,
                    keys=KEYS_THAT_MATTER[command],
                )
            )
            if topic == "train":
                say(f"\n{support_matrix()}")
            return 0
        if flags.common.version:
            say(
                f"{prog} {ditkit_core.__version__} (torch {version('torch')}, Python "
                f"{platform.python_version()})"
            )
            return 0
        if flags.common.print_schema:
            title = f"Run files of ditkit's {family.name} commands"
            say(json_schema(RunConfig, title, {"model.preset": family.presets}).rstrip("\n"))
            return 0
        check_combination(flags.options)
        if len(runs := flags.common.run) > 1 and command != "sample":
            raise UserError(
                f"--run is given twice: {' and '.join(runs)}; give one ({family.name}-sample "
                f"compares several)"
            )
        if (command, verb_of(command, flags.options)) == ("train", ""):
            check_launch()
        elif launched() is not None:
            raise UserError(
                f"only training runs in several processes; start {prog} with these options without "
                f"torchrun"
            )
        if command == "train" and flags.options.queue and _is_about_queue(flags):
            return _work_on_queue(flags)
        if command == "train" and flags.options.recipe:
            begun = _recipe(family, flags)
            if isinstance(begun, int):
                return begun
            flags = begun
        config = _resolve(family, command, flags)
        if command in ("train", "encode") and flags.options.comfyui:
            # here, and not above: what a file is for takes torch
            from ditkit_core.commands.comfyui import with_comfyui

            flags = with_comfyui(family.spec(), flags, config)
            config = _resolve(family, command, flags)
    except UserError as error:
        return _complain(error, 2)
    if flags.common.print_config or flags.common.changed:
        say((changes_to_toml if flags.common.changed else to_toml)(config).rstrip("\n"))
        return 0
    verb = verb_of(command, flags.options)
    try:
        check_family(command, config.run_folder, family.name)
        check_preset(config.model.preset, family.presets)
        run_file = local_path(flags.common.config) if flags.common.config else None
        queued = verb == "queue" and flags.options.queue == "add"
        looked_at = "" if queued else verb  # what would fail hours later is refused now
        check_paths(command, looked_at, config, flags.options, family.components, run_file=run_file)
        if command == "train" and not looked_at:
            check_installed(config.log.tracker, f"ditkit-{family.name}")
        if verb == "queue":
            from ditkit_core.commands.queue import change_queue

            change_queue(config, flags.options)
            return 0
        # it reads files alone: the family's spec would take seconds and most of a GiB
        if command == "watch":
            from ditkit_core.diagnostics.report.server import watch

            options = flags.options
            watch(config.run_folder.path, bind=options.bind, port=options.port, log=options.log)
            return 0
        if verb == "tell":
            tell_run(config, flags.options)
            return 0
    except UserError as error:
        return _complain(error, 1)
    return config, flags


def _is_about_queue(flags: Flags) -> bool:
    """Whether `--queue` is about the queue and not about one run in it."""
    verb = flags.options.queue
    common = flags.common
    if common.print_config or common.changed:
        return False
    names_run = bool(flags.values or common.config or common.run or flags.options.demo)
    if names_run and verb in ("list", "start", "stop", "finish"):
        raise UserError(f"--queue {verb} is for no single run; leave everything else out")
    return not names_run and verb not in ("add", "move")


def _work_on_queue(flags: Flags) -> int:
    from ditkit_core.commands.queue import work_on_queue

    try:
        return work_on_queue(flags.options)
    except UserError as error:
        return _complain(error, 1)


def _recipe(family: Family, flags: Flags) -> Flags | int:
    """The command line with a run file in place of `--recipe`; or an exit status, where nothing is
    left to do."""
    common, word = flags.common, flags.options.recipe
    recipes = recipes_called(word, read_recipes(family.recipes))
    if other := common.config or common.run and f"--run {common.run[0]}":
        raise UserError(
            f"--recipe {word} and {other}: each is a whole configuration; leave one of them out"
        )
    if launched() is not None:
        raise UserError(
            f"--recipe {word} writes a run file in one process; then start that file with torchrun"
        )
    # here, and not above: what fits a GPU takes torch
    from ditkit_core.commands.recipe import use_recipe

    try:
        return use_recipe(family.spec(), recipes, flags, family.components)
    except UserError as error:
        return _complain(error, 1)


def _resolve(family: Family, command: str, flags: Flags) -> RunConfig:
    prog = f"{family.name}-{command}"
    common, demo = flags.common, flags.options.demo
    on_files = isinstance(flags.options, ExportOptions) and flags.options.on_files
    if not (
        flags.values
        or common.config
        or common.run
        or common.print_config
        or common.changed
        or demo
        or on_files
    ):
        raise UserError(f"nothing to work on: {_STARTS[command].format(prog=prog)}")
    if command == "watch" and common.config and local_path(common.config).is_dir():
        common = replace(common, run=(common.config,), config="")
    values = flags.values
    if command == "caption" and common.config and not common.config.endswith(".toml"):
        values, common = {**values, "data.folder": common.config}, replace(common, config="")
    if common.config:
        check_run_file(command, local_path(common.config))
    return resolve(
        RunConfig,
        demo=family.demo if demo else None,
        stored=local_path(common.run[0]) if common.run else None,
        file=local_path(common.config) if common.config else None,
        flags=values,
        name=family.name,
    )


def _complain(error: UserError, status: int) -> int:
    complain_once(str(error))
    return status


def tell_run(config: RunConfig, options: TrainOptions) -> None:
    """Ask the run for what `options.tell` names, and say what follows."""
    folder = config.run_folder
    say(f"tell:     {folder.path}: {ask(folder, options.tell)}")
