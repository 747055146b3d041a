"""Loads the weights of a model that was built on `meta`, onto its devices and in its dtypes.

The base is streamed tensor by tensor, with merged adapters; then the adapters get their first
values. Nothing is allocated twice, and nothing later may move or cast the model.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ditkit_core.adapters.assistant import load_assistant
from ditkit_core.adapters.inject import (
    canonical_name,
    initialise,
    inject,
    is_adapter_name,
    remove_adapters,
    trainable_parameters,
)
from ditkit_core.distributed.context_parallel import ContextParallel
from ditkit_core.distributed.ranks import Ranks
from ditkit_core.engine.ac_policies import Policy
from ditkit_core.engine.ac_schedule import ACSchedule
from ditkit_core.engine.block_swap import BlockSwap, base_device_map
from ditkit_core.engine.devices import make_current
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.engine.placement import Placement
from ditkit_core.engine.token_route import router_of
from ditkit_core.execution import Execution
from ditkit_core.loading.model import Model
from ditkit_core.loading.on_meta import loaded_dtype
from ditkit_core.nn.quantized_linear import final_dtype
from ditkit_core.weights.load import load_into

if TYPE_CHECKING:
    from ditkit_core.distributed.division import Division


def load_weights(
    model: Model,
    *,
    placement: Placement,
    seed: int,
    division: "Division | None" = None,
) -> Model:
    """Load the weights of a model on `meta`, in place: initialise its adapters, and set up
    streaming.

    From now on the first GPU is the process's current one.

    Args:
        placement: Which device runs what; parameters of `spec.keep_fp32` go there in fp32, the
            others in the matmuls' dtype.
        seed: The run's seed, for the adapters' first values.
        division: How the rows of the model are divided over ranks, which read their rows alone.
    """
    make_current((placement.embed, *placement.blocks))
    module, origin, stored = model.module, model.origin, model.origin.stored
    device_of, home_of = placement.device_of(module), base_device_map(module, placement)
    load_into(
        module,
        stored.source,
        stored.mapping,
        device_of=home_of,
        dtype_of=loaded_dtype(model.spec, origin.precision),
        quantize_on=device_of,
        edits=stored.edits,
        division=division,
    )
    initialise(module, seed, device_of=device_of, start=origin.start, division=division)
    load_assistant(
        module, origin.assistant, device_of=home_of, put=division.put_whole if division else None
    )
    on_meta = [
        name
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if tensor.is_meta
    ]
    assert not on_meta, f"never given a value: {on_meta}"
    # Last: from here on, weights that are streamed cannot be read from the model except inside of
    # `readable`.
    if placement.streamed:
        trains_all = origin.trained is not None and origin.trained.method == "full"
        model.streamer = BlockSwap(module, placement, trained=trains_all)
    model.engine = BlockEngine(hooks=() if model.streamer is None else (model.streamer,))
    model.trainable = trainable_parameters(module)
    return model


def exchange_adapter(model: Model, other: Model, placement: Placement) -> None:
    """Give a loaded model the adapter layers of another one of the same base, which is on `meta`, in
    place of its own. What they were trained to is still to be loaded."""
    module: Any = model.module
    adapter = other.origin.adapter
    remove_adapters(module)
    inject(module, adapter, model.spec.adapters.targets)
    with model.readable():  # a DoRA begins with norms of the base's rows
        initialise(module, 0, device_of=placement.device_of(module))
    model.loaded_from = replace(model.origin, trained=adapter, start=None)
    model.trainable = trainable_parameters(module)


def load_divided(
    model: Model, placement: Placement, ranks: Ranks, device: torch.device, *, seed: int
) -> Model:
    """Load the rows of weights that this rank keeps, onto its device; all ranks call it.

    The model is divided before it has values, and each rank reads its rows. Arguments as of
    `load_weights`.
    """
    # imports parts of torch that take seconds
    from ditkit_core.distributed.division import Division
    from ditkit_core.distributed.shards import Shards

    precision = model.origin.precision
    give_dtypes(model, loaded_dtype(model.spec, precision))
    division = Division(model.module, trainable_parameters(model.module), precision, ranks, device)
    load_weights(model, placement=placement, seed=seed, division=division)
    model.shards = Shards(model.module, model.trainable, precision, ranks, device, division)
    model.trainable = model.shards.local
    return model


def give_dtypes(model: Model, dtype_of: Callable[[str], torch.dtype]) -> None:
    """Give the parameters on `meta` the dtypes that they will have, by which they are gathered
    together."""
    for prefix, module in model.module.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{prefix}.{leaf}"
                default = torch.float32 if is_adapter_name(name) else dtype_of(canonical_name(name))
                typed = torch.empty_like(parameter, dtype=final_dtype(module, leaf, default))
                module._parameters[leaf] = nn.Parameter(
                    typed, requires_grad=parameter.requires_grad
                )


def engine_for(
    model: Model,
    execution: Execution,
    schedule: ACSchedule | None = None,
    ranks: Ranks | None = None,
) -> BlockEngine:
    """The engine that runs a loaded model.

    Args:
        execution: How; its kernels are resolved.
        schedule: Its checkpointing, resolved to blocks; None for inference, where a budget need not
            be resolved.
        ranks: Those that train, and share each sample's tokens if they are in groups. None for
            inference on this rank alone.
    """
    trains = schedule is not None
    # Without a backward, a budget of memory has nothing to decide: any policy runs the same
    # forward.
    if schedule is None:
        schedule = (
            execution.schedule
            if execution.schedule.budget is None
            else ACSchedule.everywhere(Policy())
        )
    context, router = None, None
    if ranks is not None and ranks.context > 1:
        streams = model.spec.architecture.token_streams(model.origin.arch)
        assert streams is not None, "refused by check_ranks"
        context = ContextParallel(ranks, streams)
    if trains:
        streams = model.spec.architecture.token_streams(model.origin.arch)
        router = router_of(execution.routing, len(model.module.blocks()), streams)
    return BlockEngine(
        policy=schedule,
        backend=execution.attention,
        kernels=execution.kernels,
        hooks=() if model.streamer is None else (model.streamer,),
        context=context,
        router=router,
    )
