"""The devices that a run trains on."""

import torch

from ditkit_core.engine.devices import choose_device, choose_devices
from ditkit_core.errors import UserError
from ditkit_core.training.config import TrainConfig


def device_names(config: TrainConfig) -> tuple[str, ...]:
    """The names in `train.devices`, or else the one in `train.device`."""
    if not config.devices:
        return (config.device,)
    if config.device != "auto":
        raise UserError(f"train.device = {config.device!r} and train.devices are both set; leave one of them out")
    return config.devices


def training_devices(config: TrainConfig) -> tuple[torch.device, ...]:
    """The devices that `train.device` or `train.devices` names."""
    names = device_names(config)
    return choose_devices(names) if config.devices else (choose_device(config.device, "train.device"),)
