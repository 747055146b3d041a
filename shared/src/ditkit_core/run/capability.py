"""Refuses GPUs that cannot do what a run asks of them, by their compute capability, before anything is loaded."""

import re
from collections.abc import Collection

import torch

from ditkit_core.errors import UserError
from ditkit_core.nn.attention.support import SUPPORT
from ditkit_core.run.context import RunContext
from ditkit_core.weights.quantize import check_compute_on

_BF16 = 8, 0
"""The least compute capability of GPUs that compute in bf16: Ampere."""


def check_capability(run: RunContext, devices: Collection[torch.device]) -> None:
    """Refuse GPUs of this machine that are too old, or too new, for the run's settings.

    Args:
        devices: The devices that hold the model. Only GPUs are checked.

    Raises:
        UserError: With the GPU, its compute capability, and what to set or install.
    """
    for device in devices:
        if device.type == "cuda":
            found = torch.cuda.get_device_capability(device)
            _check_build(device, found)
            _check_bf16(run, device, found)
            _check_attention(run.config.train.attention, device, found)
    check_compute_on(run.config.base.compute, devices)


def _check_build(device: torch.device, found: tuple[int, int]) -> None:
    names = map(re.compile(r"sm_(\d+)[a-z]?").fullmatch, torch.cuda.get_arch_list())
    built = [divmod(int(name[1]), 10) for name in names if name]
    # Otherwise torch says so in one warning among others, and the first operation fails for lack of a "kernel image".
    if built and found < min(built):
        raise UserError(
            f"torch {torch.__version__} is built for GPUs of compute capability {_written(min(built))} or later, and {device} has "
            f"{_written(found)}; install a torch for an older CUDA, or choose another device"
        )


def _check_bf16(run: RunContext, device: torch.device, found: tuple[int, int]) -> None:
    # torch emulates bf16 there. Its fast attention kernels refuse it, and what is left stores all scores: gigabytes per head.
    if found < _BF16 and torch.bfloat16 in (run.precision.matmul, run.precision.attention):
        where = "model.dtype" if run.precision.matmul == torch.bfloat16 else "precision.attention"
        raise UserError(
            f"{where} = bf16 needs a GPU of the generation Ampere or later, compute capability {_written(_BF16)}, and {device} has "
            f"{_written(found)}; set {where} = fp32, or choose another device"
        )


def _check_attention(name: str, device: torch.device, found: tuple[int, int]) -> None:
    support = SUPPORT[name]
    if support.least <= found and (support.most is None or found <= support.most):
        return
    raise UserError(
        f"attention backend {name!r} needs a GPU of compute capability {support.capabilities}, and {device} has {_written(found)}; use sdpa"
    )


def _written(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
