"""The one place that says which module of torch has a device's streams, page-locking and random generator."""

from typing import Any

import torch

RUNTIMES: dict[str, Any] = {"cuda": torch.cuda}
"""By kind of device. `ditkit_core.testing.stand_in` adds one for the CPU, so that what GPUs do runs and is checked without one."""


def runtime_of(device: torch.device) -> Any:
    """The module for a device; None where there are no streams, so that copies run at once, and the host's generator is used."""
    return None if device == torch.device("cpu") else RUNTIMES.get(device.type)
