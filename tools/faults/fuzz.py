"""Hostile input in fourteen kinds: every case must end in success or one clear line, within 30
seconds and 4 GiB.

    uv run tools/faults/fuzz.py                                   # 10,000 cases of each kind: hours
    uv run tools/faults/fuzz.py --cases 300 --kind adapters toml  # some kinds
    uv run tools/faults/fuzz.py --case adapters:217               # one case, with its traceback

A kind runs in a child process that reports each case before and after. A child that takes longer
than the limit for one case is ended, and another goes on with the next; memory is limited by the
operating system. The table goes to stdout, and each fault to stderr. The exit status is 1 if there
was a fault.
"""

import argparse
import contextlib
import gc
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = map(str, (ROOT / "shared/tests/support", ROOT / "packages/flux2/tests/support"))
if __name__ == "__main__":  # before the libraries read it
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import av
import torch
from hostile import CommandFailed, Kind

from ditkit_core.errors import EnvironmentFault, UserError, printable
from ditkit_core.io.memory import is_host_allocation
from fuzz_models import ALL_KINDS

SECONDS, WAITING_SECONDS, BYTES = 30, 90, 4 * 2**30
"""Most processor time of a case, the most time altogether, and the most memory above that of a
child before its first case."""
FAULTS = ("traceback", "hang", "memory", "no clear line")


@dataclass
class Row:
    """What became of the cases of a kind."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    slowest: float = 0.0
    largest_bytes: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return self.outcomes.total()


def is_shortage(error: BaseException | None) -> bool:
    """Whether memory was asked for that is not there, perhaps within another error."""
    while error is not None:
        if type(error) is EnvironmentFault:  # not of a dependency that is missing
            return True
        # Of libav's error, the reader judges whether memory is short.
        if (
            (isinstance(error, MemoryError) and not isinstance(error, av.FFmpegError))
            or is_host_allocation(str(error))
            or "out of memory" in str(error)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def outcome_of(kind: Kind, name: str, seed: int, folder: Path) -> tuple[str, str]:
    """What became of one case, and of a fault the end of its traceback."""
    case = folder / "case"
    shutil.rmtree(case, ignore_errors=True)
    case.mkdir()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            kind.use(random.Random(f"{name} {seed}"), case)
    except UserError as error:
        if is_shortage(error):
            return "memory", str(error)[:300]
        if not isinstance(error, CommandFailed) and printable(str(error)) != str(error):
            return "no clear line", repr(str(error))[:300]
        return "refused", ""
    except AssertionError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return ("no clear line" if "hostile.py" in where.filename else "traceback"), "".join(
            traceback.format_exception(error)[-3:]
        )[-600:]
    except BaseException as error:  # whatever it is, it is what is looked for
        if isinstance(error, KeyboardInterrupt):
            raise
        return ("memory" if is_shortage(error) else "traceback"), "".join(
            traceback.format_exception(error)[-3:]
        )[-600:]
    return "used", ""


def child(name: str, seeds: range, folder: Path, pipe: int) -> None:
    """Try the cases, and write a line before and after each."""
    torch.set_num_threads(1)
    kind = ALL_KINDS[name]()
    kind.prepare(folder)
    gc.freeze()  # releasing memory would go through all that is imported, at every case
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in seeds:
        os.write(pipe, json.dumps({"start": seed}).encode() + b"\n")
        start = time.process_time()
        outcome, said = outcome_of(kind, name, seed, folder)
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        row = {
            "done": seed,
            "outcome": outcome,
            "said": said,
            "seconds": time.process_time() - start,
            "bytes": peak,
        }
        os.write(pipe, json.dumps(row).encode() + b"\n")


def cpu_seconds(pid: int) -> float:
    """Processor time of a child so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_kind(name: str, seeds: range) -> Row:
    """Run the cases of a kind, in as many children as it takes."""
    row, following = Row(), seeds.start
    while following in seeds:
        folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            status = 1
            with contextlib.suppress(KeyboardInterrupt):
                os.chdir(folder)
                try:
                    child(name, range(following, seeds.stop), folder, writing)
                    status = 0
                except BaseException:  # noqa: BLE001  # a child may not return into its parent's code
                    traceback.print_exc()
            os._exit(status)
        os.close(writing)
        try:
            last = _follow(pid, reading, name, row, following - 1)
        finally:
            os.close(reading)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            shutil.rmtree(folder, ignore_errors=True)
        if last < following:
            raise SystemExit(f"{name}: nothing could be tried")
        following = last + 1
    return row


def _follow(pid: int, reading: int, name: str, row: Row, last: int) -> int:
    """Read what a child reports until it ends or hangs; returns the last case that it tried."""
    rest, started, since, cpu = b"", False, time.monotonic(), 0.0
    while True:
        ready, _, _ = select([reading], [], [], 1.0)
        data = os.read(reading, 1 << 16) if ready else None
        waited = started and time.monotonic() - since > WAITING_SECONDS
        hangs = data is None and started and (waited or cpu_seconds(pid) - cpu > SECONDS)
        if data == b"" or hangs:
            if started:  # it ended, or does not end, in the middle of a case
                row.outcomes["hang" if hangs else "traceback"] += 1
                row.faults.append(
                    f"{name}:{last}: {'takes too long' if hangs else 'ends its process'}"
                )
            return last
        *lines, rest = (rest + (data or b"")).split(b"\n")
        for line in lines:
            _record(report := json.loads(line), name, row)
            started = "start" in report
            last = report["start"] if started else report["done"]
        if lines:
            since, cpu = time.monotonic(), cpu_seconds(pid)


def _record(report: dict[str, Any], name: str, row: Row) -> None:
    if "done" in report:
        row.outcomes[report["outcome"]] += 1
        row.seconds += report["seconds"]
        row.slowest, row.largest_bytes = (
            max(row.slowest, report["seconds"]),
            max(row.largest_bytes, report["bytes"]),
        )
        if report["outcome"] in FAULTS:
            row.faults.append(f"{name}:{report['done']}: {report['outcome']}: {report['said']}")


HEAD = [
    "kind",
    "cases",
    "used",
    "refused in one line",
    "tracebacks",
    "hangs",
    "over 4 GiB",
    "no clear line",
    "slowest (s of CPU)",
    "all (s of CPU)",
    "most memory added",
]


def line(name: str, row: Row) -> str:
    """The outcomes of a kind, as a row of a table in Markdown."""
    counts = [row.outcomes[key] for key in ("used", "refused", *FAULTS)]
    seconds = [f"{row.slowest:.1f}", f"{row.seconds:.0f}"]
    most = f"{row.largest_bytes / 2**20:.0f} MiB"
    return "| " + " | ".join(map(str, [name, row.cases, *counts, *seconds, most])) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--kind", nargs="+", choices=list(ALL_KINDS), default=list(ALL_KINDS))
    parser.add_argument("--case", metavar="KIND:SEED", help="one case, in this process")
    args = parser.parse_args()
    if args.case:
        name, _, seed = args.case.partition(":")
        with tempfile.TemporaryDirectory() as folder:
            kind = ALL_KINDS[name]()
            kind.prepare(Path(folder))
            (Path(folder) / "case").mkdir()
            kind.use(random.Random(f"{name} {seed}"), Path(folder) / "case")
        return
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD), flush=True)
    has_faults = False
    for name in args.kind:
        row = run_kind(name, range(args.first, args.first + args.cases))
        print(line(name, row), flush=True)
        print("".join(f"{fault}\n" for fault in row.faults), file=sys.stderr, flush=True, end="")
        has_faults |= bool(row.faults)
    raise SystemExit(int(has_faults))


if __name__ == "__main__":
    main()
