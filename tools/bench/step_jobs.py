"""Steps of models at full size, for the programs that plan and count them."""

from typing import Any

import torch

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.execution import Execution
from ditkit_core.models.precision import PrecisionConfig
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.planned_step import Size, StepJob


def step_job(
    spec: ModelSpec,
    arch: Any,
    size: Size,
    *,
    rank: int = 32,
    targets: tuple[str, ...] = AdapterConfig().targets,
    batch: int = 1,
    fast: bool = False,
    policy: str = "none",
    **others: Any,
) -> StepJob:
    """A step of samples without conditions, in the commands' defaults but for what is given.

    Args:
        arch: Of the family's presets.
        size: Frames, height and width in pixels.
        rank: Of a LoRA; 0 trains all weights.
        targets: What it adapts.
        batch: Samples in the micro-batch.
        fast: Whether `precision.preset` is `fast`.
        policy: Of all blocks.
        others: Further fields of `Execution`; its kernels are torch's by default.
    """
    adapter = AdapterConfig(rank=rank, targets=targets) if rank else AdapterConfig(method="full")
    precision = PrecisionConfig(preset="fast" if fast else "default").precision(torch.bfloat16, {})
    with torch.device("meta"):
        item = spec.training.empty_item(arch, size, ())
    execution = Execution(
        checkpointing=policy, precision=precision, **({"kernels": "torch"} | others)
    )
    return StepJob(spec=spec, arch=arch, batch=[item] * batch, execution=execution, adapter=adapter)
