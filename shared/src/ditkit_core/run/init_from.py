"""`--init-from`: start a new run from the trained weights of another."""

from ditkit_core.config.nearest import path_remedy
from ditkit_core.distributed.torchrun import current_ranks
from ditkit_core.errors import UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.files import local_path
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.loading.model import Model
from ditkit_core.models.spec import Expert
from ditkit_core.run.restore import load_trained
from ditkit_core.training.checkpoint import latest


def check_start(run: str, folder: RunFolder) -> None:
    """Refuse a run whose trained weights a new run cannot start from.

    Raises:
        UserError: If it is the same run, has no save, or is of several experts.
    """
    other = RunFolder(local_path(run))
    if run and other.path.resolve() == folder.path.resolve():
        raise UserError(f"--init-from {run} is this run itself; set run.folder to a new folder")
    if not run or other.has_save:
        return
    # A run of several experts has its saves in folders inside; the error names them.
    inside = sorted(path for path in other.path.glob("*") if RunFolder(path).has_save)
    if inside and other.config_file.exists():
        raise UserError(
            f"--init-from {run} is a run of several experts, and this run trains one; name its folder: --init-from {' or '.join(map(str, inside))}"
        )
    if inside:
        more = f" and {len(inside) - 3} more" if len(inside) > 3 else ""
        raise UserError(
            f"--init-from {run} has no save; runs inside it: {', '.join(map(str, inside[:3]))}{more}; name one"
        )
    raise UserError(f"--init-from {run} has no save; name the folder of a run that was trained")


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


def start_of_expert(init_from: str, expert: Expert) -> str:
    """The folder that one expert's run starts from, if `--init-from` names a run of all experts.

    Raises:
        UserError: If that has no save of this expert.
    """
    if not init_from:
        return ""
    source = RunFolder(local_path(init_from))
    inside = RunFolder(source.path / expert.name)
    if inside.has_save:
        return str(inside.path)
    if not source.path.is_dir():
        raise UserError(f"--init-from {init_from} does not exist; {path_remedy(init_from)}")
    if source.has_save:
        raise UserError(
            f"--init-from {init_from} is a run of one transformer, and this run trains both experts; name the folder of a run of both, or train "
            f"the one expert that it trained: --experts.train NAME --init-from {init_from}"
        )
    raise UserError(
        f"--init-from {init_from} has no save of the {expert.name} expert (none in {inside.state}), and this run trains both experts; name the "
        "folder of a run of both, or train one with --experts.train NAME --init-from ITS_RUN"
    )
