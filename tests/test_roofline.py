"""Rows of benchmarks/roofline.md are what tools/bench/roofline.py counts today, and what was wanted
of a step."""

import re

import pytest

from workspace import ROOT

PAGE = ROOT / "benchmarks" / "roofline.md"


@pytest.mark.slow  # blocks of two models at full size, on fake tensors
@pytest.mark.parametrize(
    "base",
    ["dtype", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("int8", "fp8"))],
)
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_the_published_rows_are_what_is_counted(
    kernels: str, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))
    from roofline import CASES, OURS, block_row, ours

    published = PAGE.read_text(encoding="utf-8").splitlines()
    label = OURS if kernels == "triton" else f"ours, kernels = {kernels}"
    if base != "dtype":
        label = f"ours, {base} computed, kernels = {kernels}"
    for case in CASES[:2]:  # the others are the second at another size and width
        step = ours(case, kernels=kernels, base=base)
        start = published.index(f"## {case.name}")
        for _, counted in step.blocks.values():
            assert f"| {' | '.join(block_row(label, counted))} |" in published[start:], (
                case.name,
                label,
            )


def test_a_step_by_default_is_as_small_and_as_fast_as_wanted() -> None:
    """On an H100, as modelled: a step of Wan 14B in so many seconds, and every case a fifth faster
    than diffusers under autocast."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [
        re.findall(r"[\d.]+", line)
        for line in lines
        if line.startswith("| ours (kernels = triton, the default on GPUs) |")
    ]
    # FLUX.2 has two kinds of blocks
    wan, *steps = (rows[0], rows[1], rows[4], rows[7], rows[10], rows[13])
    # Milliseconds and amount of each kind of work, their sum, and launches.
    fp32, traffic, launches = float(wan[7]), float(wan[9]), int(wan[11])
    assert fp32 == 0 and traffic <= 45 and launches <= 300
    assert float(steps[0][0]) <= 5.5
    assert all(float(step[1]) >= 1.2 for step in steps)
