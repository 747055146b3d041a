"""Keys that only earlier versions know."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Removed(NamedTuple):
    """A key that is gone."""

    default: Any
    """What runs stored that did not set it: without the key they go on as before."""
    instead: str
    """What takes its place, for a run file that still sets it."""


REMOVED: Mapping[str, Removed] = {
    "base.quantized_cache": Removed(
        "",
        "a base that is stored in 8 or 4 bits is read as it is; name such a file in "
        "model.transformer",
    ),
    "train.noise_device": Removed(
        "cpu",
        "noise is sampled on the host, while the step before runs, with the numbers of "
        "noise_device = cpu",
    ),
    "train.compile": Removed(
        False,
        "fused kernels (train.kernels) and replayed CUDA graphs (train.cuda_graphs) take the place "
        "of compiled blocks, and a GPU that has them uses them by default",
    ),
}
"""By dotted key."""
