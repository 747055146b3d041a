"""The inputs of a training step: a model with its engine, and the samples of a micro-batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ditkit_core.engine.block_swap import BlockSwap
from ditkit_core.models.protocol import Engine, StagedModel
from ditkit_core.models.spec import ModelSpec


@dataclass(frozen=True)
class TrainModel:
    """A staged model on its devices, with the engine that runs it."""

    module: StagedModel
    engine: Engine
    spec: ModelSpec
    trainable: Mapping[str, nn.Parameter] = field(default_factory=dict, repr=False)
    """The parameters to train, by name; no two names share one. A forward alone needs none."""
    streamer: BlockSwap | None = None
    """Streams weights of the model, for the engine; None if all stay on their devices."""
    matmul_dtype: torch.dtype = torch.float32
    """Matmul dtype of the blocks: the loop warns of activations near its largest number."""

    @cached_property
    def adapts(self) -> bool:
        """Whether adapters are trained, which are small next to the frozen base; False if all weights are."""
        return any(not parameter.requires_grad for parameter in self.module.parameters())


@runtime_checkable
class MicroBatch(Protocol):
    """Samples that go through the model together."""

    @property
    def ids(self) -> Sequence[str]:
        """Stable names of the samples."""

    @property
    def items(self) -> Sequence[Mapping[str, Tensor]]:
        """Their tensors: `latents` [channels, frames, height, width] and the model's own."""

    @property
    def weights(self) -> Sequence[float]:
        """Factor of each sample's loss; empty: 1 each."""

    @property
    def counted(self) -> float | None:
        """Number of samples that it counts for in the step's mean: None for as many as it has, 0 if its loss is added to the mean."""
