"""What two ranks take for `train.kernels = auto` where a kernel computes wrongly on none or on one
of them: for `run/test_gpus.py`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ditkit_core.config.resolve import resolve
from ditkit_core.distributed.ranks import Ranks, world
from ditkit_core.execution import StepExecution
from ditkit_core.loading import kernels
from ditkit_core.nn import kernel_check
from ditkit_core.nn.context import settings_in_force
from ditkit_core.run import gpus
from ditkit_core.run.config import RunConfig
from ditkit_core.testing.ranks import as_rank


def chosen(ranks: Ranks, wrong: str) -> list[str]:
    """The kernels, and what is said of them, with a fault on the rank with this number."""

    def twice(x: Tensor) -> Tensor:
        return x * (
            2.1 if settings_in_force().kernels == "triton" and str(ranks.rank) == wrong else 2
        )

    def cases(device: torch.device, *, has_fp8: bool) -> Iterator[kernel_check.KernelCase]:
        yield kernel_check.KernelCase(
            "twice x", twice, (torch.linspace(1, 2, 50).bfloat16().requires_grad_(),)
        )

    kernel_check._cases, said = cases, list[str]()
    StepExecution.torch_devices = (torch.device("cuda", ranks.rank),)
    kernels.compare_kernels = lambda device: kernel_check.compare_kernels(torch.device("cpu"))
    kernels.why_not = lambda kinds: ""
    kernels.warn = said.append
    config = gpus.with_kernels(resolve(RunConfig), ranks)
    (line,) = said
    return [config.train.kernels, line.removeprefix("train.kernels = auto: ")]


def work() -> dict[str, list[str]]:
    ranks = world()
    assert ranks is not None
    return {wrong: chosen(ranks, wrong) for wrong in ("none", "0", "1")}


if __name__ == "__main__":
    as_rank(work)
