"""The devices that a step is planned for, with what is free on them: of this machine, or named
GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ditkit_core.config.sizes import parse_size
from ditkit_core.errors import UserError
from ditkit_core.execution import Execution
from ditkit_core.planner.gpus import GPU, gpus_here, keeping_reserves, parse_gpus, weakest
from ditkit_core.planner.kernel_time import rate_of_codes
from ditkit_core.planner.memory import Budget
from ditkit_core.planner.rank_layout import RankLayout
from ditkit_core.weights.layer_streaming import MARGIN_BYTES, free_memory_bytes


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The devices of a planned step."""

    kind: str
    """`cuda` or `cpu`."""
    devices: tuple[torch.device, ...]
    budgets: tuple[Budget, ...] = ()
    """Budgets of these devices; not needed if split points are set."""
    gpus: tuple[GPU, ...] = ()
    """The GPUs with their rates."""
    host: int | None = None
    """Bytes available on the host in addition; None for no limit."""


def targets_of(
    execution: Execution, gpus: str = "", host: str = "", layout: RankLayout | None = None
) -> Targets:
    """The devices of a process, with what is free on them: `gpus` of one machine, or without any
    the devices that `execution` names on this machine. `host` is the memory for streamed weights
    there: if it is empty, the free memory of this machine, or no limit with `gpus`. The ranks of a
    layout share the machine."""
    per_machine, reserve = 1 if layout is None else layout.nproc, execution.reserve
    if not gpus and any(device.type == "cpu" for device in execution.torch_devices):
        if host:
            raise UserError(
                f"--host {host} is memory for weights that are streamed to GPUs, and this run is "
                "planned for the CPU; leave it out, or name the GPUs to plan for: --gpus 24GiB"
            )
        # The device is the host itself, so there is no other memory to limit.
        devices = execution.torch_devices
        budgets = budgets_here(devices, reserve)
        if per_machine > 1:  # a rank's part of the host, which all ranks of a machine share
            budgets = tuple(
                replace(
                    budget, name=f"{budget.name} / {per_machine}", total=budget.total // per_machine
                )
                for budget in budgets
            )
        return Targets(kind="cpu", devices=devices, budgets=budgets)
    hardware = parse_gpus(gpus) if gpus else gpus_here(execution.torch_devices)
    check_formats(execution.compute, hardware)
    if layout is not None:
        hardware = (weakest(hardware),)
    devices = _names_for(execution, len(hardware)) if gpus else execution.torch_devices
    hardware = keeping_reserves(hardware, reserve)
    limit, budgets = host_limit(host, here=not gpus), budgets_of(hardware)
    if layout is not None:
        budgets = tuple(
            replace(budget, name=f"{budget.name} of {layout.size}") for budget in budgets
        )
    return Targets(
        kind="cuda",
        devices=devices,
        budgets=budgets,
        gpus=hardware,
        host=None if limit is None else limit // per_machine,
    )


def budgets_of(gpus: Sequence[GPU]) -> tuple[Budget, ...]:
    """The budgets of GPUs, numbered if there are several."""
    if len(gpus) == 1:
        return (gpus[0].budget,)
    return tuple(replace(gpu.budget, name=f"{index}: {gpu.name}") for index, gpu in enumerate(gpus))


def budgets_here(
    devices: Sequence[torch.device], reserve_gib: Sequence[float]
) -> tuple[Budget, ...]:
    """The budgets of this machine's devices: GPUs without the plan's reserve and `train.reserve`;
    for the host its free memory."""
    kinds = {device.type for device in devices}
    if len(kinds) > 1:
        raise UserError(
            f"train.devices = {[str(device) for device in devices]}: GPUs and the host cannot be "
            "compared; set train.split_points, the blocks before which the next device begins"
        )
    if kinds == {"cpu"}:
        free = free_memory_bytes(devices[0])
        return (Budget(name="cpu", total=free, workspace=0),) * len(devices)
    return budgets_of(keeping_reserves(gpus_here(devices), reserve_gib))


def host_limit(host: str, *, here: bool) -> int | None:
    """Bytes that streamed weights may use on the host, as `--host` says; without it the free memory
    of this machine, or None, no limit, for a plan for others."""
    if host:
        return parse_size(host, "--host")
    return max(0, free_memory_bytes(torch.device("cpu")) - MARGIN_BYTES) if here else None


def check_formats(compute: str, gpus: Sequence[GPU]) -> None:
    """Refuse products in 8 bits on a GPU that has none of that format."""
    for gpu in gpus if compute != "dtype" else ():
        if gpu.bf16_flops and not rate_of_codes(gpu, compute):
            raise UserError(
                f"base.compute = {compute}: {gpu.name} has no products of this format; leave "
                f"base.compute out"
            )


def _names_for(execution: Execution, count: int) -> tuple[torch.device, ...]:
    """Devices for GPUs that need not exist, with the configured names, because policies can be set
    per device name."""
    names = execution.device_names
    if len(names) != count or not all(name.startswith("cuda:") for name in names):
        names = tuple(f"cuda:{index}" for index in range(count))
    return tuple(map(torch.device, names))
