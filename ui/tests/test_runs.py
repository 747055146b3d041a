"""The state of a run follows from its folder."""

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ditkit_core.errors import UserError
from ditkit_core.io.run_dir import RunFolder, locked
from ditkit_core.io.run_queue import QueuedRun, RunQueue
from ditkit_ui import runs
from ditkit_ui.families import family_of, installed_families
from ditkit_ui.runs import (
    leave_to_queue,
    run_state,
    start_run,
    start_sheet,
)


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


def test_a_run_that_waits_in_the_queue_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    queue, folder = RunQueue.of_machine(), RunFolder(tmp_path / "b")
    for name in "ab":
        path = str(tmp_path / name)
        queue.add(QueuedRun(run=path, command=("x",), cwd="/", steps=9, log=f"{path}.log"))
    assert run_state(folder).text == "Waits in the queue, at position 2"
    queue.move(str(folder.path), 1)
    assert run_state(folder).position == 1
    with locked(folder.path):
        assert run_state(folder).kind == "running"
    queue.remove(str(folder.path))
    assert run_state(folder).kind == "new"


def test_a_button_that_is_pressed_twice_starts_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text(
        f"#!{sys.executable}\nfrom pathlib import Path\nPath('begun').open('a').write('x')\n"
        "while not Path('end').exists(): pass\n"
    )
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "program", lambda family, name: str(program))
    folder = RunFolder(tmp_path / "run")

    def press(kind: str) -> str:
        try:
            if kind == "sheet":
                start_sheet("wan", folder, [])
            else:
                start_run("wan", tmp_path / "a.toml", folder)
        except UserError as error:
            return str(error)
        return ""

    for kind, about in (("sheet", "is made already"), ("run", "runs already")):
        with ThreadPoolExecutor() as pool:
            said = sorted(pool.map(press, [kind] * 4))
        assert said[0] == "" and all(about in text for text in said[1:]), said
    (tmp_path / "end").touch()
    for started in runs._STARTED.values():
        started.wait()
    assert (tmp_path / "begun").read_text() == "xx"
    assert press("sheet") == "", "another one after it"
    runs._STARTED[(folder.path / runs.SHEET_OUTPUT).resolve()].wait()


def test_a_run_that_processes_divide_is_started_by_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "program", lambda family, name: "/bin/toy-train")
    monkeypatch.chdir(tmp_path)
    started = list[Sequence[str]]()
    monkeypatch.setattr(runs, "_start", lambda words, output: started.append(words))
    start_run("toy", tmp_path / "a.toml", RunFolder(tmp_path / "run"), 2)
    (words,) = started
    assert words[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert words[-3:] == ["--no-python", "/bin/toy-train", str(tmp_path / "a.toml")]


def test_a_command_that_prints_nothing_still_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o755)
    monkeypatch.setattr(runs, "program", lambda family, name: str(program))
    assert runs.run_program("wan", "train", []) == (
        7,
        ["the command ended with status 7, and printed nothing"],
    )


def test_every_installed_family_is_found_and_guessed_by_its_models(tmp_path: Path) -> None:
    families = installed_families()
    assert {"wan", "flux2", "zimage"} <= families.keys()
    folder = RunFolder(tmp_path)
    guesses = {
        hub_id: (family_of(folder, {"model": {"base": hub_id}}), name)
        for name, family in families.items()
        for hub_id in family.spec().architecture.hub_presets
    }
    assert {hub_id: pair for hub_id, pair in guesses.items() if len(set(pair)) > 1} == {}
    assert family_of(folder, {"model": {"base": "models/z_image"}}) == "zimage"
    assert family_of(folder, {"model": {"preset": families["wan"].presets[0]}}) == "wan"
    both = {"base": "Tongyi-MAI/Z-Image", "preset": "base"}
    assert "base" in families["krea2"].presets, "of a family that comes before"
    assert family_of(folder, {"model": both}) == "zimage"
    folder.about.write_text('{"model": {"family": "flux2"}}')
    assert family_of(folder, {"model": {"base": "Tongyi-MAI/Z-Image"}}) == "flux2"
