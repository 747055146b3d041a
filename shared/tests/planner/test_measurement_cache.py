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
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.planner.profiler import profile
from ditkit_core.testing.combinations import daily
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
    "adapter": AdapterConfig(method="lora", rank=8, targets=("qkv",)),
    "arch": ToyArch(dim=64, depth=6),
    "checkpointing": "full",
    "quantize": "int8",
    "name": "adafactor",
    "fused_backward": True,
}
"""Values that a profile depends on."""
JOB = toy_job(clip_norm=0.0, adapter=AdapterConfig(rank=4, targets=("qkv",)))
"""One layer of each block is adapted, which takes a third of the time of all."""


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> OrderedDict[Any, Any]:
    kept: OrderedDict[Any, Any] = OrderedDict()
    monkeypatch.setattr(measurement_cache, "_kept", kept)
    return kept


def changed(name: str, value: Any, job: StepJob | None = None) -> StepJob:
    """A step, `JOB` by default, with another value of its own, of its execution, or of its
    optimizer."""
    job = job or JOB
    if name in OptimConfig.__dataclass_fields__:
        return replace(job, optim=replace(job.optim, **{name: value}))
    return (
        job.with_execution(**{name: value}) if name in EXECUTION else replace(job, **{name: value})
    )


def test_every_neutral_value_is_tried() -> None:
    assert OTHER.keys() == {name for names in NEUTRAL.values() for name in names}


def test_neutral_values_change_no_measurement() -> None:
    after = JOB
    for name, value in OTHER.items():
        assert step_key(JOB) == step_key(changed(name, value)), name
        if name != "device":  # `devices` says where to
            after = changed(name, value, after)
    assert profile(JOB, splits=False) == profile(after, splits=False)
    assert denoising_bytes(JOB, (5, 64, 64)) == denoising_bytes(after, (5, 64, 64))


def test_a_value_that_is_measured_is_measured_again(
    kept: OrderedDict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "_measured", lambda job, *_: job)
    assert profile(JOB) is profile(replace(JOB)) is JOB
    for name, value in MEASURED.items():
        other = changed(name, value)
        assert profile(other) is other, name


def test_another_value_is_another_measurement() -> None:
    other = changed("checkpointing", MEASURED["checkpointing"])
    assert profile(other, splits=False) != profile(JOB, splits=False)


@pytest.mark.parametrize("method", daily(["lora", "full"], "lora"))
def test_the_optimizer_step_is_measured_once_for_batches_policies_and_formats(
    method: Any, kept: OrderedDict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = after = replace(JOB, clip_norm=1.0, adapter=replace(JOB.adapter, method=method))
    for name in ("batch", "checkpointing", "quantize"):
        if (name, method) != ("quantize", "full"):  # trained weights have no format
            after = changed(name, MEASURED[name], after)
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
    job = changed("checkpointing", "full")
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
    mixed = changed("checkpointing", "full, 0-2=none")
    first = profile(mixed), denoising_bytes(JOB, (5, 32, 32))

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a step was run")

    monkeypatch.setattr(profiler, "measure", refuse)
    monkeypatch.setattr(auxiliary, "fake_tensors", refuse)
    assert (profile(replace(mixed)), denoising_bytes(replace(JOB), (5, 32, 32))) == first
    assert denoising_bytes(changed("name", "adafactor"), (5, 32, 32)) == first[1]
    with pytest.raises(AssertionError, match="a step was run"):
        profile(JOB)


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
