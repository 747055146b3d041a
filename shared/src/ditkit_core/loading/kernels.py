"""Which implementation of fused operations runs on some devices."""

import socket
from collections.abc import Sequence
from typing import Literal

import torch

from ditkit_core.distributed.ranks import Ranks
from ditkit_core.errors import UserError, argument
from ditkit_core.io.console import doing, warn
from ditkit_core.nn.kernel_check import KernelCheck, compare_kernels
from ditkit_core.nn.kernels.launch import why_not

Kernels = Literal["auto", "torch", "triton"]


def resolve_kernels(
    kernels: Kernels, devices: Sequence[torch.device], *, ranks: Ranks | None = None
) -> Literal["torch", "triton"]:
    """What runs on these devices. Triton's kernels are checked on the GPUs among them; if there are
    any, a line says what `auto` is, and why.

    Args:
        kernels: What was asked for. `auto` is the same on all ranks: torch if a kernel fails on one
            of them.
        devices: Those that run the model.
        ranks: The processes that train together; None for this one alone.
    """
    if kernels == "torch":
        return kernels
    gpus = [device for device in devices if device.type == "cuda"]
    check = KernelCheck()
    if kernels == "triton":
        if fault := _checked(gpus).fault:
            raise UserError(
                f"{argument('train.kernels')} = triton {fault}; set {argument('train.kernels')} = "
                f"torch"
            )
        return kernels
    if not (reason := why_not([device.type for device in devices])):
        check = _checked(gpus)
        reason = check.fault
    why = _of_ranks(f"triton {reason}" if reason else "", ranks or Ranks())
    chosen: Literal["torch", "triton"] = "triton" if gpus and not why else "torch"
    if gpus:
        where = " and ".join(map(str, gpus))
        passed = f"whose kernels passed a check on {where} ({check})"
        warn(f"train.kernels = auto: {chosen}, {f'because {why}' if why else passed}")
    return chosen


def _of_ranks(reason: str, ranks: Ranks) -> str:
    """The first reason that a rank has against the kernels, with that rank; empty if none has one.

    Ranks with other kernels than the others would train other last bits, and one of them would be
    as slow as torch anyway.
    """
    reasons = ranks.all_gather_object((socket.gethostname(), reason))
    return next(
        (
            f"{text}{f' (rank {rank} on {host})' * (ranks.size > 1)}"
            for rank, (host, text) in enumerate(reasons)
            if text
        ),
        "",
    )


def _checked(gpus: Sequence[torch.device]) -> KernelCheck:
    """What the check says of all GPUs together, or of the first with a fault."""
    if gpus:
        doing("checking the kernels of Triton, which are compiled the first time")
    largest, twice = 0.0, False
    for gpu in gpus:
        check = compare_kernels(gpu)
        if check.fault:
            return check
        largest, twice = max(largest, check.error), twice or check.rounds_products
    return KernelCheck(error=largest, rounds_products=twice)
