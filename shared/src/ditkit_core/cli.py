"""A package's commands: `train, encode, sample, export = commands(SPEC)`.

Everything that can be wrong with a command line is said before a library that takes seconds to import is touched.
"""

import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ditkit_core
from ditkit_core.command_line import Flags, format_help, read_flags
from ditkit_core.config import RunConfig
from ditkit_core.config_file import to_toml
from ditkit_core.config_layers import resolve
from ditkit_core.console import hush_libraries, prepare_streams, say, warn
from ditkit_core.errors import Stopped, UserError
from ditkit_core.model import ModelSpec
from ditkit_core.options import EncodeOptions, ExportOptions, SampleOptions, TrainOptions
from ditkit_core.precision import compute_fp32_in_fp32

OPTIONS: dict[str, type] = {
    "train": TrainOptions,
    "encode": EncodeOptions,
    "sample": SampleOptions,
    "export": ExportOptions,
}

_OUT_OF_MEMORY = (
    "out of memory: try train.checkpointing = full, a smaller data.frames, height or width, train.batch_size = 1, a lower "
    "adapter.rank, optim.name = adamw8bit; the last save is untouched"
)

ABOUT = {
    "train": "Train an adapter or all weights from media files: encodes what is not encoded yet, trains, samples, exports.",
    "encode": "Encode media and captions into the cache that training reads.",
    "sample": "Draw samples with a trained adapter.",
    "export": "Write a run's adapter for other programs.",
}


def commands(spec: ModelSpec) -> tuple[Callable[[], int], ...]:
    """What a package's console scripts call: train, encode, sample and export, in this order."""
    return tuple(partial(run, spec, command) for command in OPTIONS)


def run(spec: ModelSpec, command: str, argv: Sequence[str] | None = None) -> int:
    """Run a command: read the command line, resolve the configuration, call the stage.

    Args:
        spec: The model family.
        command: `train`, `encode`, `sample` or `export`.
        argv: Arguments after the program's name; None means those of this process.

    Returns:
        The exit status: 0; 1 for a mistake that a stage met; 2 for one in the command line or the run file; 130 when
        interrupted. Other exceptions are faults of ours and propagate.
    """
    prepare_streams()
    hush_libraries()
    try:
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
            return 0
        if flags.common.version:
            say(f"{prog} {ditkit_core.__version__} (torch {torch.__version__}, Python {platform.python_version()})")
            return 0
        config = _resolve(prog, spec, flags)
    except UserError as error:
        return _complain(error, 2)
    if flags.common.print_config:
        say(to_toml(config).rstrip("\n"))
        return 0
    compute_fp32_in_fp32()
    try:
        _stage(command)(spec, config, flags.options)
    except UserError as error:
        return _complain(error, 1)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        return _complain(UserError(f"{_OUT_OF_MEMORY} ({str(error).splitlines()[0]})"), 1)
    except Stopped as stopped:
        warn(str(stopped))
        return 130
    return 0


def _resolve(prog: str, spec: ModelSpec, flags: Flags) -> RunConfig:
    common, demo = flags.common, flags.options.demo
    if not (flags.values or common.config or common.run or common.print_config or demo):
        raise UserError(f"nothing to work on: give a run file ({prog} run.toml), or see it work with {prog} --demo")
    return resolve(
        RunConfig,
        demo=spec.demo_config if demo else None,
        stored=Path(common.run) if common.run else None,
        file=Path(common.config) if common.config else None,
        flags=flags.values,
    )


def _complain(error: UserError, status: int) -> int:
    warn(f"error: {error}")
    return status


def _stage(command: str) -> Any:
    from ditkit_core import stages  # late: what it imports takes seconds, and a mistake above is said before

    return {"train": stages.train, "encode": stages.encode, "sample": stages.sample, "export": stages.export}[command]
