"""The queue of a machine: its order, its workers, and what survives a kill of either side."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import pytest
from queue_program import FAMILY
from safetensors.torch import load_file
from toy_world import World, equal

from ditkit_core.commands.cli import start
from ditkit_core.commands.options import TrainOptions
from ditkit_core.commands.queue import work_on_queue
from ditkit_core.diagnostics.report.words import format_duration
from ditkit_core.io.run_dir import is_locked
from ditkit_core.io.run_queue import QueuedRun, RunQueue
from ditkit_core.testing import scripts

SUPPORT = Path(__file__).parent.parent / "support"
PROGRAM = SUPPORT / "queue_program.py"
SECONDS = 240.0
"""How long a test waits for what takes a second on an idle machine."""


def one_line(said: str) -> str:
    assert said.count("\n") == 1, said
    return said.strip()


def until(holds: Callable[[], object], about: str) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, about
        time.sleep(0.05)


def status_of(process: BaseProcess) -> int | None:
    """The exit status of a process, once it has ended."""
    process.join(SECONDS)
    return process.exitcode


class Called(NamedTuple):
    """A command that has ended."""

    status: int
    out: str
    err: str


class Machine:
    """A home with a queue, in which stand-ins for runs are trained by real workers.

    A worker is a copy of a process that has imported the program. Commands that only ask and tell
    run in the process of the test.
    """

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        self.folder, self.capsys = folder, capsys
        self.queue = RunQueue.of_machine()
        self.started: list[BaseProcess] = []

    def add(self, *names: str) -> None:
        """Add stand-ins."""
        for name in names:
            path = self.folder / name
            path.mkdir(exist_ok=True)
            command = (sys.executable, str(SUPPORT / "queued_stand_in.py"), str(path))
            log = str(self.folder / f"{name}.log")
            self.queue.add(
                QueuedRun(run=str(path), command=command, cwd=str(self.folder), steps=9, log=log)
            )

    def call(self, *arguments: str) -> Called:
        """Call the command, and wait until it has ended."""
        self.capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [str(PROGRAM)])
            status = start(FAMILY, "train", arguments)
        return Called(status, *self.capsys.readouterr())

    def process(self, *arguments: str) -> tuple[BaseProcess, Path]:
        """Start the command in a process of its own. Also returns the file of what it prints."""
        out = self.folder / f"printed-{len(self.started)}"
        process = scripts.start(PROGRAM, *arguments, out=out, err=out)
        self.started.append(process)
        return process, out

    def worker(self, *arguments: str) -> BaseProcess:
        """Start a worker, and wait until it works."""
        process, out = self.process("--queue", "start", *arguments)
        until(lambda: out.exists() and "\n" in out.read_text(), "the worker works")
        assert out.read_text().startswith("queue:")
        return process

    @property
    def events(self) -> list[list[str]]:
        """What runs have done, in words: begin NAME GPU PID, end NAME."""
        with suppress(FileNotFoundError):
            lines = (self.folder / "events").read_text(encoding="utf-8").splitlines()
            return [line.split() for line in lines]
        return []

    def begun(self) -> list[str]:
        return [words[1] for words in self.events if words[0] == "begin"]

    def pid(self, name: str) -> int:
        """The newest process of a run."""
        return int([words for words in self.events if words[:2] == ["begin", name]][-1][3])

    def let_end(self, *names: str) -> None:
        for name in names:
            (self.folder / name / "may-end").touch()

    def states(self) -> dict[str, str]:
        return {Path(run.run).name: run.state for run in self.queue.runs()}

    def close(self) -> None:
        """End what a failed test has left."""
        for process in self.started:
            process.kill()
            process.join()
        for gpu in self.queue.workers():  # detached ones
            owner = (self.queue.worker_folder(gpu) / ".owner").read_text(encoding="utf-8")
            os.kill(int(owner.split()[1]), signal.SIGKILL)
        for words in self.events:
            if words[0] == "begin" and is_locked(self.folder / words[1]):
                with suppress(ProcessLookupError):
                    os.kill(int(words[3]), signal.SIGKILL)


@pytest.fixture
def machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Machine]:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    machine = Machine(tmp_path, capsys)
    yield machine
    machine.close()


def test_runs_are_trained_in_an_order_that_changes_while_one_trains(machine: Machine) -> None:
    machine.add("a", "b", "c", "d")
    machine.let_end("b", "c", "d")
    worker = machine.worker("--until-empty")
    until(lambda: machine.begun() == ["a"], "the first run begins")
    assert machine.queue.move(str(machine.folder / "d"), 1) == 1
    machine.queue.remove(str(machine.folder / "c"))
    assert machine.states() == {"a": "running", "d": "waiting", "b": "waiting"}
    machine.let_end("a")
    assert status_of(worker) == 0
    assert [words[:2] for words in machine.events] == [
        [word, name] for name in ("a", "d", "b") for word in ("begin", "end")
    ]
    assert set(machine.states().values()) == {"complete"}


def test_a_failed_run_does_not_stop_the_next(machine: Machine) -> None:
    machine.add("a", "b")
    (machine.folder / "a" / "fails").touch()
    machine.queue.add(
        QueuedRun(run="/gone", command=("no-such-program",), cwd="/", steps=1, log="gone.log"), 1
    )
    machine.let_end("b")
    assert status_of(machine.worker("--until-empty")) == 0
    assert machine.states() == {"gone": "failed", "a": "failed", "b": "complete"}
    gone, failed, _ = machine.queue.runs()
    assert gone.error.startswith("no-such-program cannot be started: ")
    assert failed.error == "there is no such file"
    rows = [{"step": step, "seconds": 10.0} for step in (1, 2, 3)]
    (machine.folder / "a" / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in rows)
    )
    table = machine.call("--queue", "list").out
    assert "3/9" in table and format_duration(60.0) in table
    assert "there is no such file" in table and "0/9" in table and "none (--queue start)" in table
    assert "1 complete runs are removed" in machine.call("--queue", "remove").out
    assert "b" not in machine.states()


def test_two_workers_never_take_the_same_run(machine: Machine) -> None:
    names = [f"run{number}" for number in range(5)]
    machine.add(*names)
    workers = [machine.worker("--worker", gpu, "--until-empty") for gpu in ("0", "1")]
    until(lambda: len(machine.begun()) == 2, "both work at the same time")
    assert {words[2] for words in machine.events} == {"0", "1"}
    machine.let_end(*names)
    assert [status_of(worker) for worker in workers] == [0, 0]
    assert sorted(machine.begun()) == names and set(machine.states().values()) == {"complete"}


_TAKE_ALL = """
import sys, time
from dataclasses import replace
from pathlib import Path
from ditkit_core.io.run_queue import RunQueue
queue, gpu = RunQueue.of_machine(), sys.argv[1]
with queue.working(gpu):
    while not Path("begin").exists():
        time.sleep(0.001)
    while run := queue.take(gpu):
        print(run.run)
        queue.put(replace(run, state="complete"))
"""


def test_many_takers_at_once_get_every_run_once(machine: Machine) -> None:
    names = [f"run{number}" for number in range(60)]
    machine.add(*names)
    script = machine.folder / "take_all.py"
    script.write_text(_TAKE_ALL)
    outs = [machine.folder / f"taken-{gpu}" for gpu in range(4)]
    takers = [scripts.start(script, str(gpu), out=out, err=out) for gpu, out in enumerate(outs)]
    machine.started.extend(takers)
    until(lambda: len(machine.queue.workers()) == 4, "all are ready")
    Path("begin").touch()
    assert {status_of(taker) for taker in takers} == {0}
    taken = [Path(line).name for out in outs for line in out.read_text().split()]
    assert sorted(taken) == sorted(names)
    assert set(machine.states().values()) == {"complete"}


@pytest.mark.skipif(os.name == "nt", reason="a script without an extension")
def test_a_worker_is_of_a_gpu_that_the_machine_has(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = machine.folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'GPU 0: A'\necho '  MIG 1g'\necho 'GPU 1: B'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    for worker, how in product(("2", "0,3"), ("--until-empty", "--detach")):
        refused = machine.call("--queue", "start", "--worker", worker, how)
        assert refused.status == 1
        assert one_line(refused.err) == (
            f"error: --worker {worker}: this machine has 2 GPUs; their indices are 0 to 1"
        )
    assert status_of(machine.worker("--worker", "0,1", "--until-empty")) == 0


def test_a_gpu_has_one_worker(machine: Machine) -> None:
    machine.worker("--worker", "0,1")
    refused = machine.call("--queue", "start", "--worker", "1", "--until-empty")
    assert refused.status == 1
    assert one_line(refused.err).startswith("error: GPU 1 has a worker already (process ")
    assert "GPU 0, GPU 1" in machine.call("--queue", "list").out
    assert machine.call("--queue", "stop").status == 0
    assert status_of(machine.started[0]) == 0
    assert machine.call("--queue", "stop").status == 1


def test_a_run_of_several_processes_needs_a_worker_with_as_many_gpus(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.queue.add(
        QueuedRun(run="/a", command=("x",), cwd="/", steps=9, log="a.log", group_size=2)
    )
    monkeypatch.setattr("ditkit_core.commands.queue.num_listed_gpus", lambda: 4)
    assert work_on_queue(TrainOptions(queue="start", worker="3", until_empty=True)) == 0
    (run,) = machine.queue.runs()
    assert run.state == "failed"
    assert run.error == (
        "ranks.shard or ranks.context needs 2 GPUs, and this worker has 1; start one with --queue "
        "start --worker 0,1"
    )


def test_a_run_outlives_its_worker_and_is_not_started_twice(machine: Machine) -> None:
    machine.add("a", "b")
    first = machine.worker()
    until(lambda: machine.begun() == ["a"], "the first run begins")
    first.kill()
    first.join()
    assert "running alone" in machine.call("--queue", "list").out
    machine.let_end("b")
    status_of(machine.worker("--worker", "1", "--until-empty"))
    assert machine.begun() == ["a", "b"], "another GPU's worker leaves it where it is"
    second = machine.worker("--until-empty")
    machine.let_end("a")
    assert status_of(second) == 0
    # The command is called again, and says whether the run is complete.
    assert [words[:2] for words in machine.events if words[1] == "a"] == [
        ["begin", "a"], ["end", "a"], ["begin", "a"], ["end", "a"],
    ]  # fmt: skip
    assert set(machine.states().values()) == {"complete"}


def test_a_run_that_ended_with_its_worker_is_taken_again_by_any(machine: Machine) -> None:
    machine.add("a")
    first = machine.worker()
    until(lambda: machine.begun() == ["a"], "the run begins")
    first.kill()
    first.join()
    os.kill(machine.pid("a"), signal.SIGKILL)
    until(lambda: not is_locked(machine.folder / "a"), "its lock goes with it")
    assert "waiting" in machine.call("--queue", "list").out
    assert machine.queue.move(str(machine.folder / "a"), 1) == 1
    machine.let_end("a")
    assert status_of(machine.worker("--worker", "7", "--until-empty")) == 0
    assert machine.states() == {"a": "complete"} and machine.events[-2][2] == "7"


def test_a_killed_run_is_tried_again_and_fails_if_it_gets_no_further(machine: Machine) -> None:
    machine.add("a", "b")
    machine.let_end("b")
    worker = machine.worker("--until-empty")
    for number in (1, 2):
        until(lambda number=number: len(machine.begun()) == number, "it begins")  # type: ignore[misc]
        if number == 2:  # it came further than the first time
            (machine.folder / "a" / "state" / "step-000002").mkdir(parents=True)
        os.kill(machine.pid("a"), signal.SIGKILL)
    until(lambda: len(machine.begun()) == 3, "it is tried again")
    os.kill(machine.pid("a"), signal.SIGKILL)
    assert status_of(worker) == 0
    assert machine.begun() == ["a", "a", "a", "b"]
    assert machine.states() == {"a": "failed", "b": "complete"}
    assert "killed by signal 9 2 times without a save" in machine.queue.runs()[0].error


@pytest.mark.parametrize("way", ["stop", "signal"])
def test_a_worker_that_is_stopped_has_its_run_saved_and_continued_later(
    machine: Machine, way: str
) -> None:
    machine.add("a", "b")
    worker = machine.worker()
    until(lambda: machine.begun() == ["a"], "the first run begins")
    if way == "stop":
        assert machine.call("--queue", "stop", "--worker", "0").status == 0
    else:
        worker.terminate()
    assert status_of(worker) == (0 if way == "stop" else 130)
    assert machine.states() == {"a": "waiting", "b": "waiting"}
    assert (machine.folder / "a" / "state" / "step-000001").is_dir()
    machine.let_end("a", "b")
    assert status_of(machine.worker("--until-empty")) == 0
    assert machine.begun() == ["a", "a", "b"]


def test_a_worker_finishes_its_run_if_it_is_asked_so(machine: Machine) -> None:
    machine.add("a", "b")
    worker = machine.worker()
    until(lambda: machine.begun() == ["a"], "the first run begins")
    assert machine.call("--queue", "finish").status == 0
    machine.let_end("a")
    assert status_of(worker) == 0
    assert machine.states() == {"a": "complete", "b": "waiting"}


def test_a_run_that_is_told_to_stop_makes_room_for_the_next(machine: Machine) -> None:
    machine.add("a", "b")
    machine.let_end("b")
    worker = machine.worker("--until-empty")
    until(lambda: machine.begun() == ["a"], "the first run begins")
    (machine.folder / "a" / "requests").mkdir()
    (machine.folder / "a" / "requests" / "stop").touch()
    assert status_of(worker) == 0
    assert machine.states() == {"a": "stopped", "b": "complete"}


def test_a_detached_worker_outlives_the_command_that_started_it(machine: Machine) -> None:
    machine.add("a")
    command, out = machine.process("--queue", "start", "--detach")
    assert status_of(command) == 0 and "works in the background" in out.read_text()
    until(lambda: machine.begun() == ["a"], "the run begins")
    owner = (machine.queue.worker_folder("0") / ".owner").read_text(encoding="utf-8")
    assert os.getsid(int(owner.split()[1])) != os.getsid(0), "a logout does not end its session"
    again = machine.call("--queue", "start", "--detach")
    assert again.status == 1 and "GPU 0 has a worker already" in one_line(again.err)
    machine.let_end("a")
    until(lambda: machine.states() == {"a": "complete"}, "the run ends")
    assert machine.call("--queue", "stop").status == 0
    until(lambda: not machine.queue.workers(), "the worker ends")


def test_a_run_is_added_as_its_own_command(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(machine.folder)
    monkeypatch.setattr(sys, "argv", ["toy-train.py"])
    for name in ("a", "b", "c"):
        assert world.train(name, 3, "--queue", "add", f"--position={1 if name == 'c' else 9}") == 0
    assert "waits at position 1" in capsys.readouterr().out
    assert [*machine.states()] == ["c", "a", "b"] and not (machine.folder / "a").exists()
    run = machine.queue.runs()[0]
    assert run.command[:2] == (sys.executable, str(machine.folder / "toy-train.py"))
    assert run.steps == 3 and run.cwd == str(machine.folder)
    assert not {"--queue", "add", "--position=1"} & {*run.command}
    assert world.train("b", 3, "--queue", "move", "--position", "1") == 0
    assert [*machine.states()] == ["b", "c", "a"]
    assert world.train("c", 3, "--queue", "remove") == 0
    assert [*machine.states()] == ["b", "a"]
    text = (machine.queue.folder / "queue.json").read_text(encoding="utf-8")
    assert [Path(entry["run"]).name for entry in json.loads(text)["runs"]] == ["b", "a"]


def test_what_the_queue_cannot_do_is_one_line(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(machine.folder)
    monkeypatch.setattr(sys, "argv", ["toy-train.py"])

    def refusal(*flags: str) -> str:
        capsys.readouterr()
        assert world.train("a", 3, *flags) in (1, 2)
        return one_line(capsys.readouterr().err)

    assert "is not in the queue; --queue list" in refusal("--queue", "move", "--position", "1")
    assert "is not in the queue; --queue list" in refusal("--queue", "remove")
    assert refusal("--queue", "lst").endswith('not "lst"; did you mean list?')
    assert "--position is a place in the queue" in refusal("--position", "2")
    assert refusal("--queue", "add", "--position", "0").endswith("0 must be at least 1")
    assert "is for no single run" in refusal("--queue", "list")
    assert "--queue and --plan" in refusal("--queue", "add", "--plan")
    for worker in ("../0", "cpu", "x", "00", "0,cpu"):  # the last would train on no GPU at all
        assert "must be indices of GPUs" in refusal("--queue", "start", "--worker", worker)
    assert "clips2 does not exist" in refusal("--queue", "add", "--data.folder", "clips2")
    assert machine.call("--queue", "start", "--print-config").status == 0
    assert not machine.queue.runs() and not [*machine.queue.folder.glob("worker-*")]
    assert world.train("a", 3, "--queue", "add") == 0
    assert "is in the queue already: it is waiting" in refusal("--queue", "add")
    (machine.queue.folder / "queue.json").write_text("[", encoding="utf-8")
    assert "queue.json is damaged" in refusal("--queue", "add")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_runs_survive_kills_of_worker_and_run_bitwise(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run is killed in its middle, then the worker, then the run that it had left."""
    world = World(machine.folder)
    flags = ("--save.every_steps", "1", "--sample.captions", "0", "--optim.lr", "0.01")
    assert world.train("plain/a", 4, *flags) == 0 and world.train("plain/b", 4, *flags) == 0
    mark = ("--run.on_end", json.dumps([sys.executable, "-c", "open('ended','a').write('x')"]))
    machine.folder.joinpath("hold").touch()
    for name in ("a", "b"):
        words = ("--run.folder", name, "--train.steps", "4", *flags, *mark, "--queue", "add")
        assert machine.call(*world.common, *words).status == 0
    worker = machine.worker()

    def pid(name: str) -> int:
        owner = (machine.folder / name / ".owner").read_text(encoding="utf-8")
        return int(owner.split()[1])

    def has_save(name: str) -> bool:
        return any((machine.folder / name / "state").glob("step-*"))

    until(lambda: has_save("a"), "the first run saves")
    os.kill(pid("a"), signal.SIGKILL)
    until(lambda: machine.queue.runs()[0].kills == 1, "the worker sees it")
    machine.folder.joinpath("hold").unlink()
    until(lambda: machine.states()["a"] == "complete", "it is continued")
    machine.folder.joinpath("hold").touch()
    until(lambda: has_save("b"), "the second run saves")
    worker.kill()
    worker.join()
    os.kill(pid("b"), signal.SIGKILL)
    machine.folder.joinpath("hold").unlink()
    assert status_of(machine.worker("--until-empty")) == 0
    assert machine.states() == {"a": "complete", "b": "complete"}
    assert (machine.folder / "ended").read_text() == "xx", "run.on_end is called for both"
    for name in ("a", "b"):
        exported = load_file(machine.folder / name / "exports" / f"{name}.safetensors")
        assert equal(exported, world.adapter(f"plain/{name}"))
