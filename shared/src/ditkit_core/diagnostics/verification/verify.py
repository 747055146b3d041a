"""Compares exports with the model that was trained, on the host: matrix by matrix, whatever devices
or ranks the run trains on."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ditkit_core.adapters.config import AdapterConfig, BaseConfig
from ditkit_core.diagnostics.verification.exported import (
    Exported,
    Result,
    read_results,
    unverified,
    write_result,
)
from ditkit_core.errors import UserError, given_to_library
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.loading.model import Model
from ditkit_core.models.protocol import run_plain
from ditkit_core.models.spec import ModelSpec
from ditkit_core.run.context import RunContext
from ditkit_core.run.read_at_use import read_at_use
from ditkit_core.run.restore import load_trained


def verify_waiting(run: RunContext, folder: RunFolder, skipped: Collection[str] = ()) -> None:
    """Verify the exports of a run's folder that have no result, including those that are added
    meanwhile.

    Another model is built on the host for it. The one that trains, and the random numbers of this
    process, stay as they are.

    Args:
        skipped: Names of exports to leave alone.
    """
    adapted: Model | None = None
    gone: set[str] = set()
    failure: UserError | None = None
    with torch.random.fork_rng(devices=[]):
        while left := unverified(folder, {*skipped, *gone}):
            export = left[0]
            # Whatever diffusers and peft raise: a mistake in there, or in here, must not end the
            # training that goes on.
            problem = f"{export.path}: comparing it with diffusers failed"
            try:
                with given_to_library(
                    problem, "training goes on; load the file yourself before you use it"
                ):
                    # first: a file that changes while it is compared is compared again
                    about = Result.of(export)
                    result = _copied(export, about)
                    if result is None:
                        if adapted is None and not export.is_whole:
                            # The run's base with an adapter on it, whose values are still to be
                            # loaded.
                            parts = run.config.model, run.config.adapter, run.config.base
                            adapted = read_at_use(run.spec, *parts, component=run.component)
                        result = _compared(
                            run.spec, run.config.model, run.component, export, about, adapted
                        )
            except UserError as error:
                if export.is_left:
                    failure = failure or error  # a damaged save leaves the others to be verified
                gone.add(export.name)  # or removed meanwhile, as each save is in its turn
                continue
            write_result(export, result)
    if failure is not None:
        raise failure


def _copied(export: Exported, about: Result) -> Result | None:
    """The result of a file with the same bytes: the finished adapter has the bytes of the last
    save."""
    for name, result in read_results(export.folder).items() if about.digest else ():
        if result.agrees and result.digest == about.digest:
            return replace(about, line=result.line.replace(name, export.path.name), agrees=True)
    return None


def _compared(
    spec: ModelSpec,
    model_paths: Any,
    component: str,
    export: Exported,
    about: Result,
    adapted: Model | None,
) -> Result:
    """The result of comparing an export; UserError if there is nothing to compare it with."""
    adapters = spec.adapters
    verify: Callable[[], str]
    if adapted is None or export.is_whole:
        assert adapters.verify_whole is not None, "its header says that it has no reader"
        # The base's own folder stays known: it may have the description of the architecture.
        paths = replace(model_paths, **{component: str(export.path)})
        full_model = read_at_use(
            spec, paths, AdapterConfig(method="full"), BaseConfig(), component=component
        )
        verify = partial(
            adapters.verify_whole, export.path, export.form, full_model.module, run_plain
        )
    else:
        assert adapters.verify is not None, "its header says that it has no reader"
        load_trained(adapted, export.folder, export.step)
        # The weights that were trained, which may be the second expert's.
        paths = replace(model_paths, transformer=str(adapted.origin.stored.source.path))
        verify = partial(adapters.verify, export.path, paths, adapted.module, run_plain)
    try:
        return replace(about, line=verify(), agrees=True)
    except UserError as error:
        return replace(about, line=str(error), agrees=False)
