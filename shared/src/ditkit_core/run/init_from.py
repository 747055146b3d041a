"""`--init-from`: start a new run from the trained weights of another."""

from ditkit_core.distributed.torchrun import current_ranks
from ditkit_core.io.console import say, warn
from ditkit_core.io.files import local_path
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.loading.model import Model
from ditkit_core.run.checks import check_start
from ditkit_core.run.restore import load_trained
from ditkit_core.training.checkpoint import latest


def start_from(run: str, prepared: Model, folder: RunFolder) -> None:
    """Load the trained weights of another run, unless this run already has a save of its own."""
    other = RunFolder(local_path(run))

    def chosen() -> str:
        if not run or latest(folder.state, warn) is not None:
            return ""
        check_start(run, folder)
        save = latest(other.state, warn)
        return "" if save is None else save.name

    # The first rank compares the files with their digests, for all.
    if name := current_ranks().on_first(chosen):
        step = load_trained(prepared, other, verified=other.state / name)
        say(f"starting from the weights of {run} at step {step}")
