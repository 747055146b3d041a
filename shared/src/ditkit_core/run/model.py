"""A run's model: built and matched with its files, loaded onto its devices, and the engine that runs it."""

import json
import platform

import torch

import ditkit_core
from ditkit_core.adapters.export import check_adapted
from ditkit_core.config.toml import to_toml
from ditkit_core.engine.ac_policies import Policy
from ditkit_core.engine.ac_schedule import ACSchedule
from ditkit_core.engine.engine import Engine
from ditkit_core.engine.placement import Placement
from ditkit_core.io.console import say
from ditkit_core.run.prepare import Prepared, Unloaded, build, load
from ditkit_core.run.run import Run
from ditkit_core.weights.metadata import published, published_part


def load_model(run: Run, unloaded: Unloaded, placement: Placement) -> Prepared:
    """Give the model its weights, on its devices.

    Args:
        run: The run.
        unloaded: The model.
        placement: Which device runs what, as the planner's `place` and `plan_placement` decide.
    """
    if len(run.devices) > 1:
        say(placement.described())
    prepared = load(unloaded, placement=placement, seed=run.config.train.seed, say=say)
    if prepared.passage is not None:
        say(prepared.passage.describe())
    return prepared


def engine_of(run: Run, prepared: Prepared, schedule: ACSchedule | None = None) -> Engine:
    """Runs the model as configured.

    Args:
        run: The run.
        prepared: The model.
        schedule: What `train.checkpointing` came to; None where nothing has a backward, and a budget need not be resolved.
    """
    config = run.config.train
    streaming = () if prepared.passage is None else (prepared.passage,)
    if schedule is None:
        schedule = config.schedule if config.schedule.budget is None else ACSchedule.everywhere(Policy())
    return Engine(policy=schedule, backend=config.attention, compile=config.compile, passages=streaming)


def build_model(run: Run) -> Unloaded:
    """The model on `meta`, its files matched and its adapters in place: what is wrong with either shows here."""
    config = run.config
    sections = (config.model, config.adapter, config.base)
    unloaded = build(run.spec, *sections, precision=run.precision, part=run.part, say=say)
    check_adapted(run.spec, config.export, unloaded.model)
    return unloaded


def export_metadata(run: Run, prepared: Prepared, step: int, *, data: str) -> dict[str, str]:
    """What a file's header says about where it came from; no folder of this machine is named."""
    versions = {"ditkit": ditkit_core.__version__, "torch": torch.__version__, "python": platform.python_version()}
    model, expert = run.config.model, run.expert
    return {
        "ditkit.model": run.spec.name,
        "ditkit.base": published_part(getattr(model, run.part) or model.base),
        **({} if expert is None else {"ditkit.expert": expert.name}),
        "ditkit.preset": prepared.preset,
        "ditkit.step": str(step),
        "ditkit.data": data,
        "ditkit.config": to_toml(run.config, shown=published),
        "ditkit.versions": json.dumps(versions),
    }
