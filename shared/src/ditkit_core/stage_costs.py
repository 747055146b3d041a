"""What a profile is made of and says: a training step without its weights, and what each stage of it holds and does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ditkit_core.adapters import AdapterConfig
from ditkit_core.ema import EMAConfig
from ditkit_core.flow_matching import FlowConfig
from ditkit_core.model import ModelSpec
from ditkit_core.optim import OptimConfig
from ditkit_core.precision import Precision


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Bytes (and arithmetic) of one stage for one micro-batch: the embedding, a block, or the head with the loss."""

    weights: int = 0
    """Of the frozen base, scales of quantization included."""
    adapters: int = 0
    """Of what is trained: of a full fine-tune, all parameters."""
    gradients: int = 0
    optimizer: int = 0
    """The optimizer's state."""
    average: int = 0
    update_extra: int = 0
    """The most that clipping and the optimizer's step hold above what was alive before them, if this were its whole model."""
    kept: int = 0
    """What its forward leaves alive for the backward, the carry that the next stage takes included."""
    released: int = 0
    """What its backward gives back of activations, without counting the gradients that it leaves."""
    freed_at_cut: int = 0
    """What of `kept` its device gives back at once if the next stage is on another one."""
    forward_extra: int = 0
    """The most that was alive while its forward ran, above what was alive at its start."""
    backward_extra: int = 0
    """The same of its backward, recompute included."""
    backward_extra_again: int = 0
    """The same where gradients of another micro-batch are there already, and are added to."""
    flops_forward: int = 0
    """Floating-point operations of matmuls and attention."""
    flops_backward: int = 0
    """The same of the backward, recompute included."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The stages of a model in execution order."""

    embed: StageCost
    """The inputs of the micro-batch on the device included."""
    blocks: tuple[StageCost, ...]
    """One for each of the model's blocks; the same object where blocks are of one kind."""
    head: StageCost
    """The loss included; what is kept of it is the first gradient."""
    crossing: tuple[int, ...]
    """Bytes of the carry that enters each block, then the head: what a cut there sends, and what the next device holds anew."""
    crossing_back: tuple[int, ...]
    """Bytes of gradients that are sent back there."""
    targets: int = 0
    """Bytes of what the loss compares with: in the embedding's figures, and on the head's device from before the forward."""
    trains_all: bool = False
    """Whether all parameters are trained: of a streamed block the host then has what the optimizer and the average keep, too."""
    update_adds_up: bool = False
    """Whether the optimizer works on all parameters of a device at once, so that what it holds meanwhile adds up over stages; else
    the most of a stage counts."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be profiled: a training step, without its weights."""

    spec: ModelSpec
    arch: Any
    adapter: AdapterConfig
    precision: Precision
    batch: Sequence[Mapping[str, Tensor]]
    """One micro-batch: training items on `meta`."""
    policy: str = "none"
    backend: str = "sdpa"
    optim: OptimConfig
    ema: EMAConfig
    flow: FlowConfig
    clip_norm: float = 1.0
    quantize: str = "none"
    micro_batches: int = 1
    """How many a step adds up: with several, the backward of a later one is measured too."""
    kind: str = "cuda"
    """Kind of device that the step is to run on: `cuda` or `cpu`."""
