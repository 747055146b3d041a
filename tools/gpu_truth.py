"""Everything that only a GPU can show, in ten minutes: one command for the first GPU at hand.

    uv run tools/gpu_truth.py                        # all parts, at most 600 seconds
    uv run tools/gpu_truth.py --only bitwise plan    # some of them
    uv run tools/gpu_truth.py --device cpu --tiny    # whether everything in it runs, without a GPU: its numbers are worth nothing

Parts run in order of worth (`tools/gpu_parts.py`), each in a process of its own with a time limit, so that a crash or a hang loses one
part. Within a part, what fails costs its own rows. Results are appended at once to a file of JSON lines; the profiler's traces of
timed steps are next to it. When the time is up, the parts that are left are skipped. At the end a table in
Markdown is printed, also after Ctrl-C or a termination. The exit status is the number of parts that failed; nothing else runs if torch
cannot use the device.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part, and how long it may take on a GPU."""

    name: str
    seconds: float
    about: str
    is_in_tiny: bool = True
    """Whether `--tiny` runs it; False where another part runs the same code."""


PARTS = (
    Part(name="facts", seconds=60, about="Versions, precision switches, attention kernels, memory of the context"),
    Part(name="klein4b", seconds=150, about="Steps of FLUX.2 klein 4B in every mode, and diffusers'"),
    Part(name="wan14b", seconds=150, about="Steps of Wan 14B, and diffusers'"),
    Part(name="dev", seconds=120, about="Steps of FLUX.2 dev, and diffusers'", is_in_tiny=False),
    Part(name="numbers", seconds=120, about="Gradients against the CPU and fp64, with our kernels, and compiled"),
    Part(name="bitwise", seconds=120, about="Policies, swap and offload against none, with delayed work and copies"),
    Part(name="quantized", seconds=40, about="Codes, values and a step of a quantized base"),
    Part(name="computed", seconds=30, about="Products in 8 bits against the CPU's, and their time against bf16"),
    Part(name="tests", seconds=120, about="The tests for a GPU"),
    Part(name="plan", seconds=180, about="Plans against allocated, reserved and the driver's memory"),
    Part(name="speed", seconds=180, about="A step against diffusers', and where its time goes"),
    Part(name="passes", seconds=60, about="Rates of elementwise work, its cost on the host, and where a step waits"),
    Part(name="streaming", seconds=60, about="Copies of streamed blocks, and the share of them that is hidden"),
    Part(name="klein9b", seconds=120, about="Steps of FLUX.2 klein 9B, and diffusers'", is_in_tiny=False),
    Part(name="wan1_3b", seconds=120, about="Steps of a full fine-tune of Wan 1.3B", is_in_tiny=False),
    Part(name="demos", seconds=120, about="Both demos from files to an adapter, and resumed"),
    Part(name="real", seconds=180, about="A LoRA of blocks of FLUX.2 klein 4B's size, planned, trained and resumed"),
    Part(name="backends", seconds=150, about="Rates of attention backends, and of a VAE in fp32 and TF32"),
)
_LAST_SECONDS = 5.0
_TINY_SECONDS = 1800.0
"""Limit of a part without a GPU, where only a hang shall end it."""
NO_DEVICE = 3
"""Exit status of a part that finds no such device: the others would find none either."""


def run(
    parts: Sequence[Part], out: Path, wall: float, command: Callable[[Part], Sequence[str]], limit: float = 0.0
) -> int:
    """Run parts one after the other, and append to a file how each ended.

    Args:
        out: The file; the parts append their rows to it themselves.
        wall: Seconds after which no part begins, and the running one is ended.
        command: The command of a part.
        limit: Seconds for each part in place of its own.

    Returns:
        The number of parts that failed. One that was skipped has not.
    """
    began, failed, lacking = time.monotonic(), 0, ""
    for part in parts:
        left = wall - (time.monotonic() - began)
        if left <= 0 or lacking:
            append(out, {"part": part.name, "status": "skipped", "error": lacking or "no time left"})
            continue
        before = len(read(out))
        end = _ended(command(part), min(limit or part.seconds, left))
        rows = read(out)[before:]
        if end.pop("code") == NO_DEVICE:
            lacking = "no device"
        elif end["status"] == "ok" and not rows:
            end |= {"status": "failed", "error": "it measured nothing"}
        for line in end.pop("warnings"):
            append(out, {"part": part.name, "name": "warning", "value": line})
        if end["status"] == "ok" and any(row.get("ok") is False for row in rows):
            end["status"] = "failed"
        failed += end["status"] != "ok"
        append(out, {"part": part.name, **end})
        print(f"{part.name}: {end['status']} in {end['seconds']:.0f} s {end['error']}".rstrip(), flush=True)
    return failed


def _ended(command: Sequence[str], limit: float) -> dict[str, Any]:
    """How a process ended. However it did, the processes that it started end too: they would keep memory of the GPU from the next part."""
    began = time.monotonic()
    # A file and not a pipe, which a compiler's workers keep open after the process is gone.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        child, code = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True), None
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a process may hang inside of a driver
                child.wait(_LAST_SECONDS)
        said.seek(0)
        lines = said.read()
    if code is None:
        error = f"ended after {limit:.0f} s"
    else:
        error = f"{_reason(lines)} ({_code(code)})".lstrip() if code else ""
    end = {"status": "ok" if code == 0 else "failed", "seconds": time.monotonic() - began, "error": error}
    return {**end, "code": code, "warnings": _warnings(lines)}


def _warnings(said: str) -> list[str]:
    """What Python warned of, each once: torch and Triton warn on a GPU of what no CPU shows."""
    found = re.findall(r"^\S+:\d+: (\w*Warning: .+)$", said, re.MULTILINE)
    return [line[:200] for line in dict.fromkeys(found)]


def _reason(said: str) -> str:
    """The last exception in what a process wrote: libraries warn after it, while the process ends. Or else the last line."""
    lines = said.strip().splitlines()
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
    return (errors or lines or [""])[-1]


def _code(code: int) -> str:
    if code >= 0:
        return f"status {code}"
    cause = ", as the system does where the machine's memory runs out" if code == -signal.SIGKILL else ""
    return f"ended by {signal.Signals(-code).name}{cause}"


def append(out: Path, row: Row) -> None:
    """Append a row, on a line of its own whatever a process that was ended left in the last one."""
    with out.open("ab+") as file:
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
    return "\n".join(line for part in parts for line in _table(part, [row for row in rows if row["part"] == part.name]))


def _table(part: Part, rows: Sequence[Row]) -> Iterator[str]:
    ends, found = [row for row in rows if "status" in row], [row for row in rows if "status" not in row]
    end = ends[-1] if ends else {"status": "not run"}
    took = f" in {end['seconds']:.0f} s" if "seconds" in end else ""
    error = f": {end['error']}" if end.get("error") else ""
    yield from (f"## {part.name}: {end['status']}{took}{error}", "", f"{part.about}.", "")
    columns = list(dict.fromkeys(name for row in found for name in row if name != "part"))
    if found:
        yield f"| {' | '.join(columns)} |"
        yield f"|{'---|' * len(columns)}"
        yield from (f"| {' | '.join(_cell(row.get(name, '')) for name in columns)} |" for row in found)
        yield ""


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models: a look at whether everything runs")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="default: all parts")
    parser.add_argument(
        "--wall", type=float, default=0.0, help="seconds for everything; default: 600, without limit if tiny"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_truth.jsonl"), help="file that results are appended to")
    args = parser.parse_args(arguments)
    wanted = args.only or [part.name for part in PARTS if part.is_in_tiny or not args.tiny]
    parts = [part for part in PARTS if part.name in wanted]
    before = len(read(args.out))
    script = Path(__file__).with_name("gpu_parts.py")
    # cuBLAS is only deterministic with a workspace of its own for each stream; the allocator is that of the commands.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Containers often forbid Python to keep what it compiles: each part then compiles torch's sources anew, for half of its time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if args.tiny:
        os.environ.setdefault("OMP_NUM_THREADS", "1")

    def command(part: Part) -> list[str]:
        given = ["--device", args.device, "--out", str(args.out), *(["--tiny"] if args.tiny else [])]
        return [sys.executable, str(script), part.name, *given]

    wall = args.wall or (float("inf") if args.tiny else 600.0)
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # a part in a session of its own would outlive this process
    try:
        failed = run(parts, args.out, wall, command, limit=_TINY_SECONDS if args.tiny else 0.0)
    except KeyboardInterrupt:
        failed = 128 + signal.SIGINT
    print(tables(read(args.out)[before:], parts))
    return failed


if __name__ == "__main__":
    sys.exit(main())
