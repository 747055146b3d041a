"""Everything that only a GPU can show, in fourteen minutes: one command for the first GPU at hand.

    # all parts, at most 840 seconds
    uv run tools/gpu/gpu_truth.py
    # some of them
    uv run tools/gpu/gpu_truth.py --only bitwise plan
    # with steps of these trainers, from checkouts of them
    uv run tools/gpu/gpu_truth.py --musubi DIR --diffsynth DIR
    # whether everything in it runs, without a GPU: its numbers are worth nothing
    uv run tools/gpu/gpu_truth.py --device cpu --tiny

Parts run in order of worth (`tools/gpu/gpu_parts.py`), each in a process of its own with a time
limit, so that a crash or a hang loses one part; without a GPU these are copies (`fork`) of one that
has imported what they import. Those that measure no time run side by side, as many as the processor
has cores for. Within a part, what fails costs its own rows. Results are
appended at once to a file of JSON lines; the profiler's traces of timed steps are next to it. When
the time is up, the parts that are left are skipped. At the end a table in Markdown is printed, also
after Ctrl-C or a termination. The exit status is the number of parts that failed; nothing else runs
if torch cannot use the device.
"""

import argparse
import fcntl
import json
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part, and how long it may take on a GPU."""

    name: str
    seconds: float
    about: str
    is_timed: bool = True
    """Whether it measures time, so that nothing may run next to it."""
    is_in_tiny: bool = True
    """Whether `--tiny` runs it; False where another part runs the same code."""


PARTS = (
    Part(
        name="facts",
        seconds=60,
        about="Versions, precision switches, attention kernels, memory of the context",
    ),
    Part(name="klein4b", seconds=150, about="Steps of FLUX.2 klein 4B, and diffusers'"),
    Part(name="wan14b", seconds=150, about="Steps of Wan 14B, and diffusers'"),
    Part(name="dev", seconds=120, about="Steps of FLUX.2 dev, and diffusers'", is_in_tiny=False),
    Part(name="tests", seconds=240, about="The tests for a GPU", is_timed=False),
    Part(
        name="plan",
        seconds=240,
        about="Plans of levers against allocated and reserved memory",
        is_timed=False,
    ),
    Part(
        name="demos",
        seconds=180,
        about="The demos of Wan and FLUX.2 from files to an adapter, and resumed",
        is_timed=False,
    ),
    Part(
        name="bitwise",
        seconds=180,
        about="Policies, swap and offload against none, with delayed work and copies",
        is_timed=False,
    ),
    Part(
        name="numbers",
        seconds=180,
        about="Gradients against the CPU and fp64, and with our kernels",
        is_timed=False,
    ),
    Part(
        name="quantized",
        seconds=90,
        about="Codes, values and a step of a quantized base",
        is_timed=False,
    ),
    Part(name="musubi", seconds=120, about="Steps of musubi-tuner, from a checkout of it"),
    Part(name="diffsynth", seconds=120, about="Steps of DiffSynth-Studio, from a checkout of it"),
    Part(
        name="computed",
        seconds=30,
        about="Products in 8 bits against the CPU's, and their time against bf16",
    ),
    Part(name="speed", seconds=180, about="A step against diffusers', and where its time goes"),
    Part(
        name="passes",
        seconds=60,
        about="Rates of elementwise work, its cost on the host, and where a step waits",
    ),
    Part(
        name="streaming",
        seconds=60,
        about="Copies of streamed blocks, and the share of them that is hidden",
    ),
    Part(
        name="klein9b",
        seconds=120,
        about="Steps of FLUX.2 klein 9B, and diffusers'",
        is_in_tiny=False,
    ),
    Part(
        name="wan1_3b", seconds=120, about="Steps of a full fine-tune of Wan 1.3B", is_in_tiny=False
    ),
    Part(
        name="klein4b_modes",
        seconds=150,
        about="Steps of FLUX.2 klein 4B in every mode",
        is_in_tiny=False,
    ),
    Part(
        name="dev_modes", seconds=120, about="Steps of FLUX.2 dev in every mode", is_in_tiny=False
    ),
    Part(
        name="seeds",
        seconds=180,
        about="The reports that this project began with, measured natively",
    ),
    Part(
        name="real",
        seconds=180,
        about="A LoRA of blocks of FLUX.2 klein 4B's size, planned, trained and resumed",
    ),
    Part(
        name="backends",
        seconds=150,
        about="Rates of attention backends, and of a VAE in fp32 and TF32",
    ),
)
"""In order of worth; those without a time that follow each other run side by side."""
PEERS = ("musubi", "diffsynth")
"""Parts that need a checkout of another trainer."""
LABELS = ("part", "case", "trainer", "policy", "kernels", "cuda_graphs", "preset")
"""Columns that the name of a row repeats."""
_POLL_SECONDS = 0.05
_LAST_SECONDS = 5.0
_TINY_SECONDS = 1800.0
"""Limit of a part without a GPU, where only a hang shall end it."""
_IMPORTED = (
    "gpu_parts",
    "gpu_runs",
    "peft",
    "transformers.modeling_utils",
    "ditkit_core.planner.profiler",
    "ditkit_flux2.cli",
    "ditkit_flux2.spec",
    "ditkit_wan.cli",
    "ditkit_wan.spec",
)
"""What several parts import, or the commands that they start, in seconds each time."""
NO_DEVICE = 3
"""Exit status of a part that finds no such device: the others would find none either."""


def run(
    parts: Sequence[Part],
    out: Path,
    wall: float,
    command: Callable[[Part], Sequence[str]],
    limit: float = 0.0,
    side_by_side: int = 1,
    *,
    waits: bool = False,
    copies: bool = False,
) -> int:
    """Run parts in order, and append to a file how each ended.

    Args:
        out: The file; the parts append their rows to it themselves.
        wall: Seconds after which no part begins, and the running ones are ended.
        command: The command of a part.
        limit: Seconds for each part in place of its own.
        side_by_side: Most parts without a time that run at once.
        waits: Whether the commands wait for a line from here before they use the device: the next
            one then imports while a part runs.
        copies: Whether a part is a copy of this process, which runs the script that its command
            names; such a one does not wait.

    Returns:
        The number of parts that failed. One that was skipped has not.
    """
    end, failed, lacking = time.monotonic() + wall, 0, ""
    following, running, ahead = deque(batches(parts)), list[_Process](), dict[str, _Process]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            while following:
                waiting = deque(following.popleft())
                while waiting or running:
                    left = end - time.monotonic()
                    while waiting and len(running) < side_by_side:
                        part = waiting.popleft()
                        process = ahead.pop(part.name, None)
                        if left <= 0 or lacking:
                            append(
                                out,
                                {
                                    "part": part.name,
                                    "status": "skipped",
                                    "error": lacking or "no time left",
                                },
                            )
                            if process is not None:
                                process.kill()
                            continue
                        process = process or _Process(
                            part, command(part), out, Path(folder) / part.name, copies
                        )
                        process.start(min(limit or part.seconds, left))
                        running.append(process)
                    if waits and running and following and not (waiting or ahead):
                        part = following[0][0]
                        ahead[part.name] = _Process(
                            part, command(part), out, Path(folder) / part.name
                        )
                    for process in [process for process in running if process.is_over()]:
                        running.remove(process)
                        status, code = process.noted()
                        failed += status != "ok"
                        lacking = "no device" if code == NO_DEVICE else lacking
                    time.sleep(_POLL_SECONDS if running else 0)
        finally:
            for process in (*running, *ahead.values()):
                process.kill()
    return failed


def batches(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """The parts that may run at once, in order."""
    for is_timed, group in groupby(parts, key=lambda part: part.is_timed):
        batch = list(group)
        yield from ([part] for part in batch) if is_timed else [batch]


class _Process:
    """The process of a part, which may wait until it is started."""

    def __init__(
        self,
        part: Part,
        command: Sequence[str],
        out: Path,
        messages: Path,
        is_copy: bool = False,
    ):
        self.part, self.out, self.messages = part, out, messages
        self.before, self.begin, self.seconds, self.limit = (
            len(read(out)),
            time.monotonic(),
            0.0,
            0.0,
        )
        self.child: subprocess.Popen[bytes] | _Copy
        if is_copy:
            self.child = _Copy(command, messages)
            return
        # A file and not a pipe, which a compiler's workers keep open after the process is gone.
        with messages.open("wb") as stderr:
            self.child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )

    def start(self, limit: float) -> None:
        """Let it begin, for a number of seconds."""
        self.limit, self.begin = limit, time.monotonic()
        if self.child.stdin is not None:
            with suppress(BrokenPipeError), self.child.stdin as stdin:  # it may have ended
                stdin.write(b"\n")

    def is_over(self) -> bool:
        """Whether it ended, or its time is up."""
        self.seconds = time.monotonic() - self.begin
        return self.child.poll() is not None or self.seconds >= self.limit

    def kill(self) -> None:
        """End it with the processes that it started, however it ended itself: they would keep
        memory of the GPU from the next part."""
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        if self.child.stdin is not None:
            self.child.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # a process may hang inside of a driver
            self.child.wait(_LAST_SECONDS)

    def noted(self) -> tuple[str, int | None]:
        """Append how it ended; its status, and its exit status, None if its time was up."""
        code = self.child.poll()
        self.kill()
        lines = self.messages.read_text(encoding="utf-8", errors="replace")
        error = (
            f"ended after {self.limit:.0f} s"
            if code is None
            else f"{_reason(lines)} ({_code(code)})".lstrip()
            if code
            else ""
        )
        rows = [row for row in read(self.out)[self.before :] if row.get("part") == self.part.name]
        if not (rows or error):
            error = "it measured nothing"
        status = "failed" if error or any(row.get("ok") is False for row in rows) else "ok"
        for line in _warnings(lines):
            append(self.out, {"part": self.part.name, "name": "warning", "value": line})
        append(
            self.out,
            {"part": self.part.name, "status": status, "seconds": self.seconds, "error": error},
        )
        print(f"{self.part.name}: {status} in {self.seconds:.0f} s {error}".rstrip(), flush=True)
        return status, code


class _Copy:
    """A copy (`fork`) of this process, which has imported what parts import; what `_Process` asks
    of a `Popen`."""

    stdin = None

    def __init__(self, command: Sequence[str], messages: Path):
        self._process: BaseProcess = multiprocessing.get_context("fork").Process(
            target=_run_script, args=(command[1:], messages)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        with suppress(OSError):  # also here: it may be killed before it does so itself
            os.setpgid(self.pid, self.pid)

    def poll(self) -> int | None:
        """As that of `Popen`."""
        return self._process.exitcode

    def wait(self, timeout: float) -> None:
        """As that of `Popen`, but that it raises nothing."""
        self._process.join(timeout)


def _run_script(command: Sequence[str], messages: Path) -> None:
    """In the copy: a script with its arguments, as Python would run it."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for stream, path in ((1, os.devnull), (2, messages)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    sys.argv = list(command)
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


def _warnings(said: str) -> list[str]:
    """What Python warned of, each once: torch and Triton warn on a GPU of what no CPU shows."""
    found = re.findall(r"^\S+:\d+: (\w*Warning: .+)$", said, re.MULTILINE)
    return [line[:200] for line in dict.fromkeys(found)]


def _reason(said: str) -> str:
    """The last exception in what a process wrote: libraries warn after it, while the process ends.
    Or else the last line."""
    lines = said.strip().splitlines()
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
    return (errors or lines or [""])[-1]


def _code(code: int) -> str:
    if code >= 0:
        return f"status {code}"
    cause = (
        ", as the system does where the machine's memory runs out"
        if code == -signal.SIGKILL
        else ""
    )
    return f"ended by {signal.Signals(-code).name}{cause}"


def append(out: Path, row: Row) -> None:
    """Append a row, on a line of its own whatever a process that was ended left in the last one;
    several processes may."""
    with out.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        torn = file.read() not in (b"", b"\n")
        file.write((("\n" if torn else "") + json.dumps(row) + "\n").encode())


def read(out: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last line that a killed part left incomplete is skipped."""
    rows = []
    for line in out.read_text(encoding="utf-8").splitlines() if out.exists() else ():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def tables(rows: Sequence[Row], parts: Sequence[Part]) -> str:
    """All rows in Markdown, a table for each part."""
    return "\n".join(
        line
        for part in parts
        for line in _table(part, [row for row in rows if row["part"] == part.name])
    )


def _table(part: Part, rows: Sequence[Row]) -> Iterator[str]:
    ends = [row for row in rows if "status" in row]
    found = [row for row in rows if "status" not in row]
    end = ends[-1] if ends else {"status": "not run"}
    took = f" in {end['seconds']:.0f} s" if "seconds" in end else ""
    error = f": {end['error']}" if end.get("error") else ""
    yield from (f"## {part.name}: {end['status']}{took}{error}", "", f"{part.about}.", "")
    columns = list(dict.fromkeys(name for row in found for name in row if name not in LABELS))
    if found:
        yield f"| {' | '.join(columns)} |"
        yield f"|{'---|' * len(columns)}"
        yield from (
            f"| {' | '.join(_cell(row.get(name, '')) for name in columns)} |" for row in found
        )
        yield ""


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def _commit() -> str:
    """The commit of the sources; an archive of them has none."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="small models: a look at whether everything runs"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[part.name for part in PARTS],
        help="some parts, in this order; default: all",
    )
    parser.add_argument(
        "--wall",
        type=float,
        default=0.0,
        help="seconds for everything; default: 840, without limit if tiny",
    )
    parser.add_argument(
        "--side-by-side", type=int, default=max(1, len(os.sched_getaffinity(0)) // 3), metavar="N",
        help="most parts without a time that run at once; default: one for three cores",
    )  # fmt: skip
    parser.add_argument(
        "--musubi", type=Path, metavar="DIR", help="a checkout of musubi-tuner, for the part musubi"
    )
    parser.add_argument(
        "--diffsynth",
        type=Path,
        metavar="DIR",
        help="a checkout of DiffSynth-Studio, for the part diffsynth",
    )
    parser.add_argument("--commit", default="", help="of the sources, for the rows; default: git's")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu_truth.jsonl"),
        help="file that results are appended to",
    )
    args = parser.parse_args(arguments)
    checkouts = {name: getattr(args, name) for name in PEERS}
    before = len(read(args.out))
    by_name = {part.name: part for part in PARTS}
    named = [
        by_name[name]
        for name in args.only or [part.name for part in PARTS if part.is_in_tiny or not args.tiny]
    ]
    append(
        args.out,
        {
            "part": "run",
            "name": f"commit {args.commit or _commit()}",
            "value": time.strftime("%Y-%m-%d"),
        },
    )
    parts = [part for part in named if checkouts.get(part.name, part)]
    for part in named:
        if part not in parts:
            append(
                args.out,
                {
                    "part": part.name,
                    "status": "skipped",
                    "error": f"--{part.name} names no checkout",
                },
            )
    script = Path(__file__).with_name("gpu_parts.py")
    # cuBLAS is only deterministic with a workspace of its own for each stream; the allocator is
    # that of the commands.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Containers often forbid Python to keep what it compiles: each part then compiles torch's
    # sources anew, for half of its time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if args.tiny:
        os.environ.setdefault("OMP_NUM_THREADS", "1")

    # On a GPU each part has a context of CUDA and a memory allocator that nothing used before it.
    copies = args.device == "cpu"

    def command(part: Part) -> list[str]:
        flags = {"--tiny": args.tiny, "--shared": not part.is_timed and args.side_by_side > 1}
        options = [
            *["--wait"] * (not copies),
            "--device",
            args.device,
            "--out",
            str(args.out),
            *(name for name, is_set in flags.items() if is_set),
        ]
        checkout = ["--checkout", str(checkouts[part.name])] if part.name in checkouts else []
        return [sys.executable, str(script), part.name, *options, *checkout]

    wall = args.wall or (float("inf") if args.tiny else 840.0)
    if copies:
        for module in _IMPORTED:
            import_module(module)
    # a part in a session of its own would outlive this process
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = run(
            parts,
            args.out,
            wall,
            command,
            _TINY_SECONDS if args.tiny else 0.0,
            args.side_by_side,
            waits=not copies,
            copies=copies,
        )
    except KeyboardInterrupt:
        failed = 128 + signal.SIGINT
    print(tables(read(args.out)[before:], named))
    return failed


if __name__ == "__main__":
    sys.exit(main())
