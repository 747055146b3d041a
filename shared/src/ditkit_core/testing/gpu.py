"""The device for tests of what a GPU does: the fixture `gpu`.

Every such test runs twice: on a GPU, marked `gpu` and skipped where there is none, and every day on
a stand-in (`stand_in.py`), which also checks that nothing on its streams is unordered. Imports no
torch, for pytest-xdist's controller.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

ON_A_GPU = pytest.mark.gpu
"""Of a case that needs a GPU; another case runs the same lines without one."""
GPUS = ["stand-in", pytest.param("cuda", marks=ON_A_GPU)]
"""Values for the fixture."""


@dataclass(frozen=True)
class GPU:
    """A GPU or its stand-in."""

    device: "torch.device"
    runtime: Any
    """`torch.cuda`, or what stands for it."""
    is_real: bool

    def size(self, real: int, stand_in: int) -> int:
        """One of two sizes: on a GPU a copy must take longer than what launches it, or one that is
        not waited for would not show."""
        return real if self.is_real else stand_in


@contextmanager
def gpu_of(name: str) -> Iterator[GPU]:
    """The device of one of `GPUS`.

    Raises:
        AssertionError: At the end, if something on the stand-in's streams was unordered.
    """
    import torch

    from ditkit_core.testing.stand_in import StandIn

    if name == "cuda":
        yield GPU(torch.device("cuda", 0), torch.cuda, is_real=True)
        return
    with StandIn() as stand_in:
        yield GPU(torch.device("cpu", 1), stand_in.runtime, is_real=False)
    assert stand_in.runtime.log.races == []


@pytest.fixture(params=GPUS)
def gpu(request: pytest.FixtureRequest) -> Iterator[GPU]:
    """A GPU, or its stand-in."""
    with gpu_of(request.param) as chosen_gpu:
        yield chosen_gpu
