"""The settings of torch's allocator for GPUs. torch reads them from the environment of its process, so they are set before it is imported."""

import sys
from collections.abc import Mapping

_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def allocator_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to a process's environment: nothing where the user has set the allocator.

    With expandable segments, memory that was freed serves tensors of any other size. Without them, each shape of a run leaves blocks that
    the next shape cannot use, and a run that fits by its tensors may not fit.
    """
    if not sys.platform.startswith("linux") or any(name in environment for name in _NAMES):
        return {}
    return {_NAMES[0]: "expandable_segments:True"}
