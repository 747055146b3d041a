"""Long work of the page: one at a time, with its lines; a stop ends it, and a start begins anew."""

import asyncio
from pathlib import Path

import pytest
from tiny_captioner import write_captioner, write_photos
from worker_here import WorkerHere

from ditkit_core.errors import UserError
from ditkit_ui.job import Job


def test_a_job_is_stopped_and_begun_again(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", ["a.png", "b.png"])
    model = write_captioner(tmp_path / "model", "A red cat sits on the mat.")
    ends: list[str] = []
    job = Job(tmp_path / "log", on_end=lambda: ends.append(job.state))

    async def work() -> None:
        arguments = [str(folder), f"--model={model}"]
        first = asyncio.create_task(job.run("caption", family="zimage", arguments=arguments))
        while job._worker._child is None:
            await asyncio.sleep(0.01)
        with pytest.raises(UserError, match="one works already; stop it first"):
            await job.run("caption", family="zimage", arguments=arguments)
        assert job.is_running
        job.stop()  # while it imports torch
        await first
        assert (job.state, list(folder.glob("*.txt"))) == ("stopped", [])
        job._worker = WorkerHere()
        await job.run("caption", family="zimage", arguments=arguments)
        assert job.state == "done" and "captions: 2 written" in "\n".join(job.lines)
        assert len(list(folder.glob("*.txt"))) == 2
        await job.run("caption", family="zimage", arguments=["/no/such/folder"])
        assert job.state == "failed" and "/no/such/folder" in "\n".join(job.lines)
        assert ends == 3 * ["running"], "before others may start one"

    asyncio.run(work())
