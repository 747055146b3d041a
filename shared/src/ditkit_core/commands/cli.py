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
from ditkit_core.commands.options import EncodeOptions, ExportOptions, SampleOptions, TrainOptions
from ditkit_core.config.cli_args import Flags, format_help, read_flags
from ditkit_core.config.resolve import resolve
from ditkit_core.config.toml import to_toml
from ditkit_core.errors import Stopped, UserError
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

ABOUT = {
    "train": "Train an adapter or all weights from media files: encodes what is not encoded yet, trains, samples, exports.",
    "encode": "Encode media and captions into the cache that training reads.",
    "sample": "Draw samples with a trained adapter.",
    "export": "Write a run's adapter for other programs; or inspect, convert, reduce, merge or extract adapter files.",
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
        The exit status: 0; 1 for a mistake that a stage met; 2 for one in the command line or the run file; 3 for a plan that does not
        fit; 130 when interrupted. Other exceptions are faults of ours and propagate.
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
        config = _resolve(prog, spec, flags)
    except UserError as error:
        return _complain(error, 2)
    if command == "train" and (misplaced := _misplaced(flags.options)):
        return _complain(misplaced, 2)
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
        failure, modules = (str(error) or type(error).__name__).splitlines()[0], let_go(error)
    except Stopped as stopped:
        warn(str(stopped))
        return 130
    except KeyboardInterrupt:
        if not _goes_on(command, flags.options):
            raise
        warn("interrupted: what was encoded and saved is kept, and the same command continues")
        return 130
    else:
        return status or 0
    # From here on nothing holds the error any more, nor the model whose step it ended.
    release_memory()
    from ditkit_core.commands.oom import explain, measured_peaks

    training = command == "train" and not (flags.options.plan or flags.options.fit)
    explain(spec, config, failure, training=training, modules=modules, peaks=measured_peaks(config))
    return 1


def _resolve(prog: str, spec: ModelSpec, flags: Flags) -> RunConfig:
    common, demo = flags.common, flags.options.demo
    on_files = isinstance(flags.options, ExportOptions) and flags.options.on_files
    if not (flags.values or common.config or common.run or common.print_config or demo or on_files):
        raise UserError(f"nothing to work on: give a run file ({prog} run.toml), or see it work with {prog} --demo")
    return resolve(
        RunConfig,
        demo=spec.demo.config if demo else None,
        stored=Path(common.run) if common.run else None,
        file=Path(common.config) if common.config else None,
        flags=flags.values,
    )


def _misplaced(options: TrainOptions) -> UserError | None:
    """What is wrong with options that go with others."""
    if options.audit_precision and (options.plan or options.fit):
        other = "plan" if options.plan else "fit"
        return UserError(
            f"--audit-precision and --{other}: one computes, the other needs no weights; leave one of them out"
        )
    if options.report and (options.plan or options.fit or options.audit_precision):
        return UserError(
            "--report writes the page of a run and stops; give it without --plan, --fit and --audit-precision"
        )
    others = {
        "plan": options.plan,
        "fit": options.fit,
        "audit-precision": options.audit_precision,
        "report": options.report,
    }
    if options.check and any(others.values()):
        other = next(name for name, given in others.items() if given)
        return UserError(f"--check and --{other}: each does its work and stops; leave one of them out")
    if options.plan and options.fit:
        return UserError("--plan and --fit: --fit says what its choice will hold as well; leave one of them out")
    if options.gpus and not (options.plan or options.fit):
        return UserError("--gpus says what to plan for; give --plan or --fit with it, or set train.devices to train")
    if options.host and not (options.plan or options.fit):
        return UserError("--host says what to plan with; give --plan or --fit with it")
    if options.write and not options.fit:
        return UserError("--write saves the configuration that --fit chose; give --fit with it")
    if options.json and not (options.plan or options.audit_precision or options.check):
        return UserError("--json prints a plan, an audit or a check; give --plan with it, --audit-precision or --check")
    return None


def _goes_on(command: str, options: Any) -> bool:
    """Whether a command that was interrupted continues from what it kept when it is given again."""
    if command == "train":
        return not (options.plan or options.fit or options.check or options.report or options.audit_precision)
    return command == "encode"


def _complain(error: UserError, status: int) -> int:
    warn(f"error: {error}")
    return status


def _stage(command: str, options: Any) -> Any:
    # late: what they import takes seconds, and a mistake above is said before
    if command == "train" and options.report:
        from ditkit_core.commands.report import report

        return report
    if command == "train" and options.fit:
        from ditkit_core.commands.fit import fit_stage

        return fit_stage
    if command == "train" and options.audit_precision:
        from ditkit_core.commands.audit import audit_precision

        return audit_precision
    if command == "train" and options.check:
        from ditkit_core.commands.check import check_run

        return check_run
    if command == "train" and options.plan:
        from ditkit_core.commands.plan import plan

        return plan
    if command == "sample":
        from ditkit_core.commands.sample import sample

        return sample
    if command == "export" and options.on_files:
        from ditkit_core.commands.convert import work_on_file

        return work_on_file
    if command == "export":
        from ditkit_core.commands.export import export

        return export
    if command == "train":
        from ditkit_core.commands.train_experts import train

        return train
    from ditkit_core.commands.train import encode

    return encode
