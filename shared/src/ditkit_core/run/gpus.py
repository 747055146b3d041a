"""What the GPUs of a run can do, found out before anything is loaded: refusals by their compute capability, and what `train.kernels` is on them."""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from ditkit_core.distributed.ranks import Ranks
from ditkit_core.errors import UserError
from ditkit_core.execution import Execution
from ditkit_core.loading.kernels import resolve_kernels
from ditkit_core.models.precision import Precision
from ditkit_core.nn.attention.support import SUPPORT, capability_text
from ditkit_core.run.auxiliary import training_devices
from ditkit_core.run.config import RunConfig
from ditkit_core.weights.quantize import check_compute_on

_BF16 = 8, 0
"""The least compute capability of GPUs that compute in bf16: Ampere."""


def check_capability(execution: Execution, devices: Collection[torch.device]) -> None:
    """Refuse GPUs of this machine, of the devices that hold the model, that are too old, or too new, for how it runs."""
    capabilities = {device: torch.cuda.get_device_capability(device) for device in devices if device.type == "cuda"}
    for device, capability in capabilities.items():
        _check_build(device, capability)
        _check_bf16(execution.precision, device, capability)
        _check_attention(execution.attention, device, capability)
    _check_mix(execution.attention, capabilities)
    check_compute_on(execution.compute, devices)


def _check_build(device: torch.device, capability: tuple[int, int]) -> None:
    names = map(re.compile(r"sm_(\d+)[a-z]?").fullmatch, torch.cuda.get_arch_list())
    built = [divmod(int(name[1]), 10) for name in names if name]
    # Otherwise torch says so in one warning among others, and the first operation fails for lack of a "kernel image".
    if built and capability < min(built):
        raise UserError(
            f"torch {torch.__version__} is built for GPUs of compute capability {capability_text(min(built))} or later, and {device} has "
            f"{capability_text(capability)}; install a torch for an older CUDA, or choose another device"
        )


def _check_bf16(precision: Precision, device: torch.device, capability: tuple[int, int]) -> None:
    # torch emulates bf16 there. Its fast attention kernels refuse it, and what is left stores all scores: gigabytes per head.
    if capability < _BF16 and torch.bfloat16 in (precision.matmul, precision.attention):
        where = "model.dtype" if precision.matmul == torch.bfloat16 else "precision.attention"
        raise UserError(
            f"{where} = bf16 needs a GPU of the generation Ampere or later, compute capability {capability_text(_BF16)}, and {device} has "
            f"{capability_text(capability)}; set {where} = fp32, or choose another device"
        )


def _check_attention(name: str, device: torch.device, capability: tuple[int, int]) -> None:
    support = SUPPORT[name]
    if support.runs_on(capability):
        return
    raise UserError(
        f"attention backend {name!r} needs a GPU of compute capability {support.capabilities}, and {device} has {capability_text(capability)}; use sdpa"
    )


def _check_mix(name: str, capabilities: Mapping[torch.device, tuple[int, int]]) -> None:
    if len(set(capabilities.values())) > 1 and not SUPPORT[name].mixes:
        listing = " and ".join(
            f"{device} has {capability_text(capability)}" for device, capability in capabilities.items()
        )
        raise UserError(
            f"attention backend {name!r} runs on GPUs of one compute capability in a process, and {listing}; use sdpa, or GPUs of one kind"
        )


def with_kernels(config: RunConfig, ranks: Ranks | None = None) -> RunConfig:
    """The configuration with the implementation that `train.kernels` means here, and on the processes that train together, so that all that reads it sees what
    runs."""
    train = config.train
    if train.kernels == "torch":
        return config
    chosen = resolve_kernels(train.kernels, training_devices(train), compiles=bool(train.compile), ranks=ranks)
    return replace(config, train=replace(train, kernels=chosen))
