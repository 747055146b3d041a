"""tools/faults/kill_test.py in its smallest run: a kill, and what it compares."""

import subprocess
import sys
from pathlib import Path

import pytest

from workspace import ROOT


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform == "win32", reason="starts are forks")
def test_a_killed_run_ends_like_one_that_was_not(tmp_path: Path) -> None:
    kinds = ["--families", "wan", "--methods", "lora", "--folder", str(tmp_path / "runs")]
    command = [
        sys.executable,
        str(ROOT / "tools" / "faults" / "kill_test.py"),
        "--kills",
        "1",
        *kinds,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        done.stdout.endswith("\n1 kills, 0 runs that differ\n") and "| wan | lora | " in done.stdout
    )


def test_a_run_that_differs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "faults"))
    import kill_test

    for name in ("one", "other"):
        run = tmp_path / name / "run"
        (run / "state").mkdir(parents=True)
        (run / "exports").mkdir()
        (run / "train.log").write_text(f"{name}: the clock is in each line\n")
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5, "seconds": 1.0}\n')
        (run / "report.html").write_text("<img>")
        (run / "exports" / "a.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + b"x")
    assert kill_test.differences(tmp_path / "one", tmp_path / "other") == []
    other = tmp_path / "other" / "run"
    (other / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n' * 2)
    (other / "report.html").write_text("")
    (other / "exports" / "a.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + b"y")
    (other / ".b.0123abcd.tmp").touch()
    assert kill_test.differences(tmp_path / "one", tmp_path / "other") == [
        "only in one: run/.b.0123abcd.tmp",
        "differs: run/exports/a.safetensors",
        "differs: metrics.jsonl",
        "differs: images of report.html: [1, 0]",
    ]
