"""A run's model: built on `meta`, matched with its files and loaded onto its devices."""

import json
import platform

import torch

import ditkit_core
from ditkit_core.adapters.files.entry import parse_merge
from ditkit_core.adapters.files.export import check_adapted
from ditkit_core.adapters.inject import module_of, trainable_parameters
from ditkit_core.config.schema import config_values
from ditkit_core.config.toml import to_toml
from ditkit_core.distributed.ranks import Ranks
from ditkit_core.engine.placement import Placement
from ditkit_core.engine.token_route import router_of
from ditkit_core.io.console import say
from ditkit_core.io.files import local_path
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.io.trackers import TrackedRun
from ditkit_core.loading.model import Model
from ditkit_core.loading.on_meta import model_on_meta
from ditkit_core.loading.weights import engine_for, load_divided, load_weights
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext
from ditkit_core.run.jobs import TrainingJob
from ditkit_core.run.plans.planned_step import place_run
from ditkit_core.training.optim.optimizer import check_rates
from ditkit_core.weights.metadata import redact_path, redact_paths


def load_model(
    unloaded: Model, placement: Placement, seed: int, ranks: Ranks | None = None
) -> Model:
    """Load the weights onto the devices of a placement, with the adapters' first values by the
    run's seed. Where ranks divide the weights, each loads its rows."""
    if ranks is not None and ranks.shard > 1:
        return load_divided(unloaded, placement, ranks, placement.embed, seed=seed)
    if placement.split_points:
        say(placement.described())
    prepared = load_weights(unloaded, placement=placement, seed=seed)
    if prepared.streamer is not None:
        say(prepared.streamer.describe())
    return prepared


def load_to_sample(run: RunContext, unloaded: Model, ranks: Ranks | None = None) -> Model:
    """Load the weights onto the run's devices, with the engine that samples with them."""
    prepared = load_model(unloaded, place_run(run, unloaded), run.config.train.seed, ranks)
    prepared.engine = engine_for(prepared, run.execution)
    return prepared


def build_model(run: RunContext) -> Model:
    """The model on `meta`, matched with its files and with its adapters injected. Faults of either
    are raised here."""
    config = run.config
    sections = (config.model, config.adapter, config.base)
    unloaded = model_on_meta(
        run.spec, *sections, precision=run.precision, component=run.component, say=say
    )
    check_adapted(run.spec, config.export, unloaded.module)
    check_rates(config.optim, list(map(module_of, trainable_parameters(unloaded.module))))
    streams = run.spec.architecture.token_streams(unloaded.origin.arch)
    router_of(run.execution.routing, len(unloaded.module.blocks()), streams)
    return unloaded


def fingerprints_of(config: RunConfig, component: str, base: SafetensorsSource) -> dict[str, str]:
    """Of the weights of the base, and of each adapter file that is merged into it, stays next to it
    or starts what is trained: by key."""
    named = enumerate(config.base.files(component))
    paths = {f"{key}[{index}]": parse_merge(entry, key)[0] for index, (key, entry) in named}
    if config.adapter.init:
        paths["adapter.init"] = local_path(config.adapter.init)
    return {"base": base.fingerprint()} | {
        key: SafetensorsSource.open(path).fingerprint() for key, path in paths.items()
    }


def tracked_run(run: RunContext, folder: RunFolder) -> TrackedRun:
    """What trackers show of a run: the part of a run of several experts has that run's name before
    its own."""
    is_part = run.expert is not None and folder.name == run.expert.name
    name = f"{RunFolder(folder.path.parent).name}-{folder.name}" if is_part else folder.name
    return TrackedRun(name=name, settings=redact_paths(type(run.config), config_values(run.config)))


def export_metadata(job: TrainingJob, prepared: Model, step: int, *, data: str) -> dict[str, str]:
    """The header of an exported file: where it came from. Paths of this machine are redacted."""
    versions = {
        "ditkit": ditkit_core.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    run = job.run
    model = run.config.model
    return {
        "ditkit.model": run.spec.name,
        "ditkit.base": redact_path(getattr(model, run.component) or model.base),
        **({"ditkit.expert": job.name} if job.name else {}),
        "ditkit.preset": prepared.origin.preset,
        "ditkit.step": str(step),
        "ditkit.data": data,
        "ditkit.config": to_toml(run.config, shown=redact_paths),
        "ditkit.versions": json.dumps(versions),
    }
