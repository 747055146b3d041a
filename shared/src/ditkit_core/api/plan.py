"""Plans a training step for any Python program, on GPUs that need not be here: `plan`."""

from dataclasses import replace
from typing import Any

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.api.load import ModelSource, empty_batch, execution_from, paths_of
from ditkit_core.data.config import DataConfig
from ditkit_core.errors import UserError
from ditkit_core.execution import Execution
from ditkit_core.loading.architecture import arch_here
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.fit import fitted
from ditkit_core.planner.plan import StepPlan, plan_step
from ditkit_core.planner.plan import plan as plan_batch


def plan(
    spec: ModelSpec,
    path: ModelSource,
    gpus: str = "",
    adapter: AdapterConfig | None = None,
    *,
    execution: Execution | None = None,
    size: tuple[int, int, int] | None = None,
    fit: bool = False,
    **how: Any,
) -> StepPlan:
    """Plan a training step: its memory, its time and where each block runs. It takes seconds, reads
    no weights and needs no GPU::

        settings = {"size": (49, 480, 832), "checkpointing": "full"}
        step = plan(WAN, "t2v-14b", "rtx4090", LoraConfig(r=32), **settings)
        step.fits, step.devices[0].peak, step.seconds

    Args:
        spec: The family.
        path: The name of a preset, or as for `load`.
        gpus: Those to plan for, as `rtx4090,rtx3090` or `2x24GiB`; empty for the devices of the
            execution on this machine.
        adapter: What is trained; None for a LoRA of rank 32.
        execution: How the step runs.
        size: Frames, height and width of a sample; None for the model's own.
        fit: Whether to change what does not fit, from what changes numbers and time least:
            checkpointing, streamed blocks, quantization. The plan's `job.execution` is then one
            that fits, for `load`.
        how: Fields of `Execution` instead of a value of it, and `dtype`; `batch_size`, the samples
            of a micro-batch; and `micro_batches`, the micro-batches of a step.

    Raises:
        UserError: If a GPU is unknown, the execution does not fit the model, or `fit` finds nothing
            that fits.
    """
    counts = {name: how.pop(name, 1) for name in ("batch_size", "micro_batches")}
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"{name} = {count} must be at least 1")
    if size is not None:
        _check_size(spec, size)
    arch = spec.architecture.presets.get(path) if isinstance(path, str) else None
    if arch is None:
        arch = arch_here(spec, paths_of(path), fetch=True)[1]
    spec = spec.for_arch(arch)
    step = plan_batch(
        spec,
        arch,
        execution_from("plan", execution, how),
        empty_batch(spec, arch, size, counts["batch_size"]),
        gpus,
        adapter=adapter or AdapterConfig(),
        micro_batches=counts["micro_batches"],
    )
    if not fit or step.fits:
        return step
    return plan_step(replace(step.job, execution=fitted(step)), step.targets)


def _check_size(spec: ModelSpec, size: tuple[int, int, int]) -> None:
    """Refuse a size that no sample of the model has, before torch fails on its latents."""
    where = f"size = {size!r}, the frames, height and width of a sample in pixels"
    if len(size) != 3 or not all(isinstance(count, int) and count > 0 for count in size):
        raise UserError(f"{where}, must be three whole numbers above 0")
    frames, height, width = size
    try:
        config = DataConfig(folder=".", frames=frames, height=height, width=width)
        config.check_steps(spec.data.frame_step, spec.data.size_step)
    except UserError as error:
        raise error.at(where) from error
