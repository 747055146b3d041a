"""Loads the weights of a model that was built on `meta`, onto its devices and in its dtypes.

The base is streamed tensor by tensor, with merged adapters; then the adapters get their first values. Nothing is allocated twice, and nothing
later may move or cast the model.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ditkit_core.adapters.assistant import load_assistant
from ditkit_core.adapters.inject import initialise, trainable_parameters
from ditkit_core.engine.block_swap import BlockSwap, base_device_map
from ditkit_core.engine.devices import make_current
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.engine.placement import Placement
from ditkit_core.loading.meta_model import MetaModel, loaded_dtype
from ditkit_core.loading.model import Model
from ditkit_core.loading.quantized_cache import find_cache
from ditkit_core.weights.load import load_into

if TYPE_CHECKING:
    from ditkit_core.engine.sharding.division import Division


def load_weights(
    unloaded: MetaModel,
    *,
    placement: Placement,
    seed: int,
    division: "Division | None" = None,
    say: Callable[[str], None] = lambda line: None,
) -> Model:
    """Load the weights, initialise the adapters, and set up streaming. From now on the first GPU is the process's current one.

    Args:
        placement: Which device runs what; parameters of `spec.keep_fp32` go there in fp32, the others in the matmuls' dtype.
        seed: The run's seed, for the adapters' first values.
        division: Of the rows of the model over ranks, each of which reads its own.
        say: Called with one line if a quantized base was read from the cache or written to it.

    Raises:
        UserError: If a file is damaged.
    """
    make_current((placement.embed, *placement.blocks))
    model, stored, base, device_of = unloaded.model, unloaded.stored, unloaded.base, placement.device_of(unloaded.model)
    dtype_of, home_of = loaded_dtype(unloaded.spec, unloaded.precision), base_device_map(model, placement)
    cache = find_cache(base.quantized_cache, base.quantize, model, stored.source, unloaded.merged, dtype_of=dtype_of)
    read = partial(load_into, model, stored.source, stored.mapping, edits=stored.edits, division=division)
    read = partial(read, device_of=home_of, dtype_of=dtype_of)
    if cache is None:
        read()
    else:
        cache.load(model, read, device_of=home_of, dtype_of=dtype_of, division=division, say=say)
    initialise(model, seed, device_of=device_of, start=unloaded.start, division=division)
    load_assistant(model, unloaded.assistant, device_of=home_of, put=division.put_whole if division else None)
    on_meta = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    assert not on_meta, f"never given a value: {on_meta}"
    # Last: from here on, weights that are streamed cannot be read from the model except inside of `readable`.
    streamer = BlockSwap(model, placement, trained=unloaded.adapter.method == "full") if placement.streamed else None
    return Model(
        model,
        BlockEngine(hooks=() if streamer is None else (streamer,)),
        unloaded.spec,
        trainable_parameters(model),
        streamer,
        loaded_from=unloaded,
    )
