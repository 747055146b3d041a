"""What `optim.fused_backward` does not go with, and what needs it. Needs no torch, and runs before
a model is built."""

from collections.abc import Sequence

from ditkit_core.errors import UserError, argument
from ditkit_core.training.config import TrainConfig
from ditkit_core.training.optim.optimizers import OptimConfig, optimizers_that


def check_fused_backward(
    config: TrainConfig, optim: OptimConfig, *, adapts: bool = False, prior: bool = False
) -> None:
    """Refuse settings that need all gradients at once, if `optim.fused_backward` applies each as it
    arrives."""
    if not optim.fused_backward:
        return
    remedy = (
        "set train.accumulation = 1 and a larger train.batch_size"
        if config.accumulation > 1
        else ""
    )
    remedy = " and ".join(
        filter(None, (remedy, "leave prior.folder and prior.prompt out" if prior else ""))
    )
    refused = {
        f"train.clip_norm = {config.clip_norm:g} with train.clip_by = step": (
            (
                "set train.clip_by = last_step (the norm of the step before), or block (each block's "
                "own), or train.clip_norm = 0"
            ),
            config.clip_norm > 0 and config.clip_by == "step",
        ),
        "train.pipelined": ("set train.pipelined = false", config.pipelined),
        "several micro-batches of an adapter, whose gradients are added in a tree": (
            remedy,
            adapts and bool(remedy),
        ),
    }
    conflicts = [(setting, remedy) for setting, (remedy, is_asked) in refused.items() if is_asked]
    if conflicts:
        raise UserError(
            f"{argument('optim.fused_backward')} applies each gradient before the others are "
            f"there, so it does not go with {' or '.join(setting for setting, _ in conflicts)}: "
            f"{'; '.join(remedy for _, remedy in conflicts)}; or set "
            f"{argument('optim.fused_backward')} = false"
        )


def check_swap(counts: Sequence[int], method: str, optim: OptimConfig) -> None:
    """Refuse to stream trained weights if a step needs them all at once. Runs before a model is
    built."""
    if not any(counts) or method != "full":
        return
    where = f"train.swap_blocks = {list(counts)} with adapter.method = full streams trained weights"
    if not optim.fused_backward:
        raise UserError(
            f"{where}, which have to be updated while they are on the device: set "
            f"{argument('optim.fused_backward')} = true (and {argument('train.clip_by')} = "
            f"last_step or block), or leave {argument('train.swap_blocks')} out, or split the "
            f"model with {argument('train.devices')}"
        )
    if not optim.kind.streams:
        raise UserError(
            f"{where} and their optimizer state, which {argument('optim.name')} = {optim.name} "
            f"cannot; use {', '.join(optimizers_that(lambda kind: kind.streams))}"
        )
