"""The one place that says which module of torch has a device's streams, page-locking and random
generator, and which copies the host waits for."""

from typing import Any

import torch
from torch import Tensor

RUNTIMES: dict[str, Any] = {"cuda": torch.cuda}
"""By kind of device. `ditkit_core.testing.stand_in` adds one for the CPU, so that what GPUs do runs
and is checked without one."""


def runtime_of(device: torch.device) -> Any:
    """The module for a device; None where there are no streams, so that copies run at once, and the
    host's generator is used."""
    return None if device == torch.device("cpu") else RUNTIMES.get(device.type)


def sent_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device. The host waits only for a copy to itself: it computes with the result
    at once, whether the copy is done or not."""
    return tensor.to(device, non_blocking=device != torch.device("cpu"))
