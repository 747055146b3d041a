"""Loads the trained weights of a save, or of a preview, into a model."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.config.resolve import resolve
from ditkit_core.distributed.torchrun import current_ranks
from ditkit_core.errors import UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.files import local_path
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.loading.model import Model
from ditkit_core.nn.parameters import copy_values
from ditkit_core.run.checks import check_same_adapter, check_start
from ditkit_core.run.config import RunConfig
from ditkit_core.training.checkpoint import GROUPS, State, best, check_save, latest, load_state
from ditkit_core.training.train_state import TrainState, saved_weights


def load_trained(
    prepared: Model,
    folder: RunFolder,
    step: int | Literal["best"] | None = None,
    *,
    verified: Path | None = None,
) -> int:
    """Load the weights of a run's save (the averaged ones, if it has any) into the model: of a
    step, of the lowest validation loss, or of the latest; or of a save whose files are known to be
    intact. Returns the save's step."""
    path = verified or _save(folder, step)
    # The settings of that run, not of this one: they decide whether averaged weights are used, and
    # the scale of the adapter.
    stored = resolve(RunConfig, stored=folder.path)
    check_same_adapter(prepared.origin.adapter, folder, stored.adapter, prepared.origin.merge_key)
    if step is not None:  # `latest` has verified the latest
        check_save(path)
    shards, averages = prepared.shards, stored.optim.kind.averages
    # The optimizer's state is several times as large as the weights, and few optimizers need it for
    # the weights to use.
    state = load_state(path, shards, GROUPS if averages else ("trainable", "ema"))
    # of its rows, each rank sets its own
    with prepared.readable() if shards is None else nullcontext():
        parameters = trainable_parameters(prepared.module) if shards is None else prepared.trainable
        if averages:
            used = _averaged(prepared, stored, state, parameters, path)
        else:
            used = {**saved_weights(state, parameters, path)}
            if stored.ema.decay:
                used |= {
                    name: value
                    for name, value in state.tensors.get("ema", {}).items()
                    if name in used
                }
        copy_values(parameters, used)
    # Blocks that are on a device already have the old values, and so has what was gathered for a
    # forward.
    if prepared.streamer is not None:
        prepared.streamer.host_changed()
    if shards is not None:
        shards.changed()
    return state.step


def _averaged(
    prepared: Model,
    stored: RunConfig,
    state: State,
    parameters: Mapping[str, nn.Parameter],
    path: Path,
) -> dict[str, Tensor]:
    """The weights that an optimizer which averages them itself makes from its state; the parameters
    change meanwhile."""
    # Streamed weights are set on the host. The optimizer updates nothing here, so its state is not
    # streamed, whatever its settings.
    optim = replace(stored.optim, fused_backward=False)
    trained = TrainState(prepared.module, parameters, optim, stored.ema, shards=prepared.shards)
    trained.load_state_dict(state, path)
    with trained.used():
        return {name: value.detach().clone() for name, value in parameters.items()}


def _save(folder: RunFolder, step: int | Literal["best"] | None) -> Path:
    if step == "best":
        best_save = best(folder.state)
        path = None if best_save is None else best_save.path
    else:
        path = latest(folder.state, warn) if step is None else folder.save(step)
    if path is not None and path.is_dir():
        return path
    saves = ", ".join(sorted(save.name for save in folder.state.glob("step-*"))) or "none"
    remedy = (
        "name a run that was trained"
        if step is None or saves == "none"
        else "choose another --step"
    )
    if step == "best" and saves != "none":
        remedy = "none of them has a validation loss, set held_out.clips when you train, or choose a --step by its number"
    raise UserError(f"{folder.path} has no such save (it has {saves}); {remedy}")


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
