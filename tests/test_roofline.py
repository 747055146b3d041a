"""Rows of benchmarks/roofline.md are what tools/roofline.py counts today."""

import pytest

from workspace import ROOT

PAGE = ROOT / "benchmarks" / "roofline.md"


@pytest.mark.slow  # blocks of two models at full size, on fake tensors
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_the_published_rows_are_what_is_counted(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from roofline import CASES, block_row, ours

    published = PAGE.read_text(encoding="utf-8").splitlines()
    label = "ours" if kernels == "torch" else f"ours, kernels = {kernels}"
    for case in CASES[:2]:  # the third is the second at another size
        step = ours(case, kernels=kernels)
        start = published.index(f"## {case.name}")
        for _, counted in step.blocks.values():
            assert f"| {' | '.join(block_row(label, counted))} |" in published[start:], (case.name, label)
