"""The handle of a model: its modules on their devices, the engine that runs it, and what is trained of it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ditkit_core.adapters.inject import canonical_name, is_adapter_name
from ditkit_core.engine.block_swap import BlockSwap
from ditkit_core.loading.architecture import config_json_of
from ditkit_core.loading.meta_model import MetaModel
from ditkit_core.models.precision import precision_of
from ditkit_core.models.protocol import Engine, StagedModel
from ditkit_core.models.spec import ModelSpec
from ditkit_core.nn.quantized_linear import quantized_weights

if TYPE_CHECKING:
    from ditkit_core.engine.sharding.shards import Shards


@dataclass(eq=False)
class Model:
    """A staged model on its devices, with the engine that runs it."""

    module: StagedModel
    engine: Engine
    spec: ModelSpec
    trainable: Mapping[str, nn.Parameter] = field(default_factory=dict, repr=False)
    """The parameters to train, by canonical name; no two names share one. A forward alone needs none."""
    streamer: BlockSwap | None = None
    """Streams weights of the model through its devices, for the engine; None if all stay there."""
    shards: "Shards | None" = None
    """Divides the weights over ranks; None if this rank has all of them. `trainable` are then this rank's rows."""
    loaded_from: MetaModel | None = field(default=None, kw_only=True, repr=False)
    """What it was loaded from; None for a module that was built otherwise."""

    @cached_property
    def adapts(self) -> bool:
        """Whether adapters are trained, which are small next to the frozen base; False if all weights are."""
        return any(not parameter.requires_grad for parameter in self.module.parameters())

    @property
    def matmul_dtype(self) -> torch.dtype:
        """Dtype of the blocks' matmuls."""
        return precision_of(self.module).matmul

    @property
    def origin(self) -> MetaModel:
        """What it was loaded from: `origin.stored` reads a base parameter again, before it was rounded or quantized."""
        assert self.loaded_from is not None, "built without files"
        return self.loaded_from

    @property
    def config_json(self) -> Path | None:
        """The config.json of the transformer's files, if they have one."""
        return config_json_of(self.origin.stored.source.path)

    def weights(self) -> list[Tensor]:
        """All parameters and buffers: of those that ranks divide, the rows of this one; of streamed blocks nothing is on a device."""
        if self.streamer is not None:
            # A forward leaves blocks there. Whoever empties their memory and fills it again does so on the device's own stream, which would
            # later give it to other work while the streamer's stream still copies from it.
            self.streamer.host_changed()
        found = [*self.module.parameters(), *self.module.buffers()]
        return found if self.shards is None else self.shards.own(found)

    def readable(self) -> AbstractContextManager[None]:
        """Inside the block every weight can be read, on the host or its device; the model may be unable to run meanwhile.

        Where ranks divide the weights, only the trained ones can be.
        """
        if self.shards is not None:
            return self.shards.readable()
        return nullcontext() if self.streamer is None else self.streamer.on_host()

    def whole_in(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside this block, which is inside `readable`, all weights of one module can be read, also where ranks divide them."""
        return nullcontext() if self.shards is None else self.shards.whole_in(module)

    @contextmanager
    def readable_one_by_one(self) -> Iterator[Callable[[str], Tensor]]:
        """Inside the block adapters can be read, and base parameters with the function, by name; what is not on `meta` and not quantized can be
        read in the model as well. Of weights that ranks divide, no host has more than one whole."""
        original = self.origin.stored.read
        if self.shards is None:
            with self.readable():
                yield original
            return
        coarse = quantized_weights(self.module)
        paths = {canonical_name(path): path for path, _ in self.module.named_parameters()}
        with self.shards.one_by_one(is_adapter_name) as gathered:
            yield lambda name: original(name) if name in coarse else gathered(paths[name])
