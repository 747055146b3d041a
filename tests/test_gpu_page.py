"""tools/gpu/gpu_page.py: the page says what the rows say, and no more."""

import json
from pathlib import Path
from typing import Any

import pytest

from workspace import ROOT


@pytest.fixture
def gpu_page(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "gpu"))
    import gpu_page

    return gpu_page


def written(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_the_page_is_made_of_the_rows_next_to_it(gpu_page: Any) -> None:
    files = sorted(gpu_page.BENCHMARKS.glob("gpu_h100*.jsonl"))
    assert files and sum(file.stat().st_size for file in files) < 200_000
    text = (gpu_page.BENCHMARKS / "gpu_h100.md").read_text(encoding="utf-8")
    assert gpu_page.page(files) == text, "uv run tools/gpu/gpu_page.py > benchmarks/gpu_h100.md"


def test_each_trainer_has_a_column_and_each_policy_a_line(gpu_page: Any, tmp_path: Path) -> None:
    def step(trainer: str, seconds: float, **more: Any) -> dict[str, Any]:
        part = {"ditkit": "dev", "diffusers": "dev", "musubi-tuner": "musubi"}[trainer]
        labels = {
            "name": f"{trainer} {seconds}",
            "case": "dev",
            "trainer": trainer,
            "policy": "full",
            "preset": "default",
        }
        return {"part": part, **labels, "seconds": seconds, "peak GiB": 66.25, **more}

    ours = {"kernels": "triton", "planned / measured": 1.001, "time planned / measured": 0.9}
    rows = [
        {"part": "run", "name": "commit 1234", "value": "2026-01-01"},
        {"part": "facts", "name": "NVIDIA H100", "value": "torch 2.11"},
        step("ditkit", 0.8, cuda_graphs="off", **ours), step("ditkit", 0.4, cuda_graphs="on",
        **ours),
        step("ditkit", 9.0, cuda_graphs="off", kernels="torch"), step("diffusers", 0.69),
        {"part": "dev", "name": "dev, none", "case": "dev", "trainer": "ditkit", "policy": "none",
        "value": "more than this GPU has"},
        {"part": "dev", "status": "ok", "seconds": 60, "error": ""},
        step("musubi-tuner", 0.75), {"part": "musubi", "status": "failed", "seconds": 5,
        "error": "it crashed"},
        {"part": "tests", "name": "test_one", "ok": False, "value": "AssertionError"},
    ]  # fmt: skip
    text = gpu_page.page([written(tmp_path / "gpu_h100.jsonl", *rows)])
    assert "## commit 1234\n\nNVIDIA H100: torch 2.11\n" in text
    assert (
        "| step | ditkit | ditkit, replayed | diffusers | musubi-tuner | planned: memory, time |"
        in text
    )
    line = (
        "| dev, full | 0.800 s, 66.2 GiB | 0.400 s, 66.2 GiB | 0.690 s, 66.2 GiB | 0.750 s, 66.2 "
        "GiB "
        "| 1.001, 0.90; 1.001, 0.90 replayed |"
    )
    assert line in text and text.count("| dev, none |") == 1, "in the rows of its part"
    assert "- tests: test_one: AssertionError\n- musubi: it crashed\n" in text
    assert "### dev: ok in 60 s\n" in text and "### tests\n" in text and "### plan" not in text


def test_the_last_run_that_measured_a_part_counts(gpu_page: Any) -> None:
    def run(number: int) -> dict[str, Any]:
        return {"part": "run", "name": f"commit {number}", "value": ""}

    def row(part: str, number: int) -> dict[str, Any]:
        return {"part": part, "name": "same", "value": number}

    skipped = {"part": "plan", "status": "skipped", "error": "no time left"}
    rows = [
        run(1),
        row("plan", 1),
        row("tests", 1),
        row("tests", 2),
        run(2),
        row("tests", 3),
        skipped,
    ]
    assert gpu_page.latest(rows) == [run(1), run(2), row("plan", 1), row("tests", 3)]
