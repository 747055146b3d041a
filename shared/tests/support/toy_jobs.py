"""Steps of the toy, as a plan profiles them."""

from dataclasses import fields, replace
from typing import Any

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.execution import Execution
from ditkit_core.planner.planned_step import StepJob as Job
from ditkit_core.testing.plans import step_of
from ditkit_core.testing.toy import TOY, ToyArch

ARCH = ToyArch(dim=128, depth=6)
EXECUTION = frozenset(field.name for field in fields(Execution))


def toy_job(
    method: str = "lora",
    *,
    arch: ToyArch = ARCH,
    size: tuple[int, int, int] = (5, 64, 64),
    **changed: Any,
) -> Job:
    """A step of the toy.

    Args:
        method: Of the adapter.
        arch: The architecture.
        size: Frames, height and width of its one item.
        changed: Fields of the job or of its execution that are to be otherwise.
    """
    job = replace(
        step_of(TOY, arch, size, AdapterConfig(method=method, rank=4)),
        **{name: value for name, value in changed.items() if name not in EXECUTION},
    )
    return job.with_execution(
        **{name: value for name, value in changed.items() if name in EXECUTION}
    )
