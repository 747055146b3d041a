"""What a process that plans again and again measures once, and what it has to measure anew."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from toy_jobs import EXECUTION, toy_job

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.planner import auxiliary, measurement_cache, profiler
from ditkit_core.planner.auxiliary import denoising_bytes
from ditkit_core.planner.measurement_cache import NEUTRAL, content_key, measured_once, step_key
from ditkit_core.planner.memory import Profile
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.planner.profiler import profile
from ditkit_core.testing.toy import ToyArch
from ditkit_core.training.optim.optimizers import OptimConfig

OTHER = {
    "kinds": 3,
    "validates": True,
    "extra_forwards": 2.0,
    "device": "cuda:1",
    "devices": ("cuda:0", "cuda:1"),
    "split_points": (2,),
    "reserve": (1.0,),
    "swap_blocks": (2,),
    "pipelined": True,
    "cuda_graphs": "off",
    "lr": 3e-3,
    "schedule": "cosine",
    "warmup_steps": 7,
    "final_lr_fraction": 0.5,
}
"""For each neutral name another value."""
MEASURED = {
    "batch": toy_job(size=(5, 32, 64)).batch,
    "adapter": AdapterConfig(method="lora", rank=8),
    "arch": ToyArch(dim=64, depth=6),
    "checkpointing": "full",
    "quantize": "int8",
    "name": "adafactor",
    "fused_backward": True,
}
"""Values that a profile depends on."""


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> OrderedDict[Any, Any]:
    kept: OrderedDict[Any, Any] = OrderedDict()
    monkeypatch.setattr(measurement_cache, "_kept", kept)
    return kept


def changed(name: str, value: Any, job: StepJob | None = None) -> StepJob:
    """A step, the toy's by default, with another value of its own, of its execution, or of its
    optimizer."""
    job = job or toy_job(clip_norm=0.0)
    if name in OptimConfig.__dataclass_fields__:
        return replace(job, optim=replace(job.optim, **{name: value}))
    return (
        job.with_execution(**{name: value}) if name in EXECUTION else replace(job, **{name: value})
    )


def test_every_neutral_value_is_tried() -> None:
    assert OTHER.keys() == {name for names in NEUTRAL.values() for name in names}


@pytest.fixture(scope="module")
def unchanged() -> Profile:
    return profile(toy_job(clip_norm=0.0))


@pytest.mark.parametrize("group", NEUTRAL)
def test_neutral_values_change_no_measurement(group: str, unchanged: Profile) -> None:
    before = after = toy_job(clip_norm=0.0)
    for name in NEUTRAL[group]:
        assert step_key(before) == step_key(changed(name, OTHER[name])), name
        if name != "device":  # `devices` says where to
            after = changed(name, OTHER[name], after)
    assert unchanged == profile(after)
    assert denoising_bytes(before, (5, 64, 64)) == denoising_bytes(after, (5, 64, 64))


@pytest.mark.parametrize("name", MEASURED)
def test_a_value_that_is_measured_is_measured_again(
    name: str, kept: OrderedDict[Any, Any], unchanged: Profile
) -> None:
    before = toy_job(clip_norm=0.0)
    kept[profile, step_key(before), 3, None, True] = unchanged
    assert profile(before) is unchanged
    assert profile(changed(name, MEASURED[name])) != unchanged


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("name", ["batch", "checkpointing", "quantize"])
def test_the_optimizer_step_is_measured_once_for_batches_policies_and_formats(
    name: str, method: Any, kept: OrderedDict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name, method) == ("quantize", "full"):
        pytest.skip("trained weights have no format")
    before = replace(toy_job(clip_norm=1.0), adapter=AdapterConfig(method=method, rank=4))
    after = changed(name, MEASURED[name], before)
    profile(before, splits=False)
    passes = []

    def counted(*arguments: Any, **options: Any) -> Any:
        passes.append(options.get("passes", "both"))
        return measure(*arguments, **options)

    measure = profiler.measure
    monkeypatch.setattr(profiler, "measure", counted)
    again = profile(after, splits=False)
    assert passes == ["both"]
    kept.clear()
    assert again == profile(after, splits=False)


def test_without_splits_nothing_else_is_missing() -> None:
    job = toy_job(clip_norm=0.0, checkpointing="full")
    measured, alone = profile(job), profile(job, splits=False)
    assert any(measured.crossing)
    nothing = (0,) * len(measured.crossing)
    stages = [replace(cost, freed_at_cut=0) for cost in measured.stages]
    expected = replace(measured, embed=stages[0], blocks=tuple(stages[1:-1]), head=stages[-1])
    expected = replace(expected, crossing=nothing, crossing_back=nothing, targets=0)
    assert alone == expected


def test_a_second_micro_batch_is_measured_and_a_third_is_not() -> None:
    keys = [step_key(replace(toy_job(), micro_batches=count)) for count in (1, 2, 3, 8)]
    assert keys[0] != keys[1] == keys[2] == keys[3]


def test_tensors_are_equal_by_shape_strides_dtype_and_kind_of_device() -> None:
    tensor = torch.zeros(2, 3)
    others = (tensor.T.contiguous(), torch.zeros(3, 2).T, tensor.bfloat16(), tensor.to("meta"))
    assert content_key(tensor) == content_key(torch.ones(2, 3))
    assert content_key(tensor) not in {content_key(other) for other in others}


def test_a_plan_of_a_kept_step_runs_no_step(
    kept: OrderedDict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = "full, 0-2=none"
    first = profile(toy_job(checkpointing=policies)), denoising_bytes(toy_job(), (5, 32, 32))

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a step was run")

    monkeypatch.setattr(profiler, "measure", refuse)
    monkeypatch.setattr(auxiliary, "fake_tensors", refuse)
    again = toy_job(checkpointing=policies)
    assert (profile(again), denoising_bytes(toy_job(), (5, 32, 32))) == first
    optim = replace(again.optim, name="adafactor")
    assert denoising_bytes(replace(toy_job(), optim=optim), (5, 32, 32)) == first[1]
    with pytest.raises(AssertionError, match="a step was run"):
        profile(toy_job(checkpointing="none"))


def test_the_measurement_that_was_not_asked_for_the_longest_goes_first(
    kept: OrderedDict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement_cache, "MOST_KEPT", 2)
    measured = []

    def asked(name: str) -> str:
        return measured_once(lambda: name, lambda: measured.append(name) or name)

    assert [asked(name) for name in "abacab"] == [*"abacab"]
    assert measured == [*"abcb"]


def recursive(last: int) -> Callable[[int], int]:
    def count(number: int) -> int:
        return number if number == last else count(number + 1)

    return count


def test_functions_are_equal_by_their_code_and_what_they_refer_to() -> None:
    def of(number: float, more: list[int]) -> Callable[[], Any]:
        return lambda: (number, more)

    assert content_key(of(1, [2])) == content_key(of(1, [2]))
    assert content_key(of(1, [2])) != content_key(of(1, [3]))
    assert content_key(of(1, [2])) != content_key(of(1.0, [2])), "an int is no float"
    assert content_key(partial(of, 1, more=[2])) == content_key(partial(of, 1, more=[2]))
    assert content_key(partial(of, 1, more=[2])) != content_key(partial(of, 1, more=[4]))
    assert content_key([1, 2]) != content_key((1, 2)) != content_key({1: 2})
    assert content_key(torch.empty(2, 3)) == content_key(torch.ones(2, 3))
    assert content_key(torch.empty(2, 3)) != content_key(torch.empty(3, 2).T)
    plain = [lambda: 1 for _ in "ab"] + [lambda: 2]
    assert content_key(plain[0]) == content_key(plain[1]) != content_key(plain[2])
    assert content_key(recursive(1)) == content_key(recursive(1)) != content_key(recursive(2))
    unknown = bytearray(b"1")
    assert content_key(unknown) == content_key(unknown)
    assert content_key(unknown) != content_key(slice(1)) != content_key(slice(1))
