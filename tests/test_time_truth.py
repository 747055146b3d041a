"""Plans take the times that an H100 measured, and benchmarks/time_truth.md is what
tools/bench/time_truth.py prints today."""

import json
from dataclasses import replace

import pytest
import torch

from ditkit_core.config.sizes import GIB
from workspace import ROOT

PAGE = (ROOT / "benchmarks" / "time_truth.md").read_text(encoding="utf-8").splitlines()
made_with_another_torch = f"torch {torch.__version__.partition('+')[0]}." not in "\n".join(PAGE[:4])


@pytest.fixture(scope="module")
def truth():
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "tools" / "bench"))
        import time_truth

        yield time_truth


def steps_of(truth, *names):
    return [next(step for step in truth.STEPS if step.name == name) for name in names]


def check_kinds(truth, step):
    """Each kind of kernel takes what was measured, and the page has the step's rows."""
    assert step.off() <= truth.BOUND
    for kind, measured in step.kinds.items():
        assert step.planned_kinds()[kind] == pytest.approx(measured, rel=truth.BOUND)
    # Since these rows were measured, a Wan block with LoRAs launches thirteen kernels fewer in each
    # direction.
    assert 0.8 * step.launches < step.planned_launches() < (1 + truth.BOUND) * step.launches
    if not made_with_another_torch:
        assert truth.whole_row(step) in PAGE and truth.kinds_row(step) in PAGE


def test_a_step_that_waits_for_the_host_takes_what_was_measured(truth):
    """Of a model with few tokens: launched, replayed, and each kind of kernel."""
    (step,) = steps_of(truth, "FLUX.2 klein 4B, 512×512, full, triton")
    assert step.planned() > 3 * step.planned(replayed=True), "the host feeds it"
    assert step.planned_kinds().total() == pytest.approx(step.busy, rel=truth.BOUND)
    check_kinds(truth, step)


@pytest.mark.slow
def test_a_step_that_does_not_wait_for_the_host_takes_what_was_measured(truth):
    """Of a model with many tokens."""
    (step,) = steps_of(truth, "Wan 14B, 480×832×49, 4 blocks, full, triton")
    assert step.planned() < 1.05 * step.planned(replayed=True), "the host hides behind it"
    check_kinds(truth, step)


CASES = {
    "FLUX.2 klein 4B, 512×512, full, triton": "klein 4B 512x512, full, kernels = triton",
    "FLUX.2 klein 4B, 512×512, none, triton": "klein 4B 512x512, none, kernels = triton",
    "FLUX.2 klein 4B, 1024×1024, full, triton": "klein 4B 1024x1024, full, kernels = triton",
    "FLUX.2 klein 4B, 1024×1024, none, triton": "klein 4B 1024x1024, none, kernels = triton",
    "FLUX.2 dev, 512×512, full, triton": "FLUX.2 dev 512x512, full, kernels = triton",
    "FLUX.2 dev, 512×512, attn_only, triton": "FLUX.2 dev 512x512, attn_only, kernels = triton",
    "FLUX.2 dev, 1024×1024, full, triton": "FLUX.2 dev 1024x1024, full, kernels = triton",
}
"""Name of a measured row by name of a step."""


@pytest.mark.parametrize(
    "name",
    [next(iter(CASES)), *(pytest.param(name, marks=pytest.mark.slow) for name in list(CASES)[1:])],
)
def test_a_launched_and_a_replayed_step_need_the_memory_that_was_measured(truth, name):
    """Whose gradients have memory of their own for the whole step, which a plan of an eager step is
    1 to 3 % short of."""
    rows = (
        (ROOT / "benchmarks" / "gpu_h100_08d556ef.jsonl").read_text(encoding="utf-8").splitlines()
    )
    measured = {row["name"]: row["peak GiB"] for row in map(json.loads, rows) if "peak GiB" in row}
    (step,) = steps_of(truth, name)
    launched, replayed = step.planned_peak() / GIB, step.planned_peak(replayed=True) / GIB
    assert launched == pytest.approx(measured[CASES[name]], rel=0.015)
    assert replayed == pytest.approx(measured[f"{CASES[name]}, replayed"], rel=0.015)
    more = measured[f"{CASES[name]}, replayed"] - measured[CASES[name]]
    assert replayed - launched == pytest.approx(more, rel=0.05), "gradients, and inputs"


@pytest.mark.slow
def test_every_step_takes_what_was_measured(truth):
    assert {step.name: step.off() for step in truth.STEPS if step.off() > truth.BOUND} == {}
    if not made_with_another_torch:
        assert [row for row in map(truth.whole_row, truth.STEPS) if row not in PAGE] == []


def test_a_plan_that_is_off_is_reported_by_its_distance(truth):
    (step,) = steps_of(truth, "FLUX.2 klein 4B, 512×512, full, triton")
    planned, replayed = step.planned(), step.planned(replayed=True)
    for measured, off in ((planned, 0.0), (2 * planned, 0.5), (0.5 * planned, 1.0)):
        assert replace(step, seconds=(measured,), replayed=()).off() == pytest.approx(off)
    assert replace(step, seconds=(planned,), replayed=(2 * replayed,)).off() == pytest.approx(
        0.5
    ), "the worse of both"
    assert replace(step, seconds=(0.5 * planned, 2 * planned), replayed=()).off() == 0, (
        "measurements scatter"
    )
