"""What a profile is made of and says: a training step without its weights, and what each stage of it holds and does."""

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
    """What of `kept` its device gives back at once if the next stage is on another one: what it passes on and does not hold itself."""
    on_host: int = 0
    """What its forward leaves in the host's memory until its backward has fetched it."""
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
    attention: tuple[str, ...] = ()
    """Names of the attention calls in blocks."""


def mixed(of_blocks: Sequence[Profile]) -> Profile:
    """The profile of a model whose blocks run under different policies.

    What a stage holds hardly depends on the policies of others. Three things do, and are put right. A block that does not hold what it
    passes on (`freed_at_cut`) has that freed by the backward of the block behind it. What a block sends to the host leaves the device
    while the block behind it runs, and comes back during that one's backward. What all blocks are handed (a time embedding) stays while
    any of them holds it.

    Args:
        of_blocks: For each block the profile of the whole model under that block's policy.
    """
    used, last = list(dict.fromkeys(of_blocks)), of_blocks[-1]
    if len(used) == 1:
        return last
    assert all(each.crossing == last.crossing for each in used), "what blocks hand on is none of a policy's"
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
    """A block whose predecessor sends so many bytes less to the host than in the profile: they do not leave while it runs, and need not
    come back during its backward."""
    return replace(
        block,
        kept=block.kept + not_sent,
        released=block.released + not_sent,
        backward_extra=block.backward_extra - not_sent,
        backward_extra_again=block.backward_extra_again - not_sent,
    )


def _least(variants: Sequence[StageCost], own: StageCost) -> int:
    """What a block that does not hold what it passes on gives back at a cut, less what the blocks of another policy hold of it."""
    return min((each.freed_at_cut for each in variants if each.freed_at_cut), default=0) if own.freed_at_cut else 0


def _most(variants: Sequence[StageCost]) -> StageCost:
    """The embedding or the head, which no policy is of; the largest figures, where shared tensors are held by some blocks alone."""
    return StageCost(**{each.name: max(getattr(stage, each.name) for stage in variants) for each in fields(StageCost)})


@dataclass(frozen=True, kw_only=True)
class StepJob:
    """What is to be profiled: a training step, without its weights."""

    spec: ModelSpec
    arch: Any
    adapter: AdapterConfig
    precision: Precision
    batch: Sequence[Mapping[str, Tensor]]
    """One micro-batch: training items on `meta`."""
    policy: ScheduleLike = "none"
    """Of the blocks; devices are those of `measure`."""
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

    @cached_property
    def schedule(self) -> ACSchedule:
        """`policy`, parsed if it is a text."""
        return as_schedule(self.policy)
