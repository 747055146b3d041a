"""The state of a run follows from its folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ditkit_core.errors import UserError
from ditkit_core.io.run_dir import RunFolder, locked
from ditkit_ui import runs
from ditkit_ui.families import family_of, installed_families
from ditkit_ui.runs import leave_to_queue, run_state, start_run


def write_metrics(folder: Path, step: int) -> None:
    lines = [json.dumps({"step": number, "loss": 1.0}) for number in range(1, step + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 9', encoding="utf-8")


def test_a_run_is_new_trains_is_stopped_and_complete(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert run_state(folder).kind == "new"
    with locked(folder.path):
        folder.config_file.write_text("")
        write_metrics(folder.path, 3)
        state = run_state(folder)
        assert (state.kind, state.step, state.is_alive) == ("running", 3, True)
    assert (run_state(folder).kind, run_state(folder).step) == ("stopped", 3)
    folder.mark_complete(5)
    assert run_state(folder).text == "Complete at step 5"


def test_a_killed_run_is_called_killed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    code = f"""
import time
from pathlib import Path
from ditkit_core.io.run_dir import locked
with locked(Path({str(tmp_path)!r})):
    print(flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    write_metrics(tmp_path, 4)
    assert run_state(folder).kind == "running"
    process.kill()
    process.wait()
    process.stdout.close()
    assert run_state(folder).text.startswith("Killed at step 4")


def test_a_run_starts_once_in_a_session_of_its_own_and_its_last_lines_say_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\nprint(os.getsid(0) == os.getpid(), sys.argv[1:])\n"
        "sys.stdin.read()\nprint('error: no base')\nsys.exit(int(open('wait').read()))\n"
    )
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "program", lambda family, name: str(program))
    folder = RunFolder(tmp_path / "runs" / "a")
    (tmp_path / "wait").write_text("1")
    start_run("wan", tmp_path / "a.toml", folder)
    runs._STARTED[folder.path].wait()
    assert run_state(folder).kind == "failed"
    assert runs.last_output(folder) == [f"True ['{tmp_path / 'a.toml'}']", "error: no base"]
    with locked(folder.path), pytest.raises(UserError, match="runs already"):
        start_run("wan", tmp_path / "a.toml", folder)
    folder.config_file.write_text("")
    folder.mark_complete(5)  # by the queue, which the page does not ask for its end
    assert run_state(folder).kind == "failed"
    leave_to_queue(folder)
    assert run_state(folder).kind == "complete" and runs.last_output(folder) == []


def test_every_installed_family_is_found_and_guessed_by_its_models(tmp_path: Path) -> None:
    families = installed_families()
    assert {"wan", "flux2", "zimage"} <= families.keys()
    folder = RunFolder(tmp_path)
    assert family_of(folder, {"model": {"base": "Tongyi-MAI/Z-Image"}}) == "zimage"
    assert family_of(folder, {"model": {"base": "black-forest-labs/FLUX.2-dev"}}) == "flux2"
    assert family_of(folder, {"model": {"preset": families["wan"].presets[0]}}) == "wan"
    both = {"base": "Tongyi-MAI/Z-Image", "preset": "base"}
    assert "base" in families["krea2"].presets, "of a family that comes before"
    assert family_of(folder, {"model": both}) == "zimage"
    folder.about.write_text('{"model": {"family": "flux2"}}')
    assert family_of(folder, {"model": {"base": "Tongyi-MAI/Z-Image"}}) == "flux2"
