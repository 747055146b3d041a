"""Does the work of a command, and explains how it ended: a mistake, an interruption, or a lack of memory."""

import importlib
import json
from typing import Any

import torch

import ditkit_core
from ditkit_core.commands.options import STAGES, describe_options, verb_of
from ditkit_core.config.schema import config_values
from ditkit_core.errors import Interrupted, UserError
from ditkit_core.io.console import warn
from ditkit_core.io.memory import is_out_of_memory, let_go, release_memory
from ditkit_core.io.torchrun import joined_ranks
from ditkit_core.models.precision import compute_fp32_in_fp32
from ditkit_core.models.spec import ModelSpec
from ditkit_core.run.config import RunConfig
from ditkit_core.run.gpus import with_kernels

_CONTINUED = (("train", ""), ("encode", ""))
"""Commands that continue from their saved state when they are run again after an interruption."""
_COMPUTING = (("train", ""), ("train", "plan"), ("train", "check"), ("train", "audit_precision"), ("sample", ""))
"""Commands that run a model on the devices of this machine, or plan to."""


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
        with joined_ranks(config.ranks, config.train.device, about) as ranks:
            if (command, verb_of(command, options)) in _COMPUTING and not getattr(options, "gpus", ""):
                config = with_kernels(config, ranks)
            status = _stage(command, options)(spec, config, options)
    except UserError as error:
        warn(f"error: {error}")
        return 1
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # Keep only text: the error refers to the frames, these refer to tensors, and the explanation needs their memory.
        failure, modules = (str(error) or type(error).__name__).splitlines()[0], let_go(error)
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
    # Outside the except block nothing refers to the error any more, nor to the model whose step failed: memory can be freed.
    release_memory()
    from ditkit_core.commands.oom import explain, measured_peaks

    training = command == "train" and not (options.plan or options.fit)
    explain(spec, config, failure, training=training, modules=modules, peaks=measured_peaks(config))
    return 1


def _stage(command: str, options: Any) -> Any:
    """The function that does the work. Its module is imported only now, because each stage imports other libraries."""
    module, function = STAGES[command, verb_of(command, options)]
    return getattr(importlib.import_module(f"ditkit_core.commands.{module}"), function)
