"""A package's commands: `train, encode, sample, export = commands(SPEC)`.

Mistakes in the command line are reported before any library is imported that takes seconds to load.
"""

import importlib
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ditkit_core
from ditkit_core.commands.options import EncodeOptions, ExportOptions, SampleOptions, TrainOptions, check_combination
from ditkit_core.config.cli_args import Flags, format_help, read_flags
from ditkit_core.config.resolve import resolve
from ditkit_core.config.toml import to_toml
from ditkit_core.errors import Interrupted, UserError
from ditkit_core.io.console import hush_libraries, prepare_streams, say, warn
from ditkit_core.io.memory import is_out_of_memory, let_go, release_memory
from ditkit_core.io.signals import terminated_like_interrupted
from ditkit_core.models.precision import compute_fp32_in_fp32
from ditkit_core.models.spec import ModelSpec
from ditkit_core.nn.attention_backends import support_matrix
from ditkit_core.run.config import RunConfig

OPTIONS: dict[str, type] = {
    "train": TrainOptions,
    "encode": EncodeOptions,
    "sample": SampleOptions,
    "export": ExportOptions,
}

STAGES = {
    ("train", ""): ("train", "train"),
    ("train", "plan"): ("plan", "plan"),
    ("train", "fit"): ("fit", "fit_run"),
    ("train", "audit_precision"): ("audit", "audit_precision"),
    ("train", "check"): ("check", "run_checks"),
    ("train", "report"): ("report", "report"),
    ("encode", ""): ("encode", "encode_run"),
    ("sample", ""): ("sample", "sample"),
    ("export", ""): ("export", "export"),
    ("export", "on_files"): ("convert", "convert_file"),
}
"""Maps a command and its option to the module in this folder and the function that do the work."""

_CONTINUED = (("train", ""), ("encode", ""))
"""Commands that continue from their saved state when they are run again after an interruption."""

ABOUT = {
    "train": "Train an adapter or all weights on media files: encodes samples that are not cached, trains, samples, exports.",
    "encode": "Encode media and captions into the cache that training reads.",
    "sample": "Generate samples with a trained adapter.",
    "export": "Write a run's adapter for other programs; or inspect, convert, reduce, merge or extract adapter files.",
}


def commands(spec: ModelSpec) -> tuple[Callable[[], int], ...]:
    """The functions that a package's console scripts call: train, encode, sample and export, in this order."""
    return tuple(partial(run, spec, command) for command in OPTIONS)


def run(spec: ModelSpec, command: str, argv: Sequence[str] | None = None) -> int:
    """Run a command: read the command line, resolve the configuration, call the stage.

    Args:
        spec: The model family.
        command: `train`, `encode`, `sample` or `export`.
        argv: Arguments after the program's name; None takes those of this process.

    Returns:
        The exit status: 0 for success; 1 for a user's mistake found while working; 2 for one in the command line or the run file; 3 for
        a plan that does not fit; 130 when interrupted. Other exceptions are bugs of ours and propagate.
    """
    prepare_streams()
    hush_libraries()
    try:
        with terminated_like_interrupted():
            return _run(spec, command, sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        warn("interrupted")
        return 130


def _run(spec: ModelSpec, command: str, argv: Sequence[str]) -> int:
    prog = f"{spec.name}-{command}"
    try:
        flags = read_flags(argv, RunConfig, OPTIONS[command])
        if flags.common.help:
            say(format_help(prog, ABOUT[command], RunConfig, OPTIONS[command]).rstrip("\n"))
            if command == "train":
                say(f"\n{support_matrix()}")
            return 0
        if flags.common.version:
            say(f"{prog} {ditkit_core.__version__} (torch {torch.__version__}, Python {platform.python_version()})")
            return 0
        check_combination(flags.options)
        config = _resolve(prog, spec, flags)
    except UserError as error:
        return _complain(error, 2)
    if flags.common.print_config:
        say(to_toml(config).rstrip("\n"))
        return 0
    compute_fp32_in_fp32()
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    try:
        status = _stage(command, flags.options)(spec, config, flags.options)
    except UserError as error:
        return _complain(error, 1)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # Keep only text: the error refers to the frames, these refer to tensors, and the explanation needs their memory.
        failure, modules = (str(error) or type(error).__name__).splitlines()[0], let_go(error)
    except Interrupted as stopped:
        warn(str(stopped))
        return 130
    except KeyboardInterrupt:
        if (command, _verb(command, flags.options)) not in _CONTINUED:
            raise
        warn("interrupted: what was encoded and saved is kept, and the same command continues")
        return 130
    else:
        return status or 0
    # Outside the except block nothing refers to the error any more, nor to the model whose step failed: memory can be freed.
    release_memory()
    from ditkit_core.commands.oom import explain, measured_peaks

    training = command == "train" and not (flags.options.plan or flags.options.fit)
    explain(spec, config, failure, training=training, modules=modules, peaks=measured_peaks(config))
    return 1


def _resolve(prog: str, spec: ModelSpec, flags: Flags) -> RunConfig:
    common, demo = flags.common, flags.options.demo
    on_files = isinstance(flags.options, ExportOptions) and flags.options.on_files
    if not (flags.values or common.config or common.run or common.print_config or demo or on_files):
        raise UserError(f"nothing to work on: give a run file ({prog} run.toml), or try {prog} --demo")
    return resolve(
        RunConfig,
        demo=spec.demo.config if demo else None,
        stored=Path(common.run) if common.run else None,
        file=Path(common.config) if common.config else None,
        flags=flags.values,
    )


def _complain(error: UserError, status: int) -> int:
    warn(f"error: {error}")
    return status


def _verb(command: str, options: Any) -> str:
    """The given option that selects another function than the command's own (`--plan`, `--fit`, …); empty if there is none."""
    return next((verb for its, verb in STAGES if its == command and verb and getattr(options, verb)), "")


def _stage(command: str, options: Any) -> Any:
    """The function that does the work. Its module is imported only now, because its imports take seconds."""
    module, function = STAGES[command, _verb(command, options)]
    return getattr(importlib.import_module(f"ditkit_core.commands.{module}"), function)
