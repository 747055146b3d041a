"""Plans that profile equal steps once."""

import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ditkit_core.planner.memory import Profile
    from ditkit_core.planner.planned_step import StepJob

_PROFILES: "dict[tuple[Any, ...], tuple[StepJob, Any]]" = {}
"""By the step, and what is asked of it."""


@pytest.fixture
def equal_steps_are_profiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is made of profiles: a plan takes seconds to profile, and most tests plan
    one of few steps.

    A profile is a frozen value that the step alone decides: of a family's spec not its data,
    encoders and demo, which tests exchange. The step is kept with it, so that no function of
    another step gets its address.
    """
    from ditkit_core.commands import oom  # noqa: F401, imported before it is patched
    from ditkit_core.planner import profiler
    from ditkit_core.run.plans import auxiliary_plan

    profile, denoising_bytes = profiler.profile, auxiliary_plan.denoising_bytes

    def once(job: "StepJob", asked: Any, make: Any) -> Any:
        spec, of_step = job.spec, (field.name for field in fields(job) if field.name != "spec")
        of_spec = spec.architecture, spec.precision, spec.training, spec.adapters
        key = repr((of_spec, [getattr(job, name) for name in of_step])), asked
        if key not in _PROFILES:
            _PROFILES[key] = job, make()
        return _PROFILES[key][1]

    def remembered(
        job: "StepJob",
        *,
        of_each: int | None = 3,
        like: "Profile | None" = None,
        splits: bool = True,
    ) -> "Profile":
        make = partial(profile, job, of_each=of_each, like=like, splits=splits)
        return once(job, (of_each, splits), make)

    def denoised(job: "StepJob", size: Any, references: Sequence[Any] = ()) -> int:
        return once(job, (size, tuple(references)), lambda: denoising_bytes(job, size, references))

    modules = [module for module in sys.modules.values() if isinstance(module, ModuleType)]
    for module in modules:
        if vars(module).get("profile") is profile:
            monkeypatch.setattr(module, "profile", remembered)
    monkeypatch.setattr(auxiliary_plan, "denoising_bytes", denoised)
