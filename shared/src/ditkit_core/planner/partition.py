"""Split points of a model: chosen so that the device that is fullest during a training step, for
its size, is as empty as possible.

`placement_of` decides for the devices of this machine, and `plan.py: plan_step` for any. Both call
`solve` with the same profiles, so that a run does what its plan says. The memory of a device
depends only on its own blocks, so dynamic programming finds the best of all splits. Every device
gets at least one block; omit a device to leave it unused.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ditkit_core.adapters.inject import canonical_name
from ditkit_core.config.sizes import per_device
from ditkit_core.engine.ac_policies import Full, Policy
from ditkit_core.engine.ac_schedule import ACSchedule
from ditkit_core.engine.block_swap import choose_streamed
from ditkit_core.engine.placement import Placement, place_blocks
from ditkit_core.errors import UserError
from ditkit_core.execution import Execution
from ditkit_core.io.console import doing, say
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import StagedModel
from ditkit_core.models.spec import ModelSpec
from ditkit_core.nn.quantized_linear import final_dtype
from ditkit_core.planner.ac_budget import BudgetTask, choose, limited
from ditkit_core.planner.memory import (
    Budget,
    DeviceSpan,
    Partition,
    Profile,
    StageCost,
    mixed,
    on_host,
)
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.planner.profiler import profile
from ditkit_core.planner.targets import Targets, budgets_here, targets_of
from ditkit_core.planner.workload import PLAIN, Workload

_ANY = torch.device("cuda")


def choose_split_points(
    profile: Profile | Sequence[Profile],
    budgets: Sequence[Budget],
    *,
    swap_blocks: Sequence[int] = (),
    work: Workload = PLAIN,
) -> tuple[int, ...]:
    """The blocks before which the next device begins. Each device has at least one block with
    parameters, and as many as it streams. The costs of the stages are one profile, or one for each
    device; `weights_profile` leaves out activations."""
    profiles = [profile] * len(budgets) if isinstance(profile, Profile) else list(profile)
    blocks = profiles[0].blocks
    has_weights = [block.weights + block.adapters > 0 for block in blocks]
    # A block without parameters runs on the device of its carry, so no device begins with it.
    starts = [i for i, has in enumerate(has_weights) if has]
    if len(budgets) > len(starts):
        raise UserError(
            f"train.devices names {len(budgets)} devices and the model has {len(starts)} blocks; "
            f"name fewer"
        )
    counts = per_device(swap_blocks, len(budgets), "train.swap_blocks")
    if min(counts) < 0:
        raise UserError(f"train.swap_blocks = {list(swap_blocks)} must be numbers of at least 0")
    if any(counts) and sum(max(1, count) for count in counts) > len(starts):
        raise UserError(
            f"train.swap_blocks = {list(swap_blocks)} of {len(budgets)} devices, and the model has "
            f"{len(starts)} blocks; lower it"
        )

    # The cache below is keyed by the profile's index: hashing a profile itself is slow.
    kinds = list(map(profiles.index, profiles))

    @cache
    def bytes_held(kind: int, start: int, end: int, count: int, budget: Budget) -> int:
        streamed = streamed_of(has_weights, start, end, count)
        return DeviceSpan(profiles[kind], start, end, streamed).plan(budget, work).peak

    def fullness(device: int, start: int, end: int) -> float | None:
        # Fewer blocks with weights than the device has to stream.
        if counts[device] > sum(has_weights[start:end]):
            return None
        budget = budgets[device]
        return bytes_held(kinds[device], start, end, counts[device], budget) / budget.available

    ((_, split_points),) = divide_blocks(len(blocks), len(budgets), starts, fullness)
    return split_points  # there are enough blocks for all


Division = tuple[Any, tuple[int, ...]]
"""The total cost of a division of blocks among devices, and its split points."""


def cheapest(divisions: list[Division]) -> list[Division]:
    """The division that costs least; of equals the one with the earliest split points."""
    return [min(divisions)]


def divide_blocks(
    num_blocks: int,
    num_devices: int,
    starts: Sequence[int],
    cost: Callable[[int, int, int], Any],
    total: Callable[[Any, Any], Any] = max,
    keep: Callable[[list[Division]], list[Division]] = cheapest,
) -> list[Division]:
    """Divide blocks among devices so that the total cost is least. Dynamic programming covers every
    division.

    Args:
        num_devices: At least 1; each has at least one block.
        starts: Blocks that can be the first of a device; the first device begins with block 0.
        cost: Of (device, start, end), the blocks from start to before end; None if the device
            cannot have them.
        total: The cost of the devices so far and of the next one together. It must not fall where
            the first of them rises.
        keep: Which divisions of the same blocks among the devices so far are worth continuing.

    Returns:
        What `keep` leaves of the divisions of all blocks, its order too; empty if there is none.
    """
    # By the block at which they end: first of one device, then of two, and so on.
    divisions: dict[int, list[Division]] = {0: [(None, ())]}
    for device in range(num_devices):
        longer: dict[int, list[Division]] = {}
        # Only the last device has to reach the end; all others may stop before any block that can
        # begin a device.
        for end in [num_blocks] if device == num_devices - 1 else starts:
            options: list[Division] = []
            for start, shorter in divisions.items():
                if start < end and (price := cost(device, start, end)) is not None:
                    options += [
                        (total(before, price), (*cuts, start)) if device else (price, cuts)
                        for before, cuts in shorter
                    ]
            if options:
                longer[end] = keep(options)
        divisions = longer
    return divisions.get(num_blocks, [])


def streamed_of(has_weights: Sequence[bool], start: int, end: int, count: int) -> frozenset[int]:
    """The streamed blocks of a device that has the blocks from `start` to before `end`."""
    alone = Placement(embed=_ANY, blocks=(_ANY,) * (end - start), head=_ANY)
    return frozenset(start + i for i in choose_streamed(alone, [count], has_weights[start:end]))


def partition_of(
    has_weights: Sequence[bool], split_points: Sequence[int], swap_blocks: Sequence[int]
) -> Partition:
    """Blocks divided at these points, each device with its number of streamed ones."""
    spans = list(pairwise((0, *split_points, len(has_weights))))
    streamed = [
        streamed_of(has_weights, start, end, count)
        for (start, end), count in zip(spans, swap_blocks, strict=True)
    ]
    devices = tuple(device for device, (start, end) in enumerate(spans) for _ in range(start, end))
    return Partition(devices=devices, streamed=frozenset().union(*streamed))


def weights_profile(
    model: StagedModel, spec: ModelSpec, precision: Precision, *, averaged: bool = False
) -> Profile:
    """A profile of the weights alone, with AdamW's state for the trained ones, and their average if
    there is one. The model has its adapters, and may be on `meta`."""
    names = {id(module): name for name, module in model.named_modules()}

    def cost(stage: nn.Module) -> StageCost:
        weights = trained = 0
        counted: set[int] = set()
        for prefix, module in stage.named_modules(prefix=names[id(stage)]):
            for leaf, parameter in module._parameters.items():
                if parameter is None or id(parameter) in counted:
                    continue
                counted.add(id(parameter))
                wide = spec.precision.keep_fp32(canonical_name(f"{prefix}.{leaf}"))
                dtype = final_dtype(module, leaf, torch.float32 if wide else precision.matmul)
                if parameter.requires_grad:
                    trained += parameter.numel() * torch.float32.itemsize
                else:
                    weights += parameter.numel() * dtype.itemsize
        return StageCost(
            weights=weights,
            adapters=trained,
            gradients=trained,
            optimizer=2 * trained,
            average=trained * averaged,
        )

    blocks = tuple(map(cost, model.blocks()))
    nothing = (0,) * (len(blocks) + 1)
    return Profile(
        embed=cost(model.embed),
        blocks=blocks,
        head=cost(model.head),
        crossing=nothing,
        crossing_back=nothing,
        trains_all=all(parameter.requires_grad for parameter in model.parameters()),
    )


def solve(
    job: StepJob,
    model: StagedModel,
    targets: Targets,
    work: Workload,
    profile_of: Callable[[Policy], Profile],
) -> tuple[Placement, Profile, str]:
    """Split a model across devices and choose each block's policy; a run and its plan use the same.

    Args:
        model: The model with its adapters, also on `meta`.
        work: Of one rank, if several share the step.
        profile_of: The profile of a step in which all blocks have the policy; cached.

    Returns:
        The placement; the costs of the stages under its policies; one line on the policies that a
        checkpointing budget chose, empty without one.
    """

    def placed(profiles: Callable[[], Sequence[Profile]]) -> Placement:
        # CPU devices share one memory, so a step's memory on each need not be compared.
        return _split(model, job, targets, None if targets.kind == "cpu" else profiles)

    def under(policies: Sequence[Policy]) -> Profile:
        return mixed([profile_of(policy) for policy in policies])

    schedule = job.schedule
    if schedule.budget is not None:
        limits = limited(targets.budgets, schedule.budget)
        # Blocks are split as for full checkpointing, the policy that remains when memory is scarce.
        placement = placed(lambda: [profile_of(Full())] * len(targets.devices))
        host = targets.host
        # Streamed weights and offloaded activations share the host's memory.
        if host is not None and placement.streamed:
            host = max(0, host - on_host(profile_of(Full()), placement.streamed))
        task = BudgetTask(
            profile_of=profile_of,
            division=Partition.of(placement),
            budgets=limits,
            work=work,
            host=host,
            can_offload=targets.kind == "cuda",
            gpus=targets.gpus,
        )
        choice = choose(task)
        placement = replace(placement, checkpointing=choice.schedule)
        return placement, under(choice.policies), choice.described()
    # A policy can be set per device, whose blocks are not known yet. Each device is judged as if
    # all blocks had its policy.
    alone = [
        schedule.alone_on(device) if schedule.devices else schedule for device in targets.devices
    ]
    count = len(model.blocks())
    placement = placed(lambda: [under(of_device.policies([None] * count)) for of_device in alone])
    policies = schedule.policies(placement.blocks)
    resolved = ACSchedule.of_blocks(policies) if schedule.devices else schedule
    return replace(placement, checkpointing=resolved), under(policies), ""


def _split(
    model: StagedModel,
    job: StepJob,
    targets: Targets,
    profiles: Callable[[], Sequence[Profile]] | None = None,
) -> Placement:
    """Split as configured, else by these profiles, which take seconds and are made only if they
    decide; without them by weights."""
    execution, split_points = job.execution, job.execution.split_points
    if len(targets.devices) > 1 and not split_points:
        averaged = bool(job.ema.decay)
        costs = (
            profiles()
            if profiles
            else weights_profile(model, job.spec, job.precision, averaged=averaged)
        )
        split_points = choose_split_points(
            costs, targets.budgets, swap_blocks=execution.swap_blocks, work=job.work
        )
    placement = place_blocks(model, targets.devices, split_points)
    has_weights = [next(block.parameters(), None) is not None for block in model.blocks()]
    return replace(
        placement, streamed=choose_streamed(placement, execution.swap_blocks, has_weights)
    )


def weights_in_words(quantize: str) -> str:
    """The format of weights, for a line of the log."""
    return "exact weights" if quantize == "none" else f"{quantize} weights"


def profiles_of(job: StepJob, *, splits: bool = True) -> Callable[..., Profile]:
    """A function from a policy of all blocks to the step's profile, and from a policy and a format
    of the frozen weights; each is made once. `splits` as for `profile`."""
    profiles: list[Profile] = []

    @cache
    def profile_of(policy: Policy | str, quantize: str = "") -> Profile:
        weights = f", {weights_in_words(quantize)}" if quantize else ""
        doing(f"planning a training step, checkpointing {policy}{weights}")
        quantize = quantize or job.execution.quantize
        alone = job.with_execution(checkpointing=str(policy), quantize=quantize)
        like = profiles[0] if profiles else None
        profiles.append(profile(alone, like=like, splits=splits))
        return profiles[-1]

    return profile_of


def needs_profile(execution: Execution) -> bool:
    """Whether `placement_of` runs a training step on fake tensors, and so needs its batch: for a
    budget, and to split a model by the memory of each device, which only GPUs have of their own."""
    devices, budget = execution.torch_devices, execution.schedule.budget
    if budget is not None or execution.split_points or len(devices) == 1:
        return budget is not None
    return all(device.type == "cuda" for device in devices)


def placement_of(model: StagedModel, job: StepJob, *, training: bool = True) -> Placement:
    """Which device of this machine runs and holds which block, which blocks are streamed, and the
    policy of each.

    Training on several GPUs is split by the memory of a whole step on each, activations included,
    as in its plan. Inference is split by weights. The model has its adapters, and may be on `meta`;
    the job's batch may be empty unless `needs_profile`.
    """
    execution = job.execution
    if not (training and needs_profile(execution)):
        devices = execution.torch_devices
        several = len(devices) > 1 and not execution.split_points
        budgets = budgets_here(devices, execution.reserve) if several else ()
        targets = Targets(kind=devices[0].type, devices=devices, budgets=budgets)
        placement = _split(model, job, targets)
        return replace(placement, checkpointing=execution.schedule if training else None)
    start, targets = time.monotonic(), targets_of(execution)
    placement, _, chosen = solve(job, model, targets, job.work, profiles_of(job))
    if chosen:
        say(chosen)
    if targets.kind == "cuda" and len(targets.devices) > 1 and not execution.split_points:
        say(
            f"split points chosen by the memory of a step on each device, planned in "
            f"{time.monotonic() - start:.0f} s"
        )
    return placement
