"""Does the work of a command, and explains how it ended: a mistake, an interruption, or a lack of
memory."""

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import ditkit_core
from ditkit_core.commands.options import STAGES, describe_options, verb_of
from ditkit_core.config.schema import config_values
from ditkit_core.distributed.launch import launched
from ditkit_core.distributed.torchrun import joined_ranks
from ditkit_core.errors import Interrupted, UserError
from ditkit_core.io.console import keep_log, note, warn
from ditkit_core.io.memory import is_out_of_memory, release_frames, release_memory
from ditkit_core.models.precision import compute_fp32_in_fp32
from ditkit_core.models.spec import ModelSpec
from ditkit_core.run.config import RunConfig
from ditkit_core.run.gpus import with_kernels

_CONTINUED = (("train", ""), ("encode", ""), ("caption", ""))
"""Commands that continue from their saved state when they are run again after an interruption."""
_COMPUTING = (
    ("train", ""),
    ("train", "plan"),
    ("train", "check"),
    ("train", "audit_precision"),
    ("sample", ""),
    ("sample", "on_sheet"),
)
"""Commands that run a model on the devices of this machine, or plan to."""


@contextmanager
def _log_ended() -> Iterator[None]:
    """End the log that a run began to keep, with the name of a fault of ours, whose traceback
    Python prints."""
    try:
        yield
    finally:
        if error := sys.exc_info()[1]:
            note(f"{type(error).__name__}: {error}")
        keep_log(None)


@_log_ended()
def run_stage(spec: ModelSpec, command: str, config: RunConfig, options: Any) -> int:
    """Do the work of a command.

    Returns:
        The exit status, as of `cli.start`.
    """
    compute_fp32_in_fp32()
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    about = {
        "ditkit version": ditkit_core.__version__,
        "torch version": torch.__version__,
        "set of options": describe_options(options),
    }
    about |= {key: json.dumps(value) for key, value in config_values(config).items()}
    try:
        with (
            _told(command, config, options),
            joined_ranks(config.ranks, config.train.device, about) as ranks,
        ):
            if (command, verb_of(command, options)) in _COMPUTING and not getattr(
                options, "gpus", ""
            ):
                config = with_kernels(config, ranks)
            status = _stage(command, options)(spec, config, options)
    except UserError as error:
        warn(f"error: {error}")
        return 1
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # Keep only text: the error refers to the frames, these refer to tensors, and the
        # explanation needs their memory.
        failure = (str(error) or type(error).__name__).splitlines()[0]
        modules = release_frames(error)
    except Interrupted as stopped:
        warn(str(stopped))
        return 130
    except KeyboardInterrupt:
        if (command, verb_of(command, options)) not in _CONTINUED:
            raise
        warn("interrupted: what was encoded and saved is kept, and the same command continues")
        return 130
    else:
        return status or 0
    # Outside the except block nothing refers to the error any more, nor to the model whose step
    # failed: memory can be freed.
    release_memory()
    from ditkit_core.commands.oom import explain, measured_peaks

    training = command == "train" and not (options.plan or options.fit)
    explain(spec, config, failure, training=training, modules=modules, peaks=measured_peaks(config))
    return 1


@contextmanager
def _told(command: str, config: RunConfig, options: Any) -> Iterator[None]:
    """Call `run.on_end` or `run.on_error` when a training ends inside of the block, however it
    ends; on the first rank alone."""
    launch, run = launched(), config.run
    is_training = (command, verb_of(command, options)) == ("train", "") and not (
        launch and launch.rank
    )
    if not is_training or not (run.on_end or run.on_error):
        yield
        return
    from ditkit_core.commands.report import tell

    before = config.run_folder.completion()
    try:
        yield
    finally:
        # Whatever ends it: a mistake, a lack of memory, a signal, or a fault of ours, which keeps
        # its traceback.
        error = sys.exc_info()[1]
        if error is not None:
            is_stopped = isinstance(error, Interrupted | KeyboardInterrupt)
            tell(
                config,
                (" ".join(str(error).split()) or type(error).__name__)[:2000],
                is_stopped=is_stopped,
            )
        elif config.run_folder.completion() != before:  # not of a run that was complete already
            tell(config)


def _stage(command: str, options: Any) -> Any:
    """The function that does the work. Its module is imported only now, because each stage imports
    other libraries."""
    module, function = STAGES[command, verb_of(command, options)]
    return getattr(importlib.import_module(f"ditkit_core.commands.{module}"), function)
