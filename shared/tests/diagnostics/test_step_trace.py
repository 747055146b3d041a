"""`train.profile`: a Chrome trace of some steps, and their longest kernels."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from toy_world import World, equal

from ditkit_core.diagnostics.step_trace import top_kernels


def test_steps_after_warm_up_are_traced_and_nothing_else_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path)
    flags = ("--sample.captions", "0", "--export.dtype", "fp32")
    assert world.train("plain", 6, *flags) == 0
    capsys.readouterr()
    assert world.train("traced", 6, *flags, "--train.profile", "2") == 0
    said = capsys.readouterr().out
    file = tmp_path / "traced" / "profile.json.gz"
    assert f"profile:  {file} (open it in chrome://tracing or https://ui.perfetto.dev)" in said
    assert "ms per step" in said and "aten::" in said
    with gzip.open(file) as opened:
        events = json.load(opened)["traceEvents"]
    steps = {event["name"] for event in events if event.get("name", "").startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#3", "ProfilerStep#4"}, (
        "counted from 0, after three steps of warm-up"
    )
    assert any("mm" in event.get("name", "") for event in events)
    assert equal(world.adapter("plain"), world.adapter("traced"))
    assert [
        path.name for path in (tmp_path / "traced").iterdir() if path.name.startswith((".", "tmp"))
    ] == [".lock"]


TRACED = """
import sys
from pathlib import Path
import torch
from ditkit_core.diagnostics.step_trace import StepTrace
trace = StepTrace(1, Path(sys.argv[1]), print)
trace.started(0)
for step in range(1, 5):
    torch.ones(8, 8) @ torch.ones(8, 8)
    trace.after_step(step, {})
"""


@pytest.mark.slow  # a process of its own: the level of messages is read once
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the profiler may report errors")
def test_on_a_cpu_the_profiler_prints_nothing_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "profile.json.gz"
    run = subprocess.run(
        [sys.executable, "-c", TRACED, str(file)], capture_output=True, text=True, check=True
    )
    assert file.is_file() and run.stderr == "" and "USDT" not in run.stdout


def test_a_run_that_is_too_short_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path)
    assert world.train("run", 2, "--sample.captions", "0", "--train.profile", "3") == 0
    assert (
        "train.profile = 3 traces after 3 steps, and this start has 2: nothing was traced; train 6 "
        "or more" in capsys.readouterr().err
    )
    assert not (tmp_path / "run" / "profile.json.gz").exists()


def test_a_run_on_the_cpu_shows_its_operations_on_a_machine_with_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as made:
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert any(name == "aten::mm" for name, *_ in top_kernels(made, 1).rows)
