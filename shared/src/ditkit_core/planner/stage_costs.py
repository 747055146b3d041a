"""The input and the result of profiling: a training step without its weights, and memory and arithmetic of each stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from torch import Tensor

from ditkit_core.adapters.inject import AdapterConfig
from ditkit_core.engine.ac_schedule import ACSchedule, ScheduleLike, as_schedule
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import ModelSpec
from ditkit_core.training.ema import EMAConfig
from ditkit_core.training.flow_matching import FlowConfig
from ditkit_core.training.optimizer import OptimConfig


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Bytes (and arithmetic) of one stage for one micro-batch: the embedding, a block, or the head with the loss."""

    weights: int = 0
    """Frozen base, with scales of quantization."""
    adapters: int = 0
    """Trained parameters; in a full fine-tune, all parameters."""
    gradients: int = 0
    optimizer: int = 0
    """The optimizer's state."""
    average: int = 0
    update_extra: int = 0
    """Peak of clipping and the optimizer's step above the memory before them, as if the stage were the whole model."""
    kept: int = 0
    """Bytes that its forward keeps for the backward, with the carry for the next stage."""
    released: int = 0
    """Bytes of activations that its backward frees, not reduced by the gradients that it creates."""
    freed_at_cut: int = 0
    """Bytes of `kept` that are freed at once if the next stage is on another device: its output, unless it saved it for its backward."""
    on_host: int = 0
    """Bytes that its forward offloads to the host until its backward has fetched them."""
    forward_extra: int = 0
    """Peak of its forward, above the memory at its start."""
    backward_extra: int = 0
    """Peak of its backward, recompute included, above the memory at its start."""
    backward_extra_again: int = 0
    """The same if gradients of an earlier micro-batch exist, and are added to."""
    flops_forward: int = 0
    """Floating-point operations of matmuls and attention."""
    flops_backward: int = 0
    """The same for the backward, recompute included."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The stages of a model in execution order."""

    embed: StageCost
    """The inputs of the micro-batch on the device included."""
    blocks: tuple[StageCost, ...]
    """One for each of the model's blocks; the same object where blocks are of one kind."""
    head: StageCost
    """The loss included; its kept bytes are the first gradient."""
    crossing: tuple[int, ...]
    """Bytes of the carry that enters each block, then the head: a split there sends them, and the next device allocates them."""
    crossing_back: tuple[int, ...]
    """Bytes of gradients that a split there sends back."""
    targets: int = 0
    """Bytes of the loss's targets: included in the embedding's figures, and on the head's device from before the forward."""
    trains_all: bool = False
    """Whether all parameters are trained: the host then also has the optimizer state and average of streamed blocks."""
    update_adds_up: bool = False
    """Whether the optimizer works on all parameters of a device at once, so that its temporary memory adds up over stages; else only
    the largest stage counts."""
    attention: tuple[str, ...] = ()
    """Names of the attention calls in blocks."""


def mixed(of_blocks: Sequence[Profile]) -> Profile:
    """The profile of a model whose blocks run under different policies.

    A stage's memory hardly depends on the policies of other blocks. Three things do, and are corrected here. If a block does not save
    its output (`freed_at_cut`), the backward of the next block frees it. Offloaded activations leave the device while the next block
    runs, and return during its backward. A tensor that all blocks receive (a time embedding) stays alive while any of them saves it.

    Args:
        of_blocks: For each block the profile of the whole model under that block's policy.
    """
    used, last = list(dict.fromkeys(of_blocks)), of_blocks[-1]
    if len(used) == 1:
        return last
    assert all(each.crossing == last.crossing for each in used), "the carry does not depend on policies"
    blocks = [of_blocks[0].blocks[0]]
    for i, (before, here) in enumerate(pairwise(of_blocks)):
        block = behind(here.blocks[i + 1], here.blocks[i].on_host - before.blocks[i].on_host)
        passed_on = before.blocks[i].freed_at_cut - here.blocks[i].freed_at_cut
        blocks.append(replace(block, released=block.released + passed_on))
    embeds, heads = ([each.embed for each in used], [each.head for each in used])
    return replace(
        last,
        embed=replace(_most(embeds), freed_at_cut=min(embed.freed_at_cut for embed in embeds)),
        blocks=tuple(
            replace(block, freed_at_cut=_least([each.blocks[i] for each in used], block))
            for i, block in enumerate(blocks)
        ),
        head=replace(_most(heads), released=last.head.released),
    )


def behind(block: StageCost, not_sent: int) -> StageCost:
    """A block whose predecessor offloads `not_sent` bytes less than in the profile: they do not leave the device while the block runs,
    and need not return during its backward."""
    return replace(
        block,
        kept=block.kept + not_sent,
        released=block.released + not_sent,
        backward_extra=block.backward_extra - not_sent,
        backward_extra_again=block.backward_extra_again - not_sent,
    )


def _least(variants: Sequence[StageCost], own: StageCost) -> int:
    """Bytes that a block frees at a split, if it does not save its output, without tensors that blocks of another policy save."""
    return min((each.freed_at_cut for each in variants if each.freed_at_cut), default=0) if own.freed_at_cut else 0


def _most(variants: Sequence[StageCost]) -> StageCost:
    """The embedding or the head, which have no policy: the largest figures, because only some blocks may save tensors shared with it."""
    return StageCost(**{each.name: max(getattr(stage, each.name) for stage in variants) for each in fields(StageCost)})


@dataclass(frozen=True, kw_only=True)
class StepJob:
    """The input of profiling: a training step, without its weights."""

    spec: ModelSpec
    arch: Any
    adapter: AdapterConfig
    precision: Precision
    batch: Sequence[Mapping[str, Tensor]]
    """One micro-batch: training items on `meta`."""
    policy: ScheduleLike = "none"
    """Policy of the blocks; devices are those of `measure`."""
    backend: str = "sdpa"
    optim: OptimConfig
    ema: EMAConfig
    flow: FlowConfig
    clip_norm: float = 1.0
    quantize: str = "none"
    micro_batches: int = 1
    """Number accumulated in a step; with several, the backward of a later one is also measured."""
    kind: str = "cuda"
    """Kind of device that the step runs on: `cuda` or `cpu`."""

    @cached_property
    def schedule(self) -> ACSchedule:
        """`policy`, parsed if it is a text."""
        return as_schedule(self.policy)
