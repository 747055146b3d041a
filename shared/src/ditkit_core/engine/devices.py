"""The devices of a run, from the names in a configuration."""

from collections.abc import Sequence

import torch

from ditkit_core.errors import UserError

ALL = "all"
"""Stands for all GPUs of the machine."""


def choose_device(name: str, key: str) -> torch.device:
    """The device of the setting `key`; `auto` is the first GPU, or the CPU if there is none.

    Raises:
        UserError: If this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"{key} = {name!r} is not a device; choose auto, cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"{key} = {name!r}: ditkit runs on cpu and cuda; choose auto, cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"{key} = {name!r}: this machine has {_num_gpus()}; choose another")
    return device


def choose_devices(names: Sequence[str]) -> tuple[torch.device, ...]:
    """The devices of `train.devices`, in the given order; `all` means the GPUs of this machine.

    Raises:
        UserError: If this machine lacks one, or one is named twice.
    """
    if ALL in names:
        if len(names) > 1:
            raise UserError(f'train.devices = {list(names)}: "all" means every GPU; leave the others out')
        if not torch.cuda.is_available():
            raise UserError('train.devices = ["all"] means the CUDA devices, and this machine has none; leave it out')
        return tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    found = [choose_device(name, "train.devices") for name in names] if len(names) == 1 else _several(names)
    # `cuda` and `cuda:0` are the same device
    if len({(device.type, device.index or 0) for device in found}) < len(found):
        raise UserError(f"train.devices = {list(names)} names a device twice; name each once")
    return tuple(found)


def _several(names: Sequence[str]) -> list[torch.device]:
    # Counted first: a list of GPUs deserves a message on their number, not on the first that is missing.
    wanted = sum(name.startswith("cuda") for name in names)
    if wanted > torch.cuda.device_count():
        raise UserError(
            f"train.devices = {list(names)} names {wanted} GPUs, and this machine has {_num_gpus()}; name those that it "
            "has, or none (CUDA_VISIBLE_DEVICES hides GPUs that it does not list)"
        )
    return [choose_device(name, "train.devices") for name in names]


def _num_gpus() -> str:
    count = torch.cuda.device_count()
    return f"{count} CUDA device" if count == 1 else f"{count or 'no'} CUDA devices"
