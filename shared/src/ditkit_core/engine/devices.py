"""The devices of a run, from the names in a configuration."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ditkit_core.distributed.launch import local_rank
from ditkit_core.errors import UserError, argument
from ditkit_core.io.nvidia import num_listed_gpus

ALL = "all"
"""Stands for all GPUs of the machine."""


def choose_device(name: str, key: str) -> torch.device:
    """The device of the setting `key`; `auto` is the first GPU, this rank's GPU where there are
    several, or the CPU if there is no GPU.

    A GPU always has an index.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", local_rank())
        if reason := why_unusable():
            raise UserError(f"{key} = auto: {reason}; or set {key} = cpu")
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(
            f"{key} = {name!r} is not a device; choose auto, cpu, cuda or cuda:1"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(
            f"{key} = {name!r}: ditkit runs on cpu and cuda; choose auto, cpu, cuda or cuda:1"
        )
    if device.type == "cpu":
        return device
    # `cuda` is the current device wherever it is used, which differs from thread to thread:
    # autograd has one for each device.
    device = torch.device("cuda", local_rank() if device.index is None else device.index)
    if device.index >= torch.cuda.device_count():
        raise UserError(
            f"{key} = {name!r}: "
            f"{why_unusable() or f'this machine has {_num_gpus()}; choose another'}"
        )
    return device


def choose_devices(names: Sequence[str]) -> tuple[torch.device, ...]:
    """The devices of `train.devices`, in the given order; `all` means the GPUs of this machine."""
    if ALL in names:
        if len(names) > 1:
            raise UserError(
                f'{argument("train.devices")} = {list(names)}: "all" means every GPU; leave the others out'
            )
        if not torch.cuda.is_available():
            reason = why_unusable() or "this machine has none; leave it out"
            raise UserError(
                f'{argument("train.devices")} = ["all"] means the CUDA devices: {reason}'
            )
        return tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    devices = (
        [choose_device(name, argument("train.devices")) for name in names]
        if len(names) == 1
        else _several(names)
    )
    if len(set(devices)) < len(devices):
        raise UserError(
            f"{argument('train.devices')} = {list(names)} names a device twice; name each once"
        )
    return tuple(devices)


def _several(names: Sequence[str]) -> list[torch.device]:
    # Counted first: a list of GPUs deserves a message on their number, not on the first that is
    # missing.
    wanted = sum(name.startswith("cuda") for name in names)
    if wanted > torch.cuda.device_count():
        reason = why_unusable() or (
            f"this machine has {_num_gpus()}; name those that it has, or none "
            f"(CUDA_VISIBLE_DEVICES hides GPUs that it does not list)"
        )
        raise UserError(
            f"{argument('train.devices')} = {list(names)} names {wanted} GPUs, and {reason}"
        )
    return [choose_device(name, argument("train.devices")) for name in names]


def _num_gpus() -> str:
    count = torch.cuda.device_count()
    return f"{count} CUDA device" if count == 1 else f"{count or 'no'} CUDA devices"


def make_current(devices: Iterable[torch.device]) -> None:
    """Make the first GPU among the devices the process's current one, for all that names no device.

    Otherwise that is `cuda:0`, also for a run on other GPUs: releasing memory and page-locking
    would take some hundred MiB of it for nothing, and fail if another program has filled it.
    """
    for device in devices:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            return


def why_unusable() -> str:
    """Why torch cannot use the NVIDIA GPU of this machine, and what to do; empty if it can, or if
    there is no sign of a GPU.

    Not all of the driver is missing then: usually it is older than the CUDA that torch was built
    with.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or torch.version.cuda is None or torch.cuda.is_available() or not _has_gpu():
        return ""
    try:
        torch.cuda.init()
        reason = "it finds no device"
    except RuntimeError as error:
        reason = str(error).split(". ")[0].splitlines()[0].rstrip(".")
    return (
        f"this machine has an NVIDIA GPU that torch {torch.__version__} cannot use ({reason}); "
        f"install a driver for CUDA {torch.version.cuda}, or a torch for the installed driver"
    )


def _has_gpu() -> bool:
    if next(Path("/dev").glob("nvidia[0-9]*"), None) is not None:
        return True
    return num_listed_gpus() > 0  # Windows, and Linux inside of Windows
