"""`train.kernels` on the devices of this machine: what `auto` is, and whether the kernels compute there what torch computes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from ditkit_core.errors import UserError
from ditkit_core.io.console import doing, warn
from ditkit_core.io.ranks import Ranks
from ditkit_core.nn.kernel_check import kernel_fault
from ditkit_core.nn.kernels.launch import why_not
from ditkit_core.run.auxiliary import training_devices
from ditkit_core.run.config import RunConfig


def with_kernels(config: RunConfig, ranks: Ranks | None = None) -> RunConfig:
    """The configuration with the implementation that `train.kernels` means here, so that all that reads it sees what runs.

    The kernels are checked on the GPUs that run the model. If there are any, a line says what `auto` is, and why.

    Args:
        config: The configuration of the user.
        ranks: The processes that train together; None for this one alone.

    Raises:
        UserError: If a kernel of `triton` fails the check, or ranks do not agree on what `auto` is.
    """
    train, ranks = config.train, ranks or Ranks()
    if train.kernels == "torch":
        return config
    devices = training_devices(train)
    gpus = [device for device in devices if device.type == "cuda"]
    if train.kernels == "triton":
        if fault := _fault(gpus):
            raise UserError(f"train.kernels = triton {fault}; set train.kernels = torch")
        return config
    if train.compile:
        why = "train.compile has kernels of its own"
    else:
        reason = why_not([device.type for device in devices]) or _fault(gpus)
        why = f"triton {reason}" if reason else ""
    chosen: Literal["torch", "triton"] = "triton" if gpus and not why else "torch"
    # Why a rank differs is said where one does: two GPUs that fail may fail in different ways.
    differs = ranks.any(chosen == "triton") and chosen == "torch"
    ranks.check_same({"train.kernels": f"{chosen}: {why}" if differs else chosen})
    if gpus:
        where = " and ".join(map(str, gpus))
        warn(
            f"train.kernels = auto: {chosen}, {f'because {why}' if why else f'whose kernels passed a check on {where}'}"
        )
    return replace(config, train=replace(train, kernels=chosen))


def _fault(gpus: Sequence[torch.device]) -> str:
    if gpus:
        doing("checking the kernels of Triton, which are compiled the first time")
    return next(filter(None, map(kernel_fault, gpus)), "")
