"""Plans that profile equal steps once."""

import sys
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from ditkit_core.planner.memory import Profile
    from ditkit_core.planner.planned_step import StepJob

_PROFILES: dict[Hashable, Any] = {}
"""By the step, and what is asked of it."""
_UPDATES: OrderedDict[Hashable, Any] = OrderedDict()
"""What the planner itself keeps: the optimizer's step, for any batch and policy."""
_PARTS: dict[int, tuple[Any, int]] = {}
"""Of a part of a spec, by its address, the part and the number of its content."""
_NUMBERS: dict[Hashable, int] = {}


def _number(part: Any) -> int:
    from ditkit_core.planner.measurement_cache import content_key

    if id(part) not in _PARTS:
        _PARTS[id(part)] = part, _NUMBERS.setdefault(content_key(part), len(_NUMBERS))
    return _PARTS[id(part)][1]


def _key(job: "StepJob") -> Hashable:
    """What a measurement of a step depends on: neither where its stages go nor by how much it
    learns, and of a family's spec not its data, encoders and demo, which tests exchange."""
    from ditkit_core.planner.measurement_cache import step_key

    spec = job.spec
    of_spec = map(_number, (spec.architecture, spec.precision, spec.training, spec.adapters))
    return *of_spec, step_key(replace(job, spec=cast(Any, None)))


@pytest.fixture
def equal_steps_are_profiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is made of profiles: a plan takes seconds to profile, and most tests plan
    one of few steps.

    A profile is a frozen value that the step alone decides. Steps are equal as they are to a page
    that plans again after each change; `planner/test_measurement_cache.py` checks which are.
    """
    from ditkit_core.commands import oom  # noqa: F401, imported before it is patched
    from ditkit_core.planner import measurement_cache, profiler
    from ditkit_core.run.plans import auxiliary_plan

    profile, denoising_bytes = profiler.profile, auxiliary_plan.denoising_bytes

    def once(key: Hashable, make: Any) -> Any:
        if key not in _PROFILES:
            _PROFILES[key] = make()
        return _PROFILES[key]

    def remembered(
        job: "StepJob",
        *,
        of_each: int | None = 3,
        like: "Profile | None" = None,
        splits: bool = True,
    ) -> "Profile":
        make = partial(profile, job, of_each=of_each, like=like, splits=splits)
        return once((_key(job), of_each, splits), make)

    def denoised(job: "StepJob", size: Any, references: Sequence[Any] = ()) -> int:
        return once(
            (_key(job), size, tuple(references)), lambda: denoising_bytes(job, size, references)
        )

    monkeypatch.setattr(measurement_cache, "_kept", _UPDATES)
    monkeypatch.setattr(profiler, "step_key", _key)
    modules = [module for module in sys.modules.values() if isinstance(module, ModuleType)]
    for module in modules:
        if vars(module).get("profile") is profile:
            monkeypatch.setattr(module, "profile", remembered)
    monkeypatch.setattr(auxiliary_plan, "denoising_bytes", denoised)
