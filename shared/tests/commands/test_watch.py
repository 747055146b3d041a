"""The command that serves a run's page, in a process of its own."""

import os
import re
import signal
import time
import urllib.request
from pathlib import Path

import pytest
from made_runs import write_run

from ditkit_core.commands.cli import Family, start
from ditkit_core.testing import scripts

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
    program, out, err = (tmp_path / name for name in ("watch.py", "out", "err"))
    program.write_text(PROGRAM)
    process = scripts.start(program, str(run), "--port", "0", out=out, err=err)
    try:
        end = time.monotonic() + 120
        while not out.exists() or out.read_text().count("\n") < 2:
            assert time.monotonic() < end and process.is_alive(), "the page is served"
            time.sleep(0.02)
        first, tunnel = out.read_text().splitlines()[:2]
        found = re.search(r"at (http://127\.0\.0\.1:(\d+)/) ", first)
        assert found and f"ssh -N -L {found[2]}:127.0.0.1:{found[2]} " in tunnel
        with urllib.request.urlopen(found[1], timeout=120) as response:
            assert b"It learns: loss on unseen clips fell by" in response.read()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        process.join(120)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == 0 and "ended; the run goes on" in out.read_text()
    assert err.read_text() == ""
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
