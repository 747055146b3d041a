"""The settings of torch's allocator for GPUs. torch reads them from the environment of its process,
so they are set before it is imported."""

import sys
from collections.abc import Mapping
from pathlib import Path

_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_OF_WINDOWS = Path("/dev/dxg")
"""The GPU of a Linux inside of Windows (WSL)."""


def allocator_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to a process's environment: nothing where the user has set the allocator.

    With expandable segments, memory that was freed serves tensors of any other size. Without them,
    each shape of a run leaves blocks that the next shape cannot use, and a run that fits by its
    tensors may not fit. Inside of Windows its driver fails some of the calls that they need ("CUDA
    driver error: unknown error", or "device not ready"), on some GPUs the first, so they are not
    used there.
    """
    if (
        not sys.platform.startswith("linux")
        or _OF_WINDOWS.exists()
        or any(name in environment for name in _NAMES)
    ):
        return {}
    return {_NAMES[0]: "expandable_segments:True"}
