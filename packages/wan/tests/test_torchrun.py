"""The train command started by torchrun: the demo on two ranks, killed and not, and what is printed
when it cannot work."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ditkit_core.commands import cli
from ditkit_core.testing.conformance_two_devices import TwoDevicesConformance
from ditkit_core.testing.ranks import process_of_rank
from ditkit_core.testing.scripts import output_of
from ditkit_wan.spec import WAN

STEPS, SAVED = 16, 2
SHORT = [
    "--train.steps",
    str(STEPS),
    "--save.every_steps",
    str(SAVED),
    "--save.keep_last",
    "99",
    "--sample.every_steps",
    "0",
]
SHORT += [
    "--sample.prompts",
    "[]",
    "--held_out.clips",
    "3",
    "--held_out.every_steps",
    str(STEPS),
    "--log.tensorboard",
    "false",
]
ON_RANKS = Path(__file__).parents[3] / "shared" / "tests" / "support" / "program_on_ranks.py"
ON_CPU = ["--train.device", "cpu", "--encode.device", "cpu"]


def torchrun(*arguments: str, restarts: int = 0) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        port,
    ]
    return [*start, "--max-restarts", str(restarts), "-m", "ditkit_wan.train", *arguments]


def index(run: Path) -> object:
    return json.loads((run / "state" / f"step-{STEPS:06d}" / "state.json").read_text())


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process."""
    run = tmp_path_factory.mktemp("alone") / "run"
    assert cli.run(WAN, "train", ["--demo", "--run.folder", str(run), *SHORT, *ON_CPU]) == 0
    return run


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_train_what_one_process_trains(alone, tmp_path):
    """Forked by torchrun's agent, which takes a third of the time of its command. That starts two
    ranks in the cases below, and of a recipe in `commands/test_recipe.py`."""
    run, program = tmp_path / "run", tmp_path / "program.py"
    arguments = ["--demo", "--run.folder", str(run), *SHORT, *ON_CPU]
    program.write_text(
        f"import sys\nfrom ditkit_wan.cli import train\nsys.argv[1:] = {arguments}\n"
        "sys.exit(train())\n"
    )
    imported = ("ditkit_wan", "transformers", "diffusers")
    printed = output_of(ON_RANKS, str(tmp_path), str(program), *imported)
    assert index(run) == index(alone)
    assert len(re.findall(r"^\[4/5\] train$", printed, re.MULTILINE)) == 1, "rank 0 alone prints"
    assert "verified: diffusers loads" in printed
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(line["sent_bytes"] > 0 <= line["wait_seconds"] for line in lines if "loss" in line)


@pytest.mark.exhaustive
def test_two_ranks_share_the_tokens_of_each_clip_and_one_process_goes_on(alone, tmp_path):
    run = tmp_path / "run"
    command = torchrun("--demo", "--run.folder", str(run), *SHORT, *ON_CPU, "--ranks.context", "2")
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "verified: diffusers loads" in done.stdout
    expected, found = losses(alone), losses(run)
    assert len(expected) == len(found) >= STEPS // 5
    assert found == pytest.approx(expected, rel=1e-3)
    more = ["--run", str(run), "--train.steps", str(STEPS + 1), "--ranks.context", "1"]
    assert cli.run(WAN, "train", more) == 0
    assert (
        losses(run)[: len(found)] == found
        and (run / "state" / f"step-{STEPS + 1:06d}" / "state.json").exists()
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["lora", "full"])
def test_two_ranks_divide_the_weights_and_one_process_goes_on(tmp_path, method):
    """Exports need weights whole: rank 0 has them only with the help of rank 1. Samples need both
    ranks in each block."""
    run, steps = (
        tmp_path / "run",
        ["--train.steps", "4", "--save.every_steps", "2", "--held_out.every_steps", "4"],
    )
    given = [
        *SHORT,
        *ON_CPU,
        "--adapter.method",
        method,
        "--optim.lr",
        "0.001",
        *steps,
        "--train.threads",
        "1",
    ]
    given += [
        "--sample.prompts",
        '["a bar that moves"]',
        "--sample.every_steps",
        "2",
        "--sample.steps",
        "2",
    ]
    command = torchrun("--demo", "--run.folder", str(run), *given, "--ranks.shard", "2")
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    parts = [path.name for path in (run / "state" / "step-000004").glob("shard-*")]
    assert len(parts) == (2 if method == "full" else 0)
    assert {path.name[:11] for path in (run / "samples").iterdir()} >= {
        "step-000002",
        "step-000004",
    }
    assert len(list((run / "exports").rglob("*.safetensors"))) >= 2, (
        "of the save and of the finished run"
    )
    # diffusers has each of them, though no rank has the model.
    exports = "run.safetensors" if method == "lora" else "exports/transformer_official"
    assert f"verified: diffusers loads {exports}" in done.stdout
    results = json.loads((run / "verified.json").read_text())
    assert len(results) == (3 if method == "lora" else 2) and all(
        each["agrees"] for each in results.values()
    )
    more = ["--run", str(run), "--train.steps", "5", "--ranks.shard", "1"]
    assert cli.run(WAN, "train", more) == 0
    assert (run / "state" / "step-000005" / "trainable.safetensors").exists()


IN_PROC = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds ranks by their environment in /proc"
)


@contextmanager
def started(tmp_path, *arguments, restarts=0):
    """The demo on two ranks, once it has saved three times; with the process of rank 1."""
    run = tmp_path / "run"
    with (tmp_path / "log").open("w") as log:
        command = torchrun(
            "--demo", "--run.folder", str(run), *SHORT, *ON_CPU, *arguments, restarts=restarts
        )
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + 200
            while not (run / "state" / f"step-{3 * SAVED:06d}").exists() and process.poll() is None:
                assert time.monotonic() < end
                time.sleep(0.01)
            rank = process_of_rank(1, process.pid)
            assert rank is not None
            yield process, rank
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.exhaustive
@IN_PROC
def test_a_killed_rank_changes_no_bit_if_torchrun_starts_again(alone, tmp_path):
    with started(tmp_path, restarts=1) as (process, rank):
        os.kill(rank, signal.SIGKILL)
        status = process.wait(200)
    log = (tmp_path / "log").read_text()
    assert status == 0, log[-3000:]
    assert "exitcode: -9" in log
    (line,) = (line for line in log.splitlines() if line.startswith("error: "))
    assert re.match(
        r"error: rank 1 of 2 on \S+ in step \d+: it was killed or crashed \(.*continues from the "
        r"last save$",
        line,
    )
    assert index(tmp_path / "run") == index(alone)


@pytest.mark.exhaustive
@IN_PROC
def test_a_signal_to_one_rank_ends_all_with_a_save(tmp_path):
    with started(tmp_path, "--save.every_steps", "3") as (process, rank):
        before = {path.name for path in (tmp_path / "run" / "state").iterdir()}
        os.kill(rank, signal.SIGTERM)
        process.wait(100)
    log = (tmp_path / "log").read_text()
    (stopped,) = re.findall(r"^stopped at step (\d+), saved in", log, re.MULTILINE)
    assert (
        before and (tmp_path / "run" / "state" / f"step-{int(stopped):06d}" / "state.json").exists()
    )
    assert "error: " not in log


@pytest.mark.exhaustive
@IN_PROC
def test_a_rank_that_stops_is_named_and_ends_the_run(tmp_path):
    """The other rank ends within the timeout and ten seconds, and ends the stopped one, which
    torchrun would wait half a minute for."""
    with started(tmp_path, "--ranks.timeout", "3") as (process, rank):
        os.kill(rank, signal.SIGSTOP)
        end = time.monotonic() + 3 + 10
        try:
            while any(process_of_rank(each, process.pid) is not None for each in range(2)):
                assert time.monotonic() < end
                time.sleep(0.05)
            assert process.wait(100) == 1
        finally:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
    log = (tmp_path / "log").read_text()
    (line,) = (line for line in log.splitlines() if line.startswith("error: "))
    assert re.match(r"error: rank 1 of 2 on \S+ in step \d+: no heartbeat for 3 s", line)
    assert log.count(f"traceback : {line.removeprefix('error: ')}\n") == 2, "of both ranks"
    assert "Unable to shutdown process" not in log


@pytest.mark.exhaustive
def test_a_mistake_is_one_line_of_one_rank_and_in_the_summary(tmp_path):
    command = torchrun(
        "--demo", "--run.folder", str(tmp_path / "run"), "--train.accumulation", "1", *ON_CPU
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert re.match(
        r"error: rank [01] of 2 on \S+: train.accumulation = 1 makes 1 micro-batch a step in all, "
        r"too few",
        line,
    )
    assert "set train.accumulation to 2" in line
    assert f"traceback : {line.removeprefix('error: ')}\n" in done.stderr and done.returncode == 1
    assert "UserError" not in done.stderr and "NoneType" not in done.stderr
    assert not (tmp_path / "run" / "state").exists()


class TestTwoDevices(TwoDevicesConformance):
    module = "ditkit_wan.train"
