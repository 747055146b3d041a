"""A program on two ranks that torchrun's own agent forks, for tests of recipes, of the library and
of Wan's command.

    python program_on_ranks.py FOLDER PROGRAM MODULE...
"""

import os
import runpy
import sys
from importlib import import_module
from pathlib import Path

import torch
from cases_at_once import launch


def work(folder: Path, program: str) -> None:
    """What a rank does."""
    os.chdir(folder)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    where, file, *modules = sys.argv[1:]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    # Imported once, not by each rank.
    for module in modules:
        import_module(module)
    sys.exit(launch(work, Path(where), file).get("said"))
