"""One optimizer step: gradients are accumulated over micro-batches, clipped once, and applied once
or not at all."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ditkit_core.distributed.gradient_sum import GradientSum
from ditkit_core.distributed.ranks import RankLost, Ranks
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.io.memory import is_out_of_memory
from ditkit_core.io.rng import seed_of
from ditkit_core.io.runtimes import sent_to
from ditkit_core.io.step_clock import StepClock
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import autocast_disabled
from ditkit_core.models.spec import ModelSpec
from ditkit_core.training.config import ClipBy, FlowConfig
from ditkit_core.training.flow_matching import PreparedBatch, prepare
from ditkit_core.training.losses import Losses, NonFiniteLoss, evidence_of
from ditkit_core.training.micro_batch import (
    forward_and_backward,
    mean_of,
    weighted_errors,
)
from ditkit_core.training.nan_debug import find_first_nonfinite
from ditkit_core.training.optim.clipping import Clipping, joined_norm, stages_of, total_norm
from ditkit_core.training.optim.fused_backward import OptimizerInBackward
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.replay import ReplayedMicroBatches
from ditkit_core.training.tensor_stats import StatsRecorder, with_hooks
from ditkit_core.training.train_model import MicroBatch


class StepResult(NamedTuple):
    """Metrics of one optimizer step."""

    loss: float
    """Sum of the samples' weighted losses over the number of counted samples: the weighted mean,
    plus prior.weight times the mean of the class images, if any."""
    grad_norm: float
    """Norm of all gradients, before clipping."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """A step's place in its run, which decides its random numbers, and how its micro-batches are
    run."""

    step: int
    """Optimizer steps done before this one."""
    seed: int
    flow: FlowConfig
    pipelined: bool = False
    """Run all forwards, then one backward over the sum of the losses. Forwards are launched without
    waiting, and autograd runs the backwards of different devices in parallel, so the devices of a
    split model work at the same time. The activations of all micro-batches are alive at once.
    Gradients are summed in another order, which is bitwise identical for two micro-batches if a
    forward uses each parameter once."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that share the step's micro-batches. How many there are changes no bit of an
    adapter's training."""
    prepared: Callable[[int], PreparedBatch] | None = None
    """Returns a micro-batch of this rank by its number in the step, prepared while the one before
    it ran; None prepares each when it is run."""
    clock: StepClock = field(default_factory=StepClock)
    """Times the parts of the step."""
    clip_by: ClipBy = "step"
    """`train.clip_by`."""
    last_norm: float | None = None
    """Norm of all gradients of the step before, for `last_step`; None before the first."""
    replays: ReplayedMicroBatches | None = None
    """Replays micro-batches; None runs them all eagerly."""
    is_seen: bool = False
    """Whether Python has to see the operations of this step, so that nothing is replayed."""

    def dropout_seed(self, micro: int) -> int:
        """The seed of a micro-batch's dropout."""
        return seed_of(self.seed, "dropout", self.step, micro)

    def prepare(
        self, spec: ModelSpec, micro_batches: Sequence[MicroBatch], micro: int
    ) -> PreparedBatch:
        """Read one of the step's micro-batches, and sample its noise."""
        return prepare(spec, self.flow, micro_batches, micro, seed=self.seed, step=self.step)

    def clipping(self, model: Model, optimizer: NamedOptimizer, clip_norm: float) -> Clipping:
        """How the gradients of this step are clipped."""
        by_block = clip_norm and self.clip_by == "block"
        stage_of = stages_of(model.module, optimizer.parameters) if by_block else {}
        return Clipping(
            max_norm=clip_norm, by=self.clip_by, last_norm=self.last_norm, stage_of=stage_of
        )


def training_step(
    model: Model,
    micro_batches: Sequence[MicroBatch],
    optimizer: NamedOptimizer,
    context: StepContext,
    *,
    lr: float,
    clip_norm: float,
    watch: StatsRecorder | None = None,
) -> StepResult:
    """Update the trained parameters once.

    Args:
        micro_batches: The step's samples; their grouping into micro-batches changes only the order
            of summation (and the masks of dropout).
        optimizer: Has the trained parameters.
        clip_norm: Maximum gradient norm, of what `StepContext.clip_by` says; 0 disables clipping.
        watch: Records activations and gradients of this step, and has their statistics afterwards.

    Raises:
        NonFiniteLoss: If a loss or gradient is not finite; nothing is updated, unless the optimizer
            updates in the backward.
    """
    optimizer.zero_grad()
    if model.shards is not None:
        model.shards.drop_gradients()
    # Stochastic rounding is a function of seed and step, so that a resumed run rounds alike.
    optimizer.begin(context.seed, context.step)
    watched = model if watch is None else replace(model, engine=with_hooks(model.engine, watch))
    if watch is not None:
        context = replace(context, is_seen=True)
    accumulate = partial(accumulate_gradients, watched, micro_batches, context)
    try:
        clipping = context.clipping(model, optimizer, clip_norm)
        if optimizer.fused_backward:
            assert not clip_norm or context.clip_by != "step", "refused before anything was loaded"
            updates = OptimizerInBackward(
                optimizer,
                lr,
                watch=None if watch is None else watch.gradient,
                clipping=clipping,
                micro_batches=len(micro_batches),
            )
            result = _fused_step(accumulate, updates, micro_batches, context, watch)
            context.clock.mark_all("optimizer")  # the host has waited for all before
            return result
        losses = accumulate()
        loss = _mean_loss(losses, micro_batches, context.ranks)
        return _finish_step(
            model, losses, loss, optimizer, context, lr=lr, clipping=clipping, watch=watch
        )
    except NonFiniteLoss as error:
        evidence = error.evidence
    # Outside of the handler: the error refers to the step's graph, whose memory the second forward
    # needs.
    local_samples = [] if context.ranks.group_rank else evidence["samples"]
    evidence["samples"] = [
        sample
        for rank_samples in context.ranks.all_gather_object(local_samples)
        for sample in rank_samples
    ]
    origins = context.ranks.all_gather_object(
        _origin(model, micro_batches, evidence, replace(context, prepared=None))
    )
    # The first micro-batch with an origin, else with a reason why none was found.
    raise NonFiniteLoss(
        evidence | max(origins, key=lambda origin: (origin["where"] is not None, len(origin)))
    )


def _mean_loss(losses: Losses, micro_batches: Sequence[MicroBatch], ranks: Ranks) -> Tensor:
    """The step's loss from every sample's, summed in their order, whichever rank computed them."""
    weighted = torch.cat(losses.weighted)
    if ranks.size > 1:
        sizes = [len(batch.ids) for batch in micro_batches]
        start, every = sum(sizes[: losses.first]), torch.zeros(sum(sizes), dtype=torch.float64)
        every[start : start + len(weighted)] = weighted.cpu()
        weighted = ranks.sum_of_groups(every).to(weighted.device)
    return weighted.double().sum() / sum(
        len(batch.ids) for batch in micro_batches if batch.counted != 0
    )


def _origin(
    model: Model,
    micro_batches: Sequence[MicroBatch],
    evidence: Mapping[str, Any],
    context: StepContext,
) -> dict[str, Any]:
    """Where the first value that is not finite arose, or why that was not found, as entries of the
    evidence."""
    try:
        return {"where": _first_not_finite(model, micro_batches, evidence, context)}
    except (RuntimeError, MemoryError, UserError) as error:
        # Out of memory, or an operation without a check: report the failure without its origin, not
        # this error.
        if not (is_out_of_memory(error) or isinstance(error, (NotImplementedError, UserError))):
            raise
        unknown = {
            "where": None,
            "where_not_found": str(error).partition("\n")[0] or type(error).__name__,
        }
        if not _runs_together(model, context.ranks):
            return unknown
        if isinstance(error, RankLost):
            raise
        # The others wait for this rank in exchanges, which ends with it.
        raise UserError(str(NonFiniteLoss({**evidence, **unknown}))) from error


def _finish_step(
    model: Model,
    losses: Losses,
    loss: Tensor,
    optimizer: NamedOptimizer,
    context: StepContext,
    *,
    lr: float,
    clipping: Clipping,
    watch: StatsRecorder | None,
) -> StepResult:
    """Check the accumulated gradients, and apply them."""
    gradients = optimizer.gradients()
    if watch is not None:
        for name, gradient in gradients.items():
            watch.gradient(name, gradient)
    norm = (
        total_norm(list(gradients.values()))
        if model.shards is None
        else model.shards.norm(gradients)
    )
    # Launched before the host waits for loss and norm, a GPU has no pause in front of the update.
    # It leaves everything as it is where they are not finite.
    is_early = (
        optimizer.skips_on_device
        and context.ranks.size == 1
        and clipping.by != "block"
        and loss.device == norm.device
    )
    if is_early:
        context.clock.mark_all("optimizer")
        is_finite = (loss + norm).isfinite()
        # A factor that is not finite would be in every gradient of the evidence.
        finite_norm = norm.where(is_finite, 0.0)
        update(
            optimizer,
            finite_norm,
            lr=lr,
            clipping=clipping,
            found_inf=is_finite.logical_not().float(),
        )
    result = StepResult(*_to_host(loss, norm, watch, context.ranks, model))
    if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
        broken = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
        if model.shards is not None:  # each rank sees its rows
            every = {name for names in context.ranks.all_gather_object(broken) for name in names}
            broken = [name for name in gradients if name in every]
        evidence = evidence_of(context.step, losses, broken, **result._asdict())
        optimizer.zero_grad()
        raise NonFiniteLoss(evidence)
    if not is_early:
        context.clock.mark_all("optimizer")
        update(optimizer, norm, lr=lr, clipping=clipping)
    return result


def _to_host(
    loss: Tensor,
    norm: Tensor,
    watch: StatsRecorder | None,
    ranks: Ranks,
    model: Model | None = None,
) -> tuple[float, float]:
    """Send loss, norm and watched statistics to the host in one transfer, because each transfer
    waits for all work on the device."""
    pieces = [norm.reshape(1), *(watch.packed() if watch is not None else ())]
    sent = [sent_to(piece.double(), loss.device) for piece in pieces]
    total, *others = torch.cat([loss.reshape(1), *sent]).cpu().tolist()
    if watch is not None:
        shards = None if model is None else model.shards
        divided = {name: shards.elements(name)[1] for name in shards.rows} if shards else {}
        watch.read(ranks.all_gather_object((watch.keys, others[1:])), divided, ranks.shard)
    return total, others[0]


def _fused_step(
    accumulate: Callable[..., Losses],
    updates: OptimizerInBackward,
    micro_batches: Sequence[MicroBatch],
    context: StepContext,
    watch: StatsRecorder | None,
) -> StepResult:
    """Run the micro-batches, and update each parameter in the last backward as soon as its gradient
    is complete."""

    def check(losses: Losses) -> None:
        last = losses.weighted[-1]
        # before the backward, which updates weights
        if not math.isfinite(float(last.double().sum())):
            run_losses = replace(losses, ids=losses.ids[: len(losses.weighted)])
            raise NonFiniteLoss(
                evidence_of(
                    context.step,
                    run_losses,
                    [],
                    loss=float(last.double().mean()),
                    grad_norm=math.nan,
                )
            )
        updates.begin_backward()

    with updates:
        losses = accumulate(before_backward=check)
    norm = joined_norm(updates.norms())
    sent = _to_host(_mean_loss(losses, micro_batches, context.ranks), norm, watch, context.ranks)
    result = StepResult(*sent)
    if not math.isfinite(result.grad_norm):
        before = len(updates.applied())
        updated = {"num_parameters_updated_before": before, "weights_were_updated": before > 0}
        raise NonFiniteLoss(
            {**evidence_of(context.step, losses, updates.broken(), **result._asdict()), **updated}
        )
    return result


def update(
    optimizer: NamedOptimizer,
    norm: Tensor,
    *,
    lr: float,
    clipping: Clipping,
    found_inf: Tensor | None = None,
) -> None:
    """Clip the gradients, whose global norm is `norm`, and step; with `found_inf` as
    `NamedOptimizer.step`."""
    clipping.apply(optimizer.parameters, norm)
    optimizer.step(lr, found_inf)


def accumulate_gradients(
    model: Model,
    micro_batches: Sequence[MicroBatch],
    context: StepContext,
    *,
    before_backward: Callable[[Losses], None] = lambda losses: None,
) -> Losses:
    """Add the gradient of the step's loss to the parameters: the sum of weighted losses over the
    number they count for.

    That is the weighted mean if every micro-batch counts for its own samples. If all count for
    their mean size, a sample has the same weight in a small micro-batch as in a large one.

    Noise level and noise of a sample are a function of (seed, step, place in the step, id),
    whatever micro-batch it is in. The place is included because a small dataset can have one sample
    several times in a step. Dropout uses (seed, step, micro-batch). Places and micro-batches are
    counted over all ranks; a rank computes its share.

    Gradients of adapters are added in one order for any number of ranks (`GradientSum`). Gradients
    of all weights are added as they come, which needs no second set of them, and then over ranks.

    `before_backward` is called before each backward with the losses so far, including its own.
    """
    counted = sum(
        len(batch.ids) if batch.counted is None else batch.counted for batch in micro_batches
    )
    ranks, share = context.ranks, context.ranks.share(len(micro_batches))
    losses = Losses(
        first=share.start, ids=[micro_batches[micro].ids for micro in share], sigmas=[], weighted=[]
    )
    # The model disables an outer autocast in its forward; torch applies it in the backward of every
    # matmul, too.
    with autocast_disabled(next(model.module.head.parameters()).device.type):
        if model.shards is not None:
            _accumulate_sharded(model, micro_batches, context, losses, counted)
            return losses
        adapts = model.adapts
        gradients = GradientSum(
            model.trainable, len(micro_batches) if adapts else ranks.num_groups, ranks
        )
        sent = _sent(model, micro_batches, context, share)
        if context.pipelined:
            _accumulate_pipelined(
                model,
                zip(share, list(sent), strict=True),
                context,
                losses,
                counted,
                before_backward,
            )
            return losses
        for micro, batch in zip(share, sent, strict=True):
            losses.sigmas.append(batch.sigma)
            seed = context.dropout_seed(micro)
            if context.replays is None:
                torch.manual_seed(seed)  # all devices' generators
                weighted = weighted_errors(model, batch, context.flow, context.clock)
                # Detached, so that the backward frees the graph of its micro-batch.
                losses.weighted.append(weighted.detach())
                before_backward(losses)
                mean_of(weighted, weighted.new_full((), counted), context.clock).backward()
            else:
                work = partial(forward_and_backward, flow=context.flow)
                run = partial(context.replays.run, clock=context.clock, is_seen=context.is_seen)
                losses.weighted.append(run(model, batch, work, seed=seed, divisor=counted))
            if adapts:
                # Without a graph every backward makes gradients of its own.
                gradients.add(micro, reused=bool(context.replays) and micro != share[-1])
        if adapts or ranks.size > 1:
            if not adapts:
                gradients.add(ranks.group_index)
            gradients.finish()
    return losses


def _accumulate_pipelined(
    model: Model,
    micro_batches: Iterable[tuple[int, PreparedBatch]],
    context: StepContext,
    losses: Losses,
    counted: float,
    before_backward: Callable[[Losses], None],
) -> None:
    """Run all forwards, then one backward over the sum of the losses.

    A copy waits for all earlier work on both its devices. Between two forwards it would prevent the
    overlap that pipelining is for, so everything but the carry was sent to its device before the
    first forward.
    """
    parts: list[Tensor] = []
    for micro, batch in micro_batches:
        torch.manual_seed(context.dropout_seed(micro))
        weighted = weighted_errors(model, batch, context.flow, context.clock)
        losses.sigmas.append(batch.sigma)
        losses.weighted.append(weighted.detach())
        parts.append(weighted.sum() / weighted.new_full((), counted))
        context.clock.mark(weighted.device, "waiting")
        # In the backward, on the device's own thread: it may have waited since it did its part of
        # another micro-batch.
        weighted.register_hook(
            lambda _, device=weighted.device: context.clock.mark(device, "backward")
        )
    before_backward(losses)
    torch.stack(parts).sum().backward()


def _accumulate_sharded(
    model: Model,
    micro_batches: Sequence[MicroBatch],
    context: StepContext,
    losses: Losses,
    counted: float,
) -> None:
    """Add the gradients of divided weights: every rank runs equally many micro-batches, because it
    gathers weights for the others."""
    assert model.shards is not None
    runs = context.ranks.even_share(len(micro_batches))
    assert runs[0][1], "fewer micro-batches than ranks are refused before anything is loaded"
    assert len({batch.matches_base for batch in micro_batches}) == 1, (
        "ranks would gather weights for another forward alone"
    )
    sent = _sent(model, micro_batches, context, [micro for micro, counts in runs if counts])
    for index, (micro, counts) in enumerate(runs):
        if counts:  # a stand-in is the last of its own once more
            batch = next(sent)
        model.shards.begin(last=index == len(runs) - 1)
        torch.manual_seed(context.dropout_seed(micro))
        weighted = weighted_errors(model, batch, context.flow, context.clock)
        if counts:
            losses.sigmas.append(batch.sigma)
            losses.weighted.append(weighted.detach())
        mean_of(weighted * counts, weighted.new_full((), counted), context.clock).backward()
    model.shards.take_gradients()


def _sent(
    model: Model, micro_batches: Sequence[MicroBatch], context: StepContext, chosen: Iterable[int]
) -> Iterator[PreparedBatch]:
    """Send the chosen micro-batches to the devices of the model."""
    first, last = (
        next(stage.parameters()).device for stage in (model.module.embed, model.module.head)
    )
    prepare_here = partial(context.prepare, model.spec, micro_batches)
    for micro in chosen:
        batch = (context.prepared or prepare_here)(micro)
        context.clock.mark(first, "copies")
        yield batch.to(first, last)


def _runs_together(model: Model, ranks: Ranks) -> bool:
    """Whether a forward needs the forwards of other ranks, because these have a part of the weights
    or of the tokens."""
    return model.shards is not None or ranks.context > 1


def _first_not_finite(
    model: Model,
    micro_batches: Sequence[MicroBatch],
    evidence: Mapping[str, Any],
    context: StepContext,
) -> dict[str, Any] | None:
    """Rerun this rank's failed micro-batches and check every operation; all its micro-batches if a
    gradient failed.

    Ranks that need each other's forwards run equally many micro-batches, and all stop after the
    first in which one of them finds something.

    Returns:
        As `find_first_nonfinite`, with the micro-batch and the ids of its samples that failed, or
        of all. None if nothing was found: the norm of finite gradients overflowed, or the machine
        does not compute the same values
            twice.
    """
    if isinstance(model.engine, BlockEngine) and model.engine.backend == "flex":
        # flex runs uncompiled here, and would allocate all attention scores
        model = replace(model, engine=replace(model.engine, backend="sdpa"))
    failed = [sample for sample in evidence["samples"] if not isinstance(sample["loss"], float)]
    suspects = {sample["micro_batch"] for sample in failed} or set(range(len(micro_batches)))
    everyone = context.ranks if _runs_together(model, context.ranks) else Ranks()
    runs = [micro for micro, _ in context.ranks.even_share(len(micro_batches))]
    share = runs if everyone.size > 1 else context.ranks.share(len(micro_batches))
    broken = None if model.shards is None else model.shards.not_finite()
    for micro, batch in zip(share, _sent(model, micro_batches, context, share), strict=True):
        if not everyone.any(micro in suspects):
            continue

        def loss_of(micro: int = micro, batch: PreparedBatch = batch) -> Tensor:
            torch.manual_seed(context.dropout_seed(micro))
            return weighted_errors(model, batch, context.flow, context.clock).sum()

        with autocast_disabled(batch.weights.device.type):
            origin = find_first_nonfinite(
                model.module, loss_of, on_any_rank=everyone.any, broken_weights=broken
            )
        if model.shards is not None:
            model.shards.drop_gradients()
        ids = [sample["id"] for sample in failed if sample["micro_batch"] == micro] or list(
            micro_batches[micro].ids
        )
        every = everyone.all_gather_object(
            None if origin is None else {**origin, "micro_batch": micro, "ids": ids}
        )
        if origins := [rank_origin for rank_origin in every if rank_origin is not None]:
            # The rank that came upon it first: others get it from there, with tokens or in a sum of
            # gradients.
            first = min(
                origins,
                key=lambda rank_origin: (
                    rank_origin["operations_before"],
                    rank_origin["micro_batch"],
                ),
            )
            return {name: value for name, value in first.items() if name != "operations_before"}
    return None
