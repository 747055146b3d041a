"""The process that works for the page: a mistake is a message, and it ends with the page."""

import asyncio
import subprocess
import sys

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


def test_it_ends_when_the_page_is_gone() -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "ditkit_ui.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.communicate(timeout=120) == (b"", None), "its input was closed"
    assert child.returncode == 0
