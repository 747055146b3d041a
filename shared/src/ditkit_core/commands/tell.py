"""`train --tell`: tells a run that trains in another process to sample, to save or to stop. It
needs no model and no torch."""

from ditkit_core.commands.options import TrainOptions
from ditkit_core.io.console import say
from ditkit_core.io.run_requests import ask
from ditkit_core.run.config import RunConfig


def tell_run(config: RunConfig, options: TrainOptions) -> None:
    """Ask the run for what `options.tell` names, and say what follows."""
    folder = config.run_folder
    say(f"tell:     {folder.path}: {ask(folder, options.tell)}")
