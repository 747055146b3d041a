"""The process that works for the page: a mistake is a message, and it ends with the page."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ditkit_core.errors import UserError
from ditkit_ui.worker import Worker


def test_it_answers_says_mistakes_and_is_started_again_after_its_end() -> None:
    worker = Worker()

    async def ask() -> None:
        machine = await worker.ask("machine")
        assert machine["gpus"] == "" and "rtx4090" in machine["names"]
        with pytest.raises(UserError, match=r"--gpus .* did you mean|is not known"):
            await worker.ask(
                "recipe", family="zimage", name="zimage_character_8gb", gpus="rtx3070x"
            )
        planned = await worker.ask(
            "command", family="zimage", name="train", arguments=["--train.step", "5", "--plan"]
        )
        assert planned["status"] == 2 and "did you mean --train.steps?" in planned["err"]
        child = worker._child
        assert child is not None
        child.kill()
        with pytest.raises(UserError, match="ended while it did"):
            await worker.ask("nothing_of_this_name")

    try:
        asyncio.run(ask())
    finally:
        worker.end()


def test_half_an_answer_of_a_process_that_is_killed_is_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "half"
    program.write_text(f"#!{sys.executable}\ninput()\nprint('{{\"value', end='', flush=True)\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    worker = Worker()
    with pytest.raises(UserError, match="ended while it did machine"):
        asyncio.run(worker.ask("machine"))
    worker.end()


def test_it_ends_when_the_page_is_gone() -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "ditkit_ui.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.communicate(timeout=120) == (b"", None), "its input was closed"
    assert child.returncode == 0


COUNTING = """
import sys
from ditkit_core.planner import profiler
from ditkit_ui import worker

measure = profiler.measure

def counted(*rest, **named):
    print("measured", file=sys.__stderr__, flush=True)
    return measure(*rest, **named)

profiler.measure = counted
worker.main()
"""


@pytest.mark.slow
def test_a_later_plan_measures_only_what_was_changed(tmp_path: Path) -> None:
    run = ["--demo", f"--run.folder={tmp_path / 'run'}", "--plan", "--gpus=24GiB", "--json"]
    log = tmp_path / "log"
    with open(log, "wb") as errors:
        child = subprocess.Popen(
            [sys.executable, "-c", COUNTING],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
        )

    def answer(name: str, /, **arguments: Any) -> Any:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps([name, arguments]) + "\n")
        child.stdin.flush()
        return json.loads(child.stdout.readline())["value"]

    def planned(*more: str) -> tuple[int, int]:
        """The peak, and how many steps were run so far."""
        done = answer("command", family="zimage", name="train", arguments=[*run, *more])
        assert done["status"] == 0, done["err"]
        return json.loads(done["out"])["devices"][0]["peak"], log.read_text().count("measured")

    answer("write_demo", family="zimage", folder=str(tmp_path / "run"))
    first = planned()
    assert first[1] == 2, "the stages together, and apart"
    assert planned("--optim.lr=1e-5", "--train.steps=9") == first
    assert planned("--train.batch_size=3")[1] == 4
    assert planned() == (first[0], 4)
    child.communicate()
