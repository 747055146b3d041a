"""The command that serves a run's page, in a process of its own."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from made_runs import write_run

from ditkit_core.commands.cli import Family, start

PROGRAM = """
import sys
from pathlib import Path
from ditkit_core.commands.cli import Family, start

def spec():
    raise SystemExit("the spec was asked for")

sys.exit(start(Family(name="toy", presets=(), demo=Path("demo.toml"), spec=spec), "watch", sys.argv[1:]))
"""


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is sent as a signal")
def test_a_run_is_watched_until_ctrl_c_without_its_model(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    before = sorted(run.rglob("*"))
    command = [sys.executable, "-uc", PROGRAM, str(run), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        first, tunnel = process.stdout.readline(), process.stdout.readline()
        found = re.search(r"at (http://127\.0\.0\.1:(\d+)/) ", first)
        assert found and f"ssh -N -L {found[2]}:127.0.0.1:{found[2]} " in tunnel
        with urllib.request.urlopen(found[1], timeout=120) as response:
            assert b"It learns: loss on unseen clips fell by" in response.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0 and "ended; the run goes on" in process.stdout.read()
        assert process.stderr.read() == ""
    assert sorted(run.rglob("*")) == before, "it writes nothing"


def family() -> Family:
    return Family(
        name="toy", presets=(), demo=Path("demo.toml"), spec=lambda: pytest.fail("needs no spec")
    )


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path / "run"))
    for argv, status, message in (
        ([], 2, "name the folder of a run (toy-watch RUN)"),
        ([str(tmp_path)], 2, "is not the folder of a run"),
        ([run, "--port", "70000"], 2, "--port 70000 must be from 0 to 65535"),
        ([run, "--log", "gone.out"], 1, "there is no file gone.out to --log"),
        ([run, "--bind", "203.0.113.7"], 1, "cannot listen at 203.0.113.7:8400"),
    ):
        assert start(family(), "watch", argv) == status
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
