"""tools/gpu/gpu_truth.py without a GPU: how parts are run and reported, the clock of a GPU with
stand-ins."""

import json
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from workspace import ROOT


@pytest.fixture
def truth(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "gpu"))
    import gpu_truth

    return gpu_truth


WORKS = """
import json, os, signal, sys, time
out, name = sys.argv[1:]
def row(**values):
    with open(out, "a") as file:
        file.write(json.dumps({"part": name, **values}) + "\\n")
row(name="first", ok=True, value=1.5)
if name == "wrong":
    row(name="second", ok=False)
if name == "broken":
    with open(out, "a") as file:
        file.write('{"part": "bro')
    raise SystemExit("it broke\\nfor a reason")
if name == "crashing":
    os.kill(os.getpid(), signal.SIGSEGV)
if name == "lacking":
    print("Traceback (most recent call last):\\n  here\\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\\n"
          + "a.py:9: UserWarning: objects leaked\\n  warnings.warn(\\n" * 2, file=sys.stderr)
    sys.exit(1)
if name == "leaving":
    left = os.fork()
    if left:
        row(name="left", value=left)
        os.kill(os.getpid(), signal.SIGKILL)
if name in ("hanging", "leaving"):
    time.sleep(6000)
"""


COPIES = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import gpu_truth
script, out, *names = sys.argv[2:]
seconds = {"hanging": 1}
parts = [gpu_truth.Part(name=name, seconds=seconds.get(name, 200), about="") for name in names]
command = lambda part: [sys.executable, script, out, part.name]
sys.exit(gpu_truth.run(parts, Path(out), 2000, command, copies=True))
"""


@pytest.mark.parametrize("copies", [False, True], ids=["processes", "copies"])
def test_every_part_ends_as_it_did_and_none_takes_another_with_it(truth, tmp_path, capsys, copies):
    out = tmp_path / "rows.jsonl"
    out.write_text(json.dumps({"part": "fine", "name": "of an earlier run", "ok": False}) + "\n")
    names = ("fine", "wrong", "broken", "crashing", "lacking", "hanging", "leaving", "last")
    parts = [
        truth.Part(name=name, seconds=1 if name == "hanging" else 200, about=f"About {name}")
        for name in names
    ]
    script = tmp_path / "works.py"
    script.write_text(WORKS)
    if copies:  # of a process of one thread, which that of a test is not
        start = [sys.executable, "-c", COPIES, str(ROOT / "tools" / "gpu"), str(script), str(out)]
        done = subprocess.run([*start, *names], capture_output=True, text=True, check=False)
        failed, printed = done.returncode, done.stdout
    else:
        failed = truth.run(
            parts, out, 2000, lambda part: [sys.executable, str(script), str(out), part.name]
        )
        printed = capsys.readouterr().out
    ends = {row["part"]: row for row in truth.read(out) if "status" in row}
    assert failed == 6
    assert {name: end["status"] for name, end in ends.items()} == {
        "fine": "ok", "wrong": "failed", "broken": "failed", "crashing": "failed",
        "lacking": "failed",
        "hanging": "failed", "leaving": "failed", "last": "ok",
    }  # fmt: skip
    assert (
        ends["broken"]["error"] == "for a reason (status 1)"
        and ends["hanging"]["error"] == "ended after 1 s"
    )
    assert ends["crashing"]["error"] == "(ended by SIGSEGV)"
    killed = "(ended by SIGKILL, as the system does where the machine's memory runs out)"
    lacking = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. (status 1)"
    assert (ends["leaving"]["error"], ends["lacking"]["error"]) == (killed, lacking)
    assert ends["leaving"]["seconds"] < 100, "what a part leaves behind is not waited for"
    (left,) = (row["value"] for row in truth.read(out) if row.get("name") == "left")
    assert not _runs(left), "it would keep memory of the GPU"
    warned = [
        (row["part"], row["value"]) for row in truth.read(out) if row.get("name") == "warning"
    ]
    assert warned == [("lacking", "UserWarning: objects leaked")]
    there = {row["part"] for row in truth.read(out) if row.get("name") == "first"}
    assert there >= {"fine", "wrong", "broken", "crashing", "leaving", "last"}, (
        "a part's rows are there however it ended"
    )
    assert printed.count("failed") == 6
    table = truth.tables(truth.read(out)[1:], parts)
    assert f": {lacking}" in table and f": {killed}" in table
    assert (
        "## wrong: failed" in table
        and "| first | yes | 1.5 |" in table
        and "| second | **no** |  |" in table
    )


def _runs(process: int) -> bool:
    """Whether a process runs; one that ended may be there until its new parent asks for its
    status."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_when_the_time_is_up_the_rest_is_skipped_and_a_running_part_ended(truth, tmp_path):
    out = tmp_path / "rows.jsonl"
    parts = [truth.Part(name=name, seconds=5000, about="") for name in ("hanging", "fine")]
    assert (
        truth.run(parts, out, 1, lambda part: [sys.executable, "-c", WORKS, str(out), part.name])
        == 1
    )
    assert [row["status"] for row in truth.read(out) if "status" in row] == ["failed", "skipped"]


WAITS = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from gpu_truth import append, read
out, name = Path(sys.argv[2]), sys.argv[3]
def ended():
    return {row["part"] for row in read(out) if "status" in row}
for number in range(100):
    append(out, {"part": name, "number": number})
if name in ("left", "right"):
    while {row["part"] for row in read(out)} < {"left", "right"}:
        time.sleep(0.02)
elif name == "third":
    assert ended(), "two at most"
elif name == "timed":
    assert ended() == {"left", "right", "third"}, "nothing runs next to what is timed"
"""


def test_parts_without_a_time_run_side_by_side_and_lose_no_row(truth, tmp_path):
    """Two of them wait for each other's rows: one after the other, they would wait until their time
    is up."""
    out, names = tmp_path / "rows.jsonl", ("left", "right", "third", "timed", "alone")
    parts = [
        truth.Part(name=name, seconds=100, about="", is_timed=name in ("timed", "alone"))
        for name in names
    ]
    assert [len(batch) for batch in truth.batches(parts)] == [3, 1, 1]

    def command(part: Any) -> list[str]:
        return [sys.executable, "-c", WAITS, str(ROOT / "tools" / "gpu"), str(out), part.name]

    assert truth.run(parts, out, 2000, command, side_by_side=2) == 0
    rows = truth.read(out)
    assert {
        name: sum("number" in row for row in rows if row["part"] == name) for name in names
    } == dict.fromkeys(names, 100)
    assert len(out.read_text().splitlines()) == 5 * 101


AHEAD = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from gpu_truth import append, read
out, name = Path(sys.argv[2]), sys.argv[3]
append(out, {"part": name, "name": "imported"})
sys.stdin.readline()
append(out, {"part": name, "name": "began"})
if name == "second":  # waits for the next part's imports, which are done although it has not begun
    while not any(row["part"] == "third" for row in read(out)):
        pass
"""


def test_the_next_part_imports_while_one_runs_and_begins_afterwards(truth, tmp_path):
    out, names = tmp_path / "rows.jsonl", ("first", "second", "third", "last")
    parts = [truth.Part(name=name, seconds=100, about="") for name in names]

    def command(part: Any) -> list[str]:
        return [sys.executable, "-c", AHEAD, str(ROOT / "tools" / "gpu"), str(out), part.name]

    assert truth.run(parts, out, 2000, command, waits=True) == 0
    events = [(row["part"], row.get("name", "ended")) for row in truth.read(out)]
    for before, after in pairwise(names):
        assert events.index((before, "ended")) < events.index((after, "began"))
    assert events.index(("third", "imported")) < events.index(("second", "ended"))


def test_a_part_that_never_begins_ends_with_the_run(truth, tmp_path):
    """Its process waits for its turn when the time is up."""
    out = tmp_path / "rows.jsonl"
    parts = [truth.Part(name=name, seconds=1, about="") for name in ("hanging", "fine")]
    code = f"import os, time; print(os.getpid(), file=open({str(tmp_path)!r} + '/' + str(os.getpid()), 'w')); time.sleep(6000)"
    assert truth.run(parts, out, 1, lambda part: [sys.executable, "-c", code], waits=True) == 1
    assert [row["status"] for row in truth.read(out)] == ["failed", "skipped"]
    assert not any(_runs(int(file.name)) for file in tmp_path.iterdir() if file.name.isdigit())


def test_parts_are_commanded_as_they_run_and_need(truth, monkeypatch, tmp_path):
    """A part that runs next to others knows it; `--tiny` leaves out what another part runs; a
    trainer's part needs its checkout."""
    commands: dict[str, list[str]] = {}

    def noted(parts: Any, out: Path, wall: float, command: Any, *given: Any, **named: Any) -> int:
        commands.clear()
        commands.update({part.name: command(part) for part in parts})
        return 0

    monkeypatch.setattr(truth, "run", noted)
    handler, out = signal.getsignal(signal.SIGTERM), tmp_path / "rows.jsonl"
    try:
        truth.main(
            ["--out", str(out), "--side-by-side", "4", "--musubi", "here", "--commit", "1234"]
        )
        assert list(commands) == [part.name for part in truth.PARTS if part.name != "diffsynth"]
        shared = {name for name, command in commands.items() if "--shared" in command}
        assert shared == {part.name for part in truth.PARTS if not part.is_timed}
        assert (
            commands["musubi"][-2:] == ["--checkout", "here"]
            and "--checkout" not in commands["facts"]
        )
        run, skipped = truth.read(out)
        assert (run["part"], run["name"]) == ("run", "commit 1234")
        assert skipped == {
            "part": "diffsynth",
            "status": "skipped",
            "error": "--diffsynth names no checkout",
        }
        truth.main(["--out", str(out), "--only", "speed", "facts"])
        assert list(commands) == ["speed", "facts"], "in the order that is asked for"
        assert all("--wait" in command for command in commands.values())
        truth.main(["--out", str(out), "--side-by-side", "1", "--tiny"])
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert not any("--shared" in command for command in commands.values())
    tiny = {part.name for part in truth.PARTS if part.is_in_tiny}
    assert set(commands) == tiny - set(truth.PEERS) and len(tiny) < len(truth.PARTS)


def test_without_a_device_nothing_else_runs_and_a_part_without_rows_has_failed(truth, tmp_path):
    out = tmp_path / "rows.jsonl"
    code = {
        "silent": "pass",
        "lacking": f"raise SystemExit({truth.NO_DEVICE})",
        "fine": "raise AssertionError",
    }
    parts = [truth.Part(name=name, seconds=200, about="") for name in code]
    assert truth.run(parts, out, 2000, lambda part: [sys.executable, "-c", code[part.name]]) == 2
    assert [(row["status"], row["error"]) for row in truth.read(out)] == [
        ("failed", "it measured nothing"), ("failed", f"(status {truth.NO_DEVICE})"), ("skipped",
        "no device"),
    ]  # fmt: skip


def test_a_part_says_that_there_is_no_such_device(truth, tmp_path, capsys):
    import gpu_parts

    given = ["facts", "--device", "cuda:99", "--out", str(tmp_path / "rows.jsonl")]
    assert gpu_parts.main(given) == truth.NO_DEVICE
    assert "UserError: --device = 'cuda:99'" in capsys.readouterr().err
    assert sorted(gpu_parts.PARTS) == sorted(part.name for part in truth.PARTS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_measured_is_shown_after_an_interruption_and_the_part_ends(
    truth, tmp_path, monkeypatch, capsys, number
):
    out, handler = tmp_path / "rows.jsonl", signal.getsignal(signal.SIGTERM)
    run = truth.run

    def interrupted(parts: Any, out: Path, *given: Any, **named: Any) -> int:
        hanging = (
            f"import sys, time, os; sys.argv[1:] = [{str(out)!r}, 'facts']\n"
            + INTERRUPTS.format(number=number)
        )
        return int(run(parts, out, 2000, lambda part: [sys.executable, "-c", hanging]))

    monkeypatch.setattr(truth, "run", interrupted)
    try:
        assert truth.main(["--out", str(out)]) == 130
    finally:
        signal.signal(signal.SIGTERM, handler)
    (process,) = (row["value"] for row in truth.read(out) if row.get("name") == "process")
    assert not _runs(process), "it would keep memory of the GPU"
    assert f"| process | {process} |" in capsys.readouterr().out


INTERRUPTS = """
import json
with open(sys.argv[1], "a") as file:
    file.write(json.dumps({{"part": "facts", "name": "process", "value": os.getpid()}}) + "\\n")
os.kill(os.getppid(), {number})
time.sleep(6000)
"""


def test_on_a_gpu_a_plan_has_the_workspaces_that_torch_allocates(truth, monkeypatch):
    import torch

    import plan_truth
    from ditkit_core.planner import memory, profiler

    budgets: list[Any] = []
    monkeypatch.setattr(profiler, "profile", lambda job: SimpleNamespace(blocks=[]))
    monkeypatch.setattr(
        memory,
        "compose",
        lambda made, partition, given: budgets.extend(given) or [SimpleNamespace(peak=0)],
    )
    for device in ("cpu", "cuda"):
        plan_truth.plan(plan_truth.tiny_cases()[0], torch.device(device))
    assert [budget.workspace for budget in budgets] == [0, memory.CUBLAS_WORKSPACE]


def test_a_plan_whose_case_fails_costs_one_row(truth, monkeypatch, capsys):
    import torch

    import plan_truth

    measured = {"peak": 190 * 2**20, "reserved": 210 * 2**20, "in use": 900 * 2**20}
    answers = iter(
        [
            SimpleNamespace(returncode=1, stderr="Traceback\nCUDA out of memory", stdout=""),
            SimpleNamespace(returncode=0, stderr="", stdout=f"noise\n{json.dumps(measured)}\n"),
        ]
    )
    monkeypatch.setattr(plan_truth.subprocess, "run", lambda *given, **options: next(answers))
    monkeypatch.setattr(plan_truth, "plan", lambda case, device: 200 * 2**20)
    monkeypatch.setattr(plan_truth, "choose_device", lambda name, key: torch.device(name, 0))
    monkeypatch.setattr(sys, "argv", ["plan_truth.py", "--device", "cuda", "--tiny"])
    assert plan_truth.main() == 1
    printed = capsys.readouterr()
    assert (
        "| wan-lora-full-bf16-1024x1 | 200 | - | - | - | - |" in printed.out
        and "CUDA out of memory" in printed.err
    )
    assert (
        "| wan-lora-full-bf16-1024x1-swapped-between 256 | 200 | 190 | 210 | 900 | 1.053 |"
        in printed.out
    )
    names = [case.name for case in plan_truth.grid(torch.device("cuda", 0))]
    assert len(set(names)) == len(names) > 10 and names[0] == "wan-lora-full-bf16-20280x1"


def test_a_plan_for_a_larger_gpu_is_said_and_not_run(truth, monkeypatch):
    import torch

    import gpu_parts

    small, large = gpu_parts.plan_truth.Case(model="wan"), gpu_parts.plan_truth.Case(model="flux2")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300 * 2**20, 2**30))
    monkeypatch.setattr(gpu_parts.plan_truth, "grid", lambda device: [large, small])
    monkeypatch.setattr(
        gpu_parts.plan_truth, "plan", lambda case, device: (400 if case is large else 200) * 2**20
    )
    found = {"peak": 201 * 2**20, "in use": 1000 * 2**20}
    monkeypatch.setattr(
        gpu_parts.plan_truth, "in_own_process", lambda case, device, **variables: found
    )
    first, second = gpu_parts.plan(torch.device("cuda", 0), False)
    assert first == {
        "name": large.name,
        "planned MiB": "400",
        "value": "more than this GPU has free",
    }
    assert second["ok"] and second["measured MiB"] == "201"
    assert second["in use MiB"] == "276", "724 MiB were in use before"
    shared = list(gpu_parts.plan(torch.device("cuda", 0), False, is_shared=True))[1]
    assert shared == {name: value for name, value in second.items() if name != "in use MiB"}


def test_a_case_that_fails_says_why_and_shapes_that_alternate_are_measured_with_both_allocators(
    truth, monkeypatch
):
    import torch

    import gpu_parts

    asked: list[dict[str, str]] = []

    def measured(case: Any, device: Any, **variables: str) -> Any:
        asked.append(variables)
        return (
            {"peak": 2**30, "reserved": 3 * 2**29, "in use": 2**31}
            if variables
            else "CUDA out of memory"
        )

    case = gpu_parts.plan_truth.Case(model="flux2", between=1024)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**33, 2**34))
    monkeypatch.setattr(gpu_parts.plan_truth, "grid", lambda device: [case])
    monkeypatch.setattr(gpu_parts.plan_truth, "plan", lambda case, device: 2**30)
    monkeypatch.setattr(gpu_parts.plan_truth, "in_own_process", measured)
    first, second = gpu_parts.plan(torch.device("cuda", 0), False)
    assert (first["ok"], first["value"]) == (False, "CUDA out of memory")
    assert (
        second["ok"]
        and second["reserved MiB"] == "1,536"
        and "no expandable segments" in second["name"]
    )
    assert asked == [{}, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}]


def test_what_fails_costs_its_own_rows_and_says_why(truth, monkeypatch):
    import torch

    import gpu_parts
    from ditkit_core.engine.engine import BlockEngine

    def no_compiler(*given: Any, **named: Any) -> Any:
        raise RuntimeError("Failed to find C compiler.\nSpecify one via CC")

    ways = {"kernels of Triton": no_compiler, "none": BlockEngine()}
    monkeypatch.setattr(gpu_parts, "_engines", lambda device: ways)
    rows = list(gpu_parts.numbers(torch.device("cpu"), True))
    assert [(row["name"], row["ok"]) for row in rows] == [
        (f"toy {adapter} {way}", way == "none") for adapter in ("full", "lora") for way in ways
    ]
    assert rows[0]["value"] == "RuntimeError: Failed to find C compiler."


def test_a_rate_above_the_published_one_is_a_mistake(truth, monkeypatch):
    import torch

    import device_clock

    seen = SimpleNamespace(name="NVIDIA H200", total_memory=143771 * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: seen)
    gpu = torch.device("cuda", 0)
    found = [
        device_clock.of_published(rate, lambda known: known.memory_bandwidth, gpu)
        for rate in (4e12, 5e12, 1e13)
    ]
    assert [(row["of published"], row["ok"]) for row in found] == [
        ("83%", True),
        ("104%", True),
        ("208%", False),
    ]
    assert device_clock.of_published(1e30, lambda known: 0.0, gpu) == {}, "it has no such products"
    assert (
        device_clock.of_published(1e30, lambda known: known.memory_bandwidth, torch.device("cpu"))
        == {}
    )
    seen.name = "NVIDIA Unheard of"
    assert device_clock.of_published(1e30, lambda known: known.memory_bandwidth, gpu) == {}, (
        "its rates are assumed"
    )


def test_each_test_that_fails_is_a_row_at_once(truth, monkeypatch):
    import torch

    import gpu_parts

    alone = [
        "a.py::test_one[cuda] PASSED                     [ 50%]",
        "a.py::test_two[a word-cuda] FAILED              [100%]",
        "=== short test summary info ===", "FAILED a.py::test_two[a word-cuda] - assert 1 == 2",
        "=== 1 failed, 1 passed in 3s ===",
    ]  # fmt: skip
    shared = [
        "[gw1] [ 50%] ERROR b.py::test[a word] ",
        "[gw0] [100%] PASSED b.py::test[none] ",
        "=== 1 passed, 1 error in 2s ===",
    ]
    asked: list[str] = []

    class Run:
        returncode = 1

        def __init__(self, command: list[str], **options: Any):
            asked.append(" ".join(command))
            self.stdout = shared if "packages" in command else alone

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(gpu_parts.subprocess, "Popen", Run)
    rows = [
        {**row, "name": row["name"].partition(" -n")[0]}
        for row in gpu_parts.tests(torch.device("cuda", 0), False)
    ]
    assert rows == [
        {"name": "a.py::test_two[a word-cuda]", "ok": False},
        {"name": "a.py::test_two[a word-cuda]", "value": "assert 1 == 2"},
        {"name": "pytest", "value": alone[-1], "ok": False},
        {"name": "b.py::test[a word]", "ok": False},
        {"name": "pytest", "value": shared[-1], "ok": False},
    ]
    # Tests that measure memory must not share the GPU; and one failure hides no other.
    assert " -n 0 -k not trains_as_the_cpu_does " in asked[0] and all(
        " -m gpu " in each for each in asked
    )
    assert not any(" -x" in each for each in asked)
