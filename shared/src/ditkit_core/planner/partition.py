"""Where a model is cut: so that over a whole training step the fullest device, for what it can hold, is least full.

`place_blocks` is what commands ask. A run and its plan divide a model by the same `Partitioner` of the same figures, so that the run does what
the plan says. What a device holds depends on its own blocks alone, so no other split is better: every one is looked at. Every device
gets one block at least: omit a device to leave it unused.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn

from ditkit_core.adapters.inject import canonical_name
from ditkit_core.config.sizes import parse_size
from ditkit_core.engine.ac_policies import Full, Policy
from ditkit_core.engine.ac_schedule import ACSchedule
from ditkit_core.engine.block_swap import choose_streamed
from ditkit_core.engine.devices import per_device
from ditkit_core.engine.placement import Placement, place_blocks
from ditkit_core.errors import UserError
from ditkit_core.io.console import say
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import StagedModel
from ditkit_core.models.spec import ModelSpec
from ditkit_core.nn.quantized_linear import final_dtype
from ditkit_core.planner.ac_budget import BudgetTask, choose, limited
from ditkit_core.planner.gpus import GPU, gpus_here, keeping_reserves
from ditkit_core.planner.memory import Budget, Partition, on_host, plan_device
from ditkit_core.planner.planned_step import PlannedStep, as_held, largest_bucket
from ditkit_core.planner.profiler import profile
from ditkit_core.planner.stage_costs import Profile, StageCost, StepJob, mixed
from ditkit_core.run.context import RunContext
from ditkit_core.run.prepare import MetaModel
from ditkit_core.weights.layer_streaming import MARGIN_BYTES, free_memory_bytes

_ANY = torch.device("cuda")


def choose_split_points(
    profile: Profile | Sequence[Profile],
    budgets: Sequence[Budget],
    *,
    swap_blocks: Sequence[int] = (),
    micro_batches: int = 1,
    pipelined: bool = False,
) -> tuple[int, ...]:
    """The blocks before which the next device begins; each device has one that holds parameters at least, and as many as it streams.

    Args:
        profile: What the stages hold, or what they would on each of the devices; `weights_profile` leaves out activations.
        budgets: The devices, in order.
        swap_blocks: `train.swap_blocks`.
        micro_batches: How many a step adds up.
        pipelined: Whether they overlap.

    Raises:
        UserError: If there are more devices than blocks, more blocks to be streamed than there are, or numbers of those that fit no
            devices.
    """
    profiles = [profile] * len(budgets) if isinstance(profile, Profile) else list(profile)
    blocks = profiles[0].blocks
    has_weights = [block.weights + block.adapters > 0 for block in blocks]
    # A block without parameters runs where its carry is: no device begins with it.
    starts = [i for i, has in enumerate(has_weights) if has]
    if len(budgets) > len(starts):
        raise UserError(
            f"train.devices names {len(budgets)} devices and the model has {len(starts)} blocks; name fewer"
        )
    counts = per_device(swap_blocks, len(budgets), "train.swap_blocks")
    if min(counts) < 0:
        raise UserError(f"train.swap_blocks = {list(swap_blocks)} must be numbers of at least 0")
    if any(counts) and sum(max(1, count) for count in counts) > len(starts):
        raise UserError(
            f"train.swap_blocks = {list(swap_blocks)} of {len(budgets)} devices, and the model has {len(starts)} blocks; lower it"
        )

    kinds = [profiles.index(each) for each in profiles]

    @cache
    def bytes_held(kind: int, start: int, end: int, count: int, budget: Budget) -> int:
        streamed = streamed_of(has_weights, start, end, count)
        return plan_device(
            profiles[kind], start, end, budget, streamed=streamed, micro_batches=micro_batches, pipelined=pipelined
        ).peak

    def fullness(device: int, start: int, end: int) -> float | None:
        if counts[device] > sum(has_weights[start:end]):
            return None
        budget = budgets[device]
        return bytes_held(kinds[device], start, end, counts[device], budget) / budget.available

    split_points = least_full(len(blocks), len(budgets), starts, fullness)
    assert split_points is not None, "there are enough blocks for all"
    return split_points


def least_full(
    num_blocks: int, num_devices: int, starts: Sequence[int], fullness: Callable[[int, int, int], float | None]
) -> tuple[int, ...] | None:
    """Cuts after which the fullest of the devices is least full; of equal ones the earliest. None if there is no way.

    No other split does better: every one of them is looked at, by dynamic programming.

    Args:
        num_blocks: To divide.
        num_devices: At most as many as blocks.
        starts: Blocks that may be a device's first.
        fullness: Of a device that holds the blocks from one to before another; None where that cannot be.
    """
    # best[k]: (fullest device, split points) when the devices so far hold the first k blocks
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for device in range(num_devices):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in [num_blocks] if device == num_devices - 1 else starts:
            options = (
                (max(fullest, own), (*split_points, end))
                for start, (fullest, split_points) in best.items()
                if start < end and (own := fullness(device, start, end)) is not None
            )
            if (least := min(options, default=None)) is not None:
                following[end] = least
        best = following
    return best[num_blocks][1][:-1] if num_blocks in best else None


def streamed_of(has_weights: Sequence[bool], start: int, end: int, count: int) -> frozenset[int]:
    """Which blocks are streamed by a device that has those from `start` to before `end`."""
    alone = Placement(embed=_ANY, blocks=(_ANY,) * (end - start), head=_ANY)
    return frozenset(start + i for i in choose_streamed(alone, [count], has_weights[start:end]))


def budgets_of(cards: Sequence[GPU]) -> tuple[Budget, ...]:
    """Cards as a plan takes them."""
    names = [f"{index}: {card.name}" if len(cards) > 1 else card.name for index, card in enumerate(cards)]
    return tuple(
        Budget(name=name, total=card.total, reserve=card.reserve) for name, card in zip(names, cards, strict=True)
    )


def budgets_here(devices: Sequence[torch.device], reserve_gib: Sequence[float]) -> tuple[Budget, ...]:
    """What the devices of this machine can hold: GPUs less what a plan leaves free and `train.reserve`; the host what is free now.

    Raises:
        UserError: If a reserve leaves nothing, or the devices cannot be compared.
    """
    kinds = {device.type for device in devices}
    if len(kinds) > 1:
        raise UserError(
            f"train.devices = {[str(device) for device in devices]}: what GPUs and the host hold is not compared; say with "
            "train.split_points before which blocks the next device begins"
        )
    if kinds == {"cpu"}:
        free = free_memory_bytes(devices[0]) or 2**62
        return (Budget(name="cpu", total=free, workspace=0),) * len(devices)
    return budgets_of(keeping_reserves(gpus_here(devices), reserve_gib))


def host_limit(host: str, *, here: bool) -> int | None:
    """Bytes that streamed weights may take on the host; None for any.

    Args:
        host: `--host`; empty for what the host can give.
        here: Whether the run is planned for this machine.

    Raises:
        UserError: If it is no size.
    """
    if host:
        return parse_size(host, "--host")
    free = free_memory_bytes(torch.device("cpu")) if here else None
    return None if free is None else max(0, free - MARGIN_BYTES)


def weights_profile(model: StagedModel, spec: ModelSpec, precision: Precision, *, averaged: bool = False) -> Profile:
    """What the weights alone bring to a device, and what AdamW keeps for those that are trained.

    Args:
        model: With its adapters; `meta` will do.
        spec: Says what stays in fp32.
        precision: The dtypes.
        averaged: Whether there is an average of the trained weights.
    """
    names = {id(module): name for name, module in model.named_modules()}

    def cost(stage: nn.Module) -> StageCost:
        weights = trained = 0
        seen: set[int] = set()
        for prefix, module in stage.named_modules(prefix=names[id(stage)]):
            for leaf, parameter in module._parameters.items():
                if parameter is None or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                wide = spec.precision.keep_fp32(canonical_name(f"{prefix}.{leaf}"))
                dtype = final_dtype(module, leaf, torch.float32 if wide else precision.matmul)
                if parameter.requires_grad:
                    trained += parameter.numel() * torch.float32.itemsize
                else:
                    weights += parameter.numel() * dtype.itemsize
        return StageCost(
            weights=weights, adapters=trained, gradients=trained, optimizer=2 * trained, average=trained * averaged
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


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The devices that a step is planned for."""

    kind: str
    """`cuda` or `cpu`."""
    devices: tuple[torch.device, ...]
    budgets: tuple[Budget, ...] = ()
    """Of these devices; split points that are given need none."""
    cards: tuple[GPU, ...] = ()
    """With their rates, if they are GPUs and times are asked for."""
    host: int | None = None
    """Bytes that the host can give beside them; None for any."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A step on its devices."""

    placement: Placement
    profile: Profile
    """What the stages hold under the policies of `placement.checkpointing`."""
    chosen: str = ""
    """One line on what a budget for checkpointing came to."""


@dataclass(frozen=True, kw_only=True)
class Partitioner:
    """Divides a run's model over devices and gives each block its policy: the same for a run as for its plan."""

    run: RunContext
    model: StagedModel
    """With its adapters; `meta` will do."""
    targets: Targets
    profile_of: Callable[[Policy], Profile]
    """The profile of a step in which all blocks have the policy; always the same one."""

    def solve(self, schedule: ACSchedule) -> Solution:
        """Which device runs what, and which block has which policy.

        Raises:
            UserError: If `train.split_points` or `train.swap_blocks` do not divide the model, or a budget cannot be kept.
        """
        if schedule.budget is not None:
            return self._within(schedule.budget)
        count = len(self.model.blocks())
        # A policy may be given by device, and which blocks a device gets is not known yet: its spans are judged as if all had its policy.
        by_device = [schedule.alone_on(device) if schedule.devices else schedule for device in self.targets.devices]
        placement = self._placed(lambda: [self._under(each.policies([None] * count)) for each in by_device])
        policies = schedule.policies(placement.blocks)
        resolved = ACSchedule.of_blocks(policies) if schedule.devices else schedule
        return Solution(placement=replace(placement, checkpointing=resolved), profile=self._under(policies))

    def _within(self, sizes: Sequence[str]) -> Solution:
        """A budget fills devices that are divided as full checkpointing divides them, which is what is left where bytes are short."""
        targets, config = self.targets, self.run.config.train
        limits = limited(targets.budgets, sizes)
        placement = self._placed(lambda: [self.profile_of(Full())] * len(targets.devices))
        host = targets.host
        if host is not None and placement.streamed:
            host = max(0, host - on_host(self.profile_of(Full()), placement.streamed))
        task = BudgetTask(
            profile_of=self.profile_of,
            division=partition_of(placement),
            budgets=limits,
            micro_batches=self.run.config.micro_batches,
            pipelined=config.pipelined,
            host=host,
            can_offload=targets.kind == "cuda",
        )
        choice = choose(task)
        placement = replace(placement, checkpointing=choice.schedule)
        return Solution(placement=placement, profile=self._under(choice.policies), chosen=choice.described())

    def _placed(self, profiles: Callable[[], Sequence[Profile]]) -> Placement:
        # CPUs share one memory, so there is nothing to gain by comparing what a step holds on each.
        if self.targets.kind == "cpu":
            return _by_weights(self.run, self.model, self.targets)
        return _cut(self.run, self.model, self.targets, profiles)

    def _under(self, policies: Sequence[Policy]) -> Profile:
        return mixed([self.profile_of(policy) for policy in policies])


def _by_weights(run: RunContext, model: StagedModel, targets: Targets) -> Placement:
    """Divided by what the weights take, with what training keeps for them."""
    averaged = bool(run.config.ema.decay)
    return _cut(run, model, targets, lambda: weights_profile(model, run.spec, run.precision, averaged=averaged))


def _cut(
    run: RunContext, model: StagedModel, targets: Targets, profiles: Callable[[], Profile | Sequence[Profile]]
) -> Placement:
    """Cut as configured, or else by these profiles: making them takes seconds, so they are made only where they decide."""
    config, split_points = run.config.train, run.config.train.split_points
    if len(targets.devices) > 1 and not split_points:
        split_points = choose_split_points(
            profiles(),
            targets.budgets,
            swap_blocks=config.swap_blocks,
            micro_batches=run.config.micro_batches,
            pipelined=config.pipelined,
        )
    placed = place_blocks(model, targets.devices, split_points)
    has_weights = [next(block.parameters(), None) is not None for block in model.blocks()]
    return replace(placed, streamed=choose_streamed(placed, config.swap_blocks, has_weights))


def partition_of(placement: Placement) -> Partition:
    """A placement as a plan takes it."""
    order = list(dict.fromkeys(placement.blocks))
    return Partition(devices=tuple(map(order.index, placement.blocks)), streamed=placement.streamed)


def profiles_of(job: StepJob) -> Callable[[Policy], Profile]:
    """The profile of a step by the policy of its blocks; each is made once."""
    return cache(lambda policy: profile(replace(job, policy=ACSchedule.everywhere(policy))))


def place(run: RunContext, unloaded: MetaModel, *, training: bool = False) -> Placement:
    """Which of the run's devices runs what: what every command asks that loads a model.

    Training over several GPUs is divided by what a whole step holds on each, activations included, as the run's plan says.

    Args:
        run: The run.
        unloaded: Its model, with its adapters.
        training: Whether it is trained, under the policies that `train.checkpointing` comes to.

    Raises:
        UserError: If `train.split_points` or `train.swap_blocks` do not divide the model, the devices cannot be compared, or a budget cannot be
            kept.
    """
    config, kind = run.config.train, run.devices[0].type
    schedule = config.schedule
    several = len(run.devices) > 1 and not config.split_points
    compared = training and several and all(device.type == "cuda" for device in run.devices)
    planned = compared or (training and schedule.budget is not None)
    targets = Targets(
        kind=kind,
        devices=run.devices,
        budgets=budgets_here(run.devices, config.reserve) if several or planned else (),
        host=host_limit("", here=True) if planned and kind == "cuda" else None,  # a CPU is the host itself
    )
    if not planned:
        placement = _by_weights(run, unloaded.model, targets)
        return replace(placement, checkpointing=schedule if training else None)
    began, held = time.monotonic(), as_held(run)
    bucket = largest_bucket(held, unloaded.arch)
    step = PlannedStep(run=held, arch=unloaded.arch, adapter=unloaded.adapter, bucket=bucket)
    profiles = profiles_of(step.job(kind))
    solution = Partitioner(run=run, model=unloaded.model, targets=targets, profile_of=profiles).solve(schedule)
    if solution.chosen:
        say(solution.chosen)
    if compared:
        say(f"split points chosen by what a step holds on each device, planned in {time.monotonic() - began:.0f} s")
    return solution.placement
