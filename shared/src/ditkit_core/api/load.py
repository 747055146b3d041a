"""Loads a model of a family for any Python program: `load`."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ditkit_core.adapters.config import AdapterConfig, BaseConfig
from ditkit_core.config.nearest import check_arguments
from ditkit_core.distributed.ranks import Ranks, RanksConfig, world
from ditkit_core.engine.placement import Placement
from ditkit_core.errors import UserError, argument
from ditkit_core.execution import Execution
from ditkit_core.io.files import local_path
from ditkit_core.loading.architecture import arch_here
from ditkit_core.loading.kernels import resolve_kernels
from ditkit_core.loading.model import Model
from ditkit_core.loading.on_meta import model_on_meta
from ditkit_core.loading.weights import engine_for, load_divided, load_weights
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision, parse_dtype
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner import partition
from ditkit_core.planner.planned_step import StepJob

_LOGGER = getLogger(__name__)
ModelSource = str | Path | ModelPaths
"""A folder in diffusers layout or hub id, the folder or .safetensors file of a transformer, or a
path for each component."""


def load(
    spec: ModelSpec,
    path: ModelSource,
    adapter: AdapterConfig | str | Path | None = None,
    *,
    execution: Execution | None = None,
    merge: Sequence[str | Path] = (),
    component: str = "transformer",
    seed: int = 0,
    batch: Sequence[Mapping[str, Tensor]] = (),
    **how: Any,
) -> Model:
    """Load a model's weights onto its devices, with an adapter to train or without.

        base = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
        model = load(WAN, base, LoraConfig(r=16), checkpointing="attn_only", dtype="bf16")

    Args:
        spec: The family.
        path: A folder in diffusers layout or a hub id, a transformer's folder or file, or
            `ModelPaths` for a path of each component.
        adapter: What to train: a `LoraConfig`, an adapter file to start from, or
            `LoraConfig(method="full")` for all weights. None trains nothing.
        execution: How it runs: devices, streamed blocks, checkpointing, quantization and more.
        merge: LoRA files to merge into the weights, each as FILE or FILE@strength.
        component: The one to load of a model with several transformers: `transformer` or
            `transformer_2`.
        seed: Seed of the adapter's first values.
        batch: A micro-batch, whose shapes alone count: several GPUs without split points are split
            by the memory of a step with it, and a budget of checkpointing is resolved by it. Empty:
            one sample of the model's own size.
        how: Fields of `Execution` instead of a value of it, or `dtype`, short for its precision:
            `bf16`, `fp16` or `fp32`, of the frozen base and of matmuls; or `shard`, short for its
            ranks: how many processes divide the weights.

    Raises:
        UserError: If a file is missing, damaged or does not fit, or a setting does not fit the
            model or this machine.
    """
    paths, execution = paths_of(path), execution_from("load", execution, how)
    arch = arch_here(spec, paths, fetch=True)[1]
    files = tuple(str(file) for file in merge)
    is_second = component == "transformer_2"
    merged = BaseConfig(merge=() if is_second else files, merge_low=files if is_second else ())
    base = execution.within(merged)
    if isinstance(adapter, str | Path):
        adapter = AdapterConfig(init=str(adapter))
    unloaded = model_on_meta(
        spec.for_arch(arch),
        paths,
        adapter,
        base,
        precision=execution.precision,
        component=component,
        say=_LOGGER.info,
    )
    devices, ranks = execution.torch_devices, _ranks(execution)
    kernels = resolve_kernels(execution.kernels, devices)
    placement = _place(unloaded, replace(execution, kernels=kernels), batch)
    if ranks.shard == 1:
        model = load_weights(unloaded, placement=placement, seed=seed)
    else:
        model = load_divided(unloaded, placement, ranks, devices[0], seed=seed)
        assert model.shards is not None
        model.shards.divide_gradients_by(ranks.size)  # a loop of one's own has a mean on each rank
    model.engine = engine_for(model, replace(execution, kernels=kernels), placement.checkpointing)
    return model


def paths_of(path: ModelSource) -> ModelPaths:
    """The paths of a model's components."""
    if isinstance(path, ModelPaths):
        return path
    source = local_path(str(path))
    # The folder of a transformer has its weights, and the folder of a complete model has folders.
    if source.is_file() or (source.is_dir() and any(source.glob("*.safetensors"))):
        return ModelPaths(transformer=str(path))
    return ModelPaths(base=str(path))


def execution_from(function: str, execution: Execution | None, how: Mapping[str, Any]) -> Execution:
    """A value with some fields replaced; `dtype` is for matmuls, and `shard` is the number of ranks
    that divide the weights.

    `function` is the one that got them as keyword arguments, for errors.
    """
    check_arguments(function, how, (*(field.name for field in fields(Execution)), "dtype", "shard"))
    changes = {name: value for name, value in how.items() if name not in ("dtype", "shard")}
    if "dtype" in how:
        changes["precision"] = Precision(matmul=parse_dtype(how["dtype"]))
    if "shard" in how:
        changes["ranks"] = RanksConfig(shard=how["shard"])
    return replace(execution or Execution(), **changes)


def _place(
    unloaded: Model, execution: Execution, batch: Sequence[Mapping[str, Tensor]]
) -> Placement:
    """Which device runs which block, which blocks are streamed, and the policy of each."""
    if not batch and partition.needs_profile(execution):
        batch = empty_batch(unloaded.spec, unloaded.origin.arch)
    job = StepJob(
        spec=unloaded.spec,
        arch=unloaded.origin.arch,
        batch=[{name: tensor.to("meta") for name, tensor in item.items()} for item in batch],
        execution=execution,
        adapter=unloaded.origin.trained or AdapterConfig(),
        kind=execution.torch_devices[0].type,
    )
    return partition.placement_of(
        unloaded.module, job, training=unloaded.origin.trained is not None
    )


def empty_batch(
    spec: ModelSpec, arch: Any, size: tuple[int, int, int] | None = None, count: int = 1
) -> list[dict[str, Tensor]]:
    """A micro-batch of `count` samples without values, on `meta`, of a size in frames, height and
    width; None for the model's own."""
    with torch.device("meta"):
        return [spec.training.empty_item(arch, size or spec.data.size, ()) for _ in range(count)]


def _ranks(execution: Execution) -> Ranks:
    """The processes that divide the weights."""
    wanted, ranks = execution.ranks, world()
    if wanted.context > 1:
        raise UserError(
            f"{argument('ranks.context')} = {wanted.context} is for the train command; leave it out"
        )
    if wanted.shard == 1:
        return Ranks()
    if ranks is None:
        raise UserError(
            f"{argument('ranks.shard')} = {wanted.shard} needs as many processes: start with "
            f"torchrun and call torch.distributed.init_process_group first"
        )
    if ranks.size % wanted.shard:
        raise UserError(
            f"{argument('ranks.shard')} = {wanted.shard} does not divide {ranks.size} ranks; set "
            f"it to {ranks.size}"
        )
    return replace(ranks, shard=wanted.shard)
