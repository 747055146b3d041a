"""The processes that train a run on this machine, and the words that start them: of a recipe, a run
in the queue, or one that the page starts."""

import os
import sys
from collections.abc import Sequence

from ditkit_core.commands.options import command_line


def num_processes(group_size: int, num_gpus: int) -> int:
    """Processes that train a run on so many GPUs of this machine, 0 if it has none.

    Args:
        group_size: `RanksConfig.group_size`. A single process has all of the GPUs; else each has
            one, and their number is a multiple of this.
    """
    return group_size * max(1, num_gpus // group_size) if group_size > 1 else 1


def launch_words(program: Sequence[str], processes: int) -> list[str]:
    """The words that start a program in so many processes of this machine; several meet at a free
    port."""
    if processes == 1:
        return list(program)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(processes), "--no-python", *program]


def train_line(family: str, file: str, processes: int) -> str:
    """The command for the user's shell that trains a run file in so many processes."""
    if processes == 1:
        return command_line(f"{family}-train", file)
    launcher = ("torchrun", "--nproc-per-node", str(processes))
    return command_line(*launcher, "-m", f"ditkit_{family}.train", file)


def program_words() -> list[str]:
    """The words that start the program that runs now."""
    program = os.path.abspath(sys.argv[0])
    is_script = program.endswith(".py") or not os.access(program, os.X_OK)
    return [sys.executable, program] if is_script else [program]
