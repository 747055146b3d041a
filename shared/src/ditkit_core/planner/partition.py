"""Where a model is cut: so that over a whole training step the fullest device, for what it can hold, is least full.

A run and its plan divide a model by the same function of the same figures, so that the run does what the plan says. What a device holds
depends on its own blocks alone, so no other cuts do better: all of them are looked at. Every device holds one block at least: who wants
a card left out names it not.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from ditkit_core.adapters.inject import canonical_name
from ditkit_core.config.sizes import parse_size
from ditkit_core.engine.block_swap import choose_streamed
from ditkit_core.engine.devices import spread
from ditkit_core.engine.placement import Placement
from ditkit_core.engine.placement import place as place_blocks
from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import StagedModel
from ditkit_core.models.spec import ModelSpec
from ditkit_core.nn.quantized_linear import final_dtype
from ditkit_core.planner.gpus import Card, cards_here, keeping_reserves
from ditkit_core.planner.memory import Budget, plan_device
from ditkit_core.planner.profiler import Profile, StageCost
from ditkit_core.run.run import Run
from ditkit_core.weights.layer_streaming import MARGIN_BYTES, free_memory_bytes

_ANY = torch.device("cuda")


def choose_cuts(
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
    counts = spread(swap_blocks, len(budgets), "train.swap_blocks")
    if min(counts) < 0:
        raise UserError(f"train.swap_blocks = {list(swap_blocks)} must be numbers of at least 0")
    if any(counts) and sum(max(1, count) for count in counts) > len(starts):
        raise UserError(
            f"train.swap_blocks = {list(swap_blocks)} of {len(budgets)} devices, and the model has {len(starts)} blocks; lower it"
        )

    kinds = [profiles.index(each) for each in profiles]

    @cache
    def bytes_held(kind: int, start: int, end: int, count: int, budget: Budget) -> int:
        return plan_device(
            profiles[kind], start, end, budget, streamed=streamed_of(has_weights, start, end, count),
            micro_batches=micro_batches, pipelined=pipelined,
        ).peak  # fmt: skip

    def fullness(device: int, start: int, end: int) -> float | None:
        if counts[device] > sum(has_weights[start:end]):
            return None
        budget = budgets[device]
        return bytes_held(kinds[device], start, end, counts[device], budget) / (budget.total - budget.reserve)

    cuts = least_full(len(blocks), len(budgets), starts, fullness)
    assert cuts is not None, "there are enough blocks for all"
    return cuts


def least_full(
    num_blocks: int, num_devices: int, starts: Sequence[int], fullness: Callable[[int, int, int], float | None]
) -> tuple[int, ...] | None:
    """Cuts after which the fullest of the devices is least full; of equal ones the earliest. None if there is no way.

    No other cuts do better: every one of them is looked at, by dynamic programming.

    Args:
        num_blocks: To divide.
        num_devices: At most as many as blocks.
        starts: Blocks that may be a device's first.
        fullness: Of a device that holds the blocks from one to before another; None where that cannot be.
    """
    # best[k]: (fullest device, cuts) when the devices so far hold the first k blocks
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for device in range(num_devices):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in [num_blocks] if device == num_devices - 1 else starts:
            options = (
                (max(fullest, own), (*cuts, end))
                for start, (fullest, cuts) in best.items()
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


def budgets_of(cards: Sequence[Card]) -> tuple[Budget, ...]:
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
            "train.cuts before which blocks the next device begins"
        )
    if kinds == {"cpu"}:
        free = free_memory_bytes(devices[0]) or 2**62
        return (Budget(name="cpu", total=free, workspace=0),) * len(devices)
    return budgets_of(keeping_reserves(cards_here(devices), reserve_gib))


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
        embed=cost(model.embed), blocks=blocks, head=cost(model.head), crossing=nothing, crossing_back=nothing,
        trains_all=all(parameter.requires_grad for parameter in model.parameters()),
    )  # fmt: skip


def place(run: Run, model: StagedModel, profile: Profile | Sequence[Profile] | None = None) -> Placement:
    """Which of the run's devices runs what.

    Args:
        run: The run.
        model: With its adapters; `meta` will do.
        profile: What a step of it holds, or would on each of the devices; None divides by weights and what training keeps for them alone.

    Raises:
        UserError: If `train.cuts` or `train.swap_blocks` do not divide the model, or the devices cannot be compared.
    """
    chosen = len(run.devices) > 1 and not run.config.train.cuts
    budgets = budgets_here(run.devices, run.config.train.reserve) if chosen else ()
    return place_on(run, model, run.devices, budgets, profile)


def place_on(
    run: Run,
    model: StagedModel,
    devices: Sequence[torch.device],
    budgets: Sequence[Budget],
    profile: Profile | Sequence[Profile] | None = None,
) -> Placement:
    """The same for any devices, with what each can hold, of which cuts given by hand need nothing."""
    config, cuts = run.config.train, run.config.train.cuts
    if len(devices) > 1 and not cuts:
        if profile is None:
            profile = weights_profile(model, run.spec, run.precision, averaged=bool(run.config.ema.decay))
        cuts = choose_cuts(
            profile, budgets, swap_blocks=config.swap_blocks, micro_batches=run.config.micro_batches,
            pipelined=config.pipelined,
        )  # fmt: skip
    placed = place_blocks(model, devices, cuts)
    has_weights = [next(block.parameters(), None) is not None for block in model.blocks()]
    return replace(placed, streamed=choose_streamed(placed, config.swap_blocks, has_weights))
