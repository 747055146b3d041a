"""A run's model: built on `meta`, matched with its files and loaded onto its devices, and the engine that runs it."""

import json
import platform
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

import ditkit_core
from ditkit_core.adapters.files.export import check_adapted
from ditkit_core.adapters.files.merge import parse_merge
from ditkit_core.adapters.inject import canonical_name, is_adapter_name, module_of, trainable_parameters
from ditkit_core.config.schema import config_values
from ditkit_core.config.toml import to_toml
from ditkit_core.engine.ac_policies import Policy
from ditkit_core.engine.ac_schedule import ACSchedule
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.engine.placement import Placement
from ditkit_core.engine.sharding.context_parallel import ContextParallel
from ditkit_core.io.console import say
from ditkit_core.io.files import local_path
from ditkit_core.io.ranks import Ranks
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.io.trackers import TrackedRun
from ditkit_core.loading.meta_model import MetaModel, build_meta_model, loaded_dtype
from ditkit_core.loading.model import Model
from ditkit_core.loading.weights import load_weights
from ditkit_core.nn.quantized_linear import final_dtype
from ditkit_core.run.context import RunContext
from ditkit_core.training.optim.optimizer import check_rates
from ditkit_core.weights.metadata import redact_path, redact_paths


def load_model(run: RunContext, unloaded: MetaModel, placement: Placement) -> Model:
    """Load the weights onto their devices.

    Args:
        placement: Which device runs what, as the planner's `place` and `plan_placement` decide.
    """
    if len(run.devices) > 1:
        say(placement.described())
    prepared = load_weights(unloaded, placement=placement, seed=run.config.train.seed, say=say)
    if prepared.streamer is not None:
        say(prepared.streamer.describe())
    return prepared


def load_divided(run: RunContext, unloaded: MetaModel, placement: Placement, ranks: Ranks) -> Model:
    """Load the weights of which this rank keeps some rows, onto its device: unchanged `load_model` if `ranks.shard` is 1.

    The model is divided before it has values, and each rank reads its rows.
    """
    if ranks.shard == 1:
        return load_model(run, unloaded, placement)
    from ditkit_core.engine.sharding.division import Division  # imports parts of torch that take seconds
    from ditkit_core.engine.sharding.shards import Shards

    device = run.devices[0]
    give_dtypes(unloaded, loaded_dtype(run.spec, run.precision))
    division = Division(unloaded.model, trainable_parameters(unloaded.model), run.precision, ranks, device)
    prepared = load_weights(unloaded, placement=placement, seed=run.config.train.seed, division=division, say=say)
    shards = Shards(prepared.module, prepared.trainable, run.precision, ranks, device, division)
    return replace(prepared, shards=shards, trainable=shards.local)


def give_dtypes(unloaded: MetaModel, dtype_of: Callable[[str], torch.dtype]) -> None:
    """Give the parameters on `meta` the dtypes that they will have, by which they are gathered together."""
    for prefix, module in unloaded.model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{prefix}.{leaf}"
                default = torch.float32 if is_adapter_name(name) else dtype_of(canonical_name(name))
                given = torch.empty_like(parameter, dtype=final_dtype(module, leaf, default))
                module._parameters[leaf] = nn.Parameter(given, requires_grad=parameter.requires_grad)


def engine_of(
    run: RunContext, prepared: Model, schedule: ACSchedule | None = None, ranks: Ranks | None = None
) -> BlockEngine:
    """The engine that runs the model as configured.

    Args:
        schedule: The resolved `train.checkpointing`; None for inference, where a budget need not be resolved.
        ranks: Those that train, and share each sample's tokens if they are in groups. None for inference on this rank alone.
    """
    config = run.config.train
    streaming = () if prepared.streamer is None else (prepared.streamer,)
    # Without a backward, a budget of memory has nothing to decide: any policy runs the same forward.
    if schedule is None:
        schedule = config.schedule if config.schedule.budget is None else ACSchedule.everywhere(Policy())
    context = None
    if ranks is not None and ranks.context > 1:
        streams = run.spec.architecture.token_streams(run.arch)
        assert streams is not None, "refused by check_ranks"
        context = ContextParallel(ranks, streams)
    return BlockEngine(
        policy=schedule,
        backend=config.attention,
        kernels=config.kernels,
        compile=config.compile,
        hooks=streaming,
        context=context,
    )


def build_model(run: RunContext) -> MetaModel:
    """The model on `meta`, matched with its files and with its adapters injected. Faults of either are raised here."""
    config = run.config
    sections = (config.model, config.adapter, config.base)
    unloaded = build_meta_model(run.spec, *sections, precision=run.precision, component=run.component, say=say)
    check_adapted(run.spec, config.export, unloaded.model)
    check_rates(config.optim, list(map(module_of, trainable_parameters(unloaded.model))))
    return unloaded


def fingerprints_of(run: RunContext, base: SafetensorsSource) -> dict[str, str]:
    """Of the base, and of each adapter file that is merged into it, stays next to it or starts what is trained: by key."""
    named = enumerate(run.config.base.files(run.component))
    paths = {f"{key}[{place}]": parse_merge(entry, key)[0] for place, (key, entry) in named}
    if run.config.adapter.init:
        paths["adapter.init"] = local_path(run.config.adapter.init)
    return {"base": base.fingerprint()} | {
        key: SafetensorsSource.open(path).fingerprint() for key, path in paths.items()
    }


def tracked_run(run: RunContext, folder: RunFolder) -> TrackedRun:
    """What trackers show of a run: the part of a run of several experts has that run's name before its own."""
    is_part = run.expert is not None and folder.name == run.expert.name
    name = f"{RunFolder(folder.path.parent).name}-{folder.name}" if is_part else folder.name
    return TrackedRun(name=name, settings=redact_paths(type(run.config), config_values(run.config)))


def export_metadata(run: RunContext, prepared: Model, step: int, *, data: str) -> dict[str, str]:
    """The header of an exported file: where it came from. Paths of this machine are redacted."""
    versions = {"ditkit": ditkit_core.__version__, "torch": torch.__version__, "python": platform.python_version()}
    model, expert = run.config.model, run.expert
    return {
        "ditkit.model": run.spec.name,
        "ditkit.base": redact_path(getattr(model, run.component) or model.base),
        **({} if expert is None else {"ditkit.expert": expert.name}),
        "ditkit.preset": prepared.origin.preset,
        "ditkit.step": str(step),
        "ditkit.data": data,
        "ditkit.config": to_toml(run.config, shown=redact_paths),
        "ditkit.versions": json.dumps(versions),
    }
