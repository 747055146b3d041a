"""The devices that a run trains on, and what its GPUs can do, found out before anything is loaded:
refusals by their compute capability, and what `train.kernels` is on them."""

import re
from collections.abc import Collection
from dataclasses import replace

import torch

from ditkit_core.distributed.ranks import Ranks
from ditkit_core.errors import UserError
from ditkit_core.execution import Execution
from ditkit_core.loading.kernels import resolve_kernels
from ditkit_core.nn.attention.support import SUPPORT, capability_text
from ditkit_core.run.config import RunConfig
from ditkit_core.weights.quantize import check_compute_on

_BF16 = 8, 0
"""The least compute capability of GPUs that compute in bf16: Ampere."""


def check_capability(execution: Execution, devices: Collection[torch.device]) -> None:
    """Refuse GPUs of this machine, of the devices that hold the model, that are too old, or too
    new, for how it runs."""
    capabilities = {
        device: torch.cuda.get_device_capability(device)
        for device in devices
        if device.type == "cuda"
    }
    # Otherwise torch says so in one warning among others, and the first operation fails for lack of
    # a "kernel image".
    names = map(
        re.compile(r"sm_(\d+)[a-z]?").fullmatch, torch.cuda.get_arch_list() if capabilities else ()
    )
    oldest = min((divmod(int(name[1]), 10) for name in names if name), default=(0, 0))
    # torch emulates bf16 on older ones. Its fast attention kernels refuse it, and what is left
    # stores all scores: gigabytes per head.
    dtypes = {
        "model.dtype": execution.precision.matmul,
        "precision.attention": execution.precision.attention,
    }
    in_bf16 = next((key for key, dtype in dtypes.items() if dtype == torch.bfloat16), "")
    support, backend = SUPPORT[execution.attention], f"attention backend {execution.attention!r}"
    for device, capability in capabilities.items():
        there = f"{device} has {capability_text(capability)}"
        if capability < oldest:
            raise UserError(
                f"torch {torch.__version__} is built for GPUs of compute capability "
                f"{capability_text(oldest)} or later, and {there}; install a "
                "torch for an older CUDA, or choose another device"
            )
        if in_bf16 and capability < _BF16:
            raise UserError(
                f"{in_bf16} = bf16 needs a GPU of the generation Ampere or later, compute "
                f"capability {capability_text(_BF16)}, and {there}; "
                f"set {in_bf16} = fp32, or choose another device"
            )
        if not support.runs_on(capability):
            raise UserError(
                f"{backend} needs a GPU of compute capability {support.capabilities}, and {there}; "
                f"use sdpa"
            )
    if len(set(capabilities.values())) > 1 and not support.mixes:
        listing = " and ".join(
            f"{device} has {capability_text(number)}" for device, number in capabilities.items()
        )
        raise UserError(
            f"{backend} runs on GPUs of one compute capability in a process, and {listing}; use "
            f"sdpa, or GPUs of one kind"
        )
    check_compute_on(execution.compute, devices)


def with_kernels(config: RunConfig, ranks: Ranks | None = None) -> RunConfig:
    """The configuration with the implementation that `train.kernels` means here, and on the
    processes that train together, so that all that reads it sees what runs."""
    train = config.train
    if train.kernels == "torch":
        return config
    chosen = resolve_kernels(train.kernels, train.torch_devices, ranks=ranks)
    return replace(config, train=replace(train, kernels=chosen))
