"""What `--fit` searches for a run on given GPUs, and a choice as settings and in words."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ditkit_core.config.sizes import per_device
from ditkit_core.engine.devices import choose_device, choose_devices
from ditkit_core.planner.gpus import GPU, gpus_here, keeping_reserves, parse_gpus
from ditkit_core.planner.plan import check_formats
from ditkit_core.planner.search.fitted import formats_of, task_of, weights_in_words
from ditkit_core.planner.search.partition_search import Candidate, FitTask
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext
from ditkit_core.run.plans.levels import Level
from ditkit_core.run.plans.plan import planned_step

_FIRST = {"auto": "cuda:0", "cuda": "cuda:0"}
"""Device that a name without an index means on a machine with a GPU."""


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The result of a search; without a choice, the lines say what lacks."""

    config: RunConfig
    lines: Sequence[str]
    chosen: Candidate | None = None
    title: str = ""
    """The choice in one line."""
    level: Level | None = None
    """What else had to be changed."""


def gpus_to_fit(config: RunConfig, gpus: str) -> tuple[tuple[GPU, ...], tuple[str, ...]]:
    """The GPUs to choose among, with train.reserve kept free, and the name of each in train.devices.

    Args:
        gpus: The `--gpus` flag; empty for the GPUs of this machine.
    """
    if gpus:
        candidates = parse_gpus(gpus)
        # One name more than GPUs: the device that generates previews is skipped.
        free = [f"cuda:{i}" for i in range(len(candidates) + 1) if not _samples_on(config, i)]
        names = tuple(free[: len(candidates)])
    else:
        devices = _devices_here(config)
        candidates, names = gpus_here(devices), tuple(map(str, devices))
    return keeping_reserves(candidates, config.train.reserve), names


def task_for(run: RunContext, gpus: tuple[GPU, ...]) -> FitTask:
    """The search problem of a run on these GPUs.

    Raises:
        UserError: If one of them has no products in the 8 bits of base.compute.
    """
    check_formats(run.config.base.compute, gpus)
    job, stored = planned_step(run, gpus=gpus).job, run.stored_as
    return task_of(job, gpus, formats_of(job, configured=run.config.base.quantize, stored=stored), stored)


def apply(config: RunConfig, chosen: Candidate, names: Sequence[str]) -> RunConfig:
    """The configuration with the chosen settings; everything that is not searched stays as it is."""
    setting, train = chosen.setting, config.train
    used = [names[i] for i in setting.gpus]
    if len(used) > 1:
        device, devices = "auto", tuple(used)
    else:  # with one GPU to choose from, a name like `cuda` stays as the user wrote it
        keeps = len(names) == 1 and not train.devices and _FIRST.get(train.device, train.device) == used[0]
        device, devices = train.device if keeps else used[0], ()
    reserve = per_device(train.reserve, len(names), "train.reserve") if len(train.reserve) > 1 else train.reserve
    changed: dict[str, Any] = {
        "device": device,
        "devices": devices,
        "split_points": setting.split_points,
        "checkpointing": setting.policy,
        "pipelined": setting.pipelined,
        "swap_blocks": setting.swap if any(setting.swap) else (),
        "reserve": tuple(reserve[i] for i in setting.gpus) if len(reserve) > 1 else reserve,
    }
    quantize: dict[str, Any] = {"quantize": setting.quantize}
    return replace(config, train=replace(train, **changed), base=replace(config.base, **quantize))


def in_words(candidate: Candidate, names: Sequence[str]) -> str:
    setting = candidate.setting
    bounds = candidate.division.bounds
    spans = [
        f"{names[gpu]} blocks {bounds[i]} to {bounds[i + 1] - 1}" + (f", {swap} of them streamed" if swap else "")
        for i, (gpu, swap) in enumerate(zip(setting.gpus, setting.swap, strict=True))
    ]
    order = ", micro-batches overlapping" if setting.pipelined else ""
    return (
        f"checkpointing {setting.policy}, {weights_in_words(setting.quantize)}, {'; '.join(spans)}{order}: about {candidate.seconds:.2g} s a step, "
        f"the fullest GPU uses {candidate.fullness:.0%} of its budget"
    )


def _devices_here(config: RunConfig) -> tuple[torch.device, ...]:
    if config.train.devices:
        return choose_devices(config.train.devices)
    if config.train.device == "auto":
        devices = choose_devices(("all",)) if torch.cuda.is_available() else (choose_device("auto", "train.device"),)
        training = [device for device in devices if device.type == "cpu" or not _samples_on(config, device.index)]
        return tuple(training) or devices
    return choose_devices((config.train.device,))


def _samples_on(config: RunConfig, index: int) -> bool:
    """Whether previews are generated on this GPU, which then does not train."""
    name = config.sample.device
    return name.startswith("cuda") and int(name.removeprefix("cuda").removeprefix(":") or 0) == index
