"""The cost of reading data, and how it grows: the doctor, its search for near-duplicates, a window
of a long video, a second start.

    uv run tools/bench/bench_data.py > benchmarks/data_cpu.md         # all of it, some minutes
    uv run tools/bench/bench_data.py --part doctor --repeats 5        # one table

Times are processor time (user and system, all threads) of the measured call alone, without imports,
unless a row says otherwise: other programs on the machine then matter little. Sizes are measured in
turn, again and again, and the least of the repeats is given, which is the one that was disturbed
least. Whatever grows with the data runs in a process of its own, so that its peak of memory is its
own. The exponent is the slope of a straight line through the logarithms: 1 is linear, less where a
fixed cost is part of it.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ditkit_core.config.resolve import resolve
from ditkit_core.data.media.clip import read_clip
from ditkit_core.data.media.video import write_h264
from ditkit_core.diagnostics.doctor.dataset import examine_dataset
from ditkit_core.diagnostics.doctor.media import Fingerprint, near_duplicates
from ditkit_core.io.memory import process_peak_bytes
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run
from ditkit_core.run.encoding import encode_all
from ditkit_wan.spec import WAN

FILES = (50, 200, 800)
SIGNATURES = (4_000, 16_000, 64_000)
LENGTHS = (500, 2_000, 8_000)
SIDE, FRAMES, FPS = 64, 17, 16.0
WINDOW = 17
FEW = "few"
"""The folder of clips for a new process."""
PROGRAM = Path(__file__).resolve()


def texture(random: np.random.Generator, width: int) -> np.ndarray:
    """Blotches of two sizes, uint8 [SIDE, width, 3]."""
    layers = [
        np.kron(
            random.normal(size=(SIDE // side, width // side + 1, 3)) * side,
            np.ones((side, side, 1)),
        )[:, :width]
        for side in (4, 16)
    ]
    mixed = layers[0] + layers[1]
    return ((mixed - mixed.min()) / np.ptp(mixed) * 255).astype(np.uint8)


def write_clips(folder: Path, count: int) -> None:
    """Write a number of different clips of a moving camera, each with a caption."""
    folder.mkdir(parents=True)
    for number in range(count):
        wide = texture(np.random.default_rng(number), SIDE + 2 * FRAMES)
        write_h264(
            folder / f"{number:05d}.mp4",
            [wide[:, 2 * i : 2 * i + SIDE].copy() for i in range(FRAMES)],
            fps=FPS,
        )
        (folder / f"{number:05d}.txt").write_text(f"texture number {number}\n", encoding="utf-8")


def write_long(path: Path, frames: int) -> None:
    """A video of so many frames whose camera moves back and forth."""
    wide = texture(np.random.default_rng(0), 2 * SIDE)
    places = [abs((i % (2 * SIDE)) - SIDE) for i in range(frames)]
    write_h264(path, [wide[:, place : place + SIDE].copy() for place in places], fps=FPS)


def run_of(base: Path, clips: Path, cache: Path | None = None) -> RunContext:
    """A run of the demo's tiny model on some clips, with its cache next to them unless it is
    named."""
    config = resolve(RunConfig)
    data = replace(config.data, folder=str(clips), frames=9, height=SIDE, width=SIDE)
    config = replace(
        config, data=data, model=replace(config.model, base=str(base), dtype="fp32"),
        encode=replace(config.encode, cache=str(cache or f"{clips}-cache"), text_dtype="fp32"),
        train=replace(config.train, threads=1),
    )  # fmt: skip
    return create_run(WAN, config)


def child(what: str, base: Path, clips: Path) -> dict[str, float]:
    """Do one thing in this process: processor seconds, and by how much its peak of memory grew in
    MiB.

    The same is done with a few clips first, so that imports and what is made once are not counted.
    """
    torch.set_num_threads(1)

    def done(run: RunContext) -> int:
        return len(
            examine_dataset(run.data).samples if what == "doctor" else encode_all(run.data).samples
        )

    # With a cache of this process: where all is encoded, encoders and the libraries that they need
    # would not be loaded.
    done(run_of(base, clips.parent / FEW, clips.parent / f"{FEW}-{os.getpid()}"))
    run = run_of(base, clips)
    before, began = process_peak_bytes(), time.process_time()
    # all processes begin when the last one has finished its imports
    if what.startswith("together "):
        started = clips.parent / "started"
        (started / str(os.getpid())).touch()
        while len(list(started.iterdir())) < int(what.split()[1]):
            time.sleep(0.001)
        began = time.process_time()
    clock = time.perf_counter()
    samples = done(run)
    seconds, wall = time.process_time() - began, time.perf_counter() - clock
    return {
        "samples": samples,
        "seconds": seconds,
        "wall": wall,
        "grown": (process_peak_bytes() - before) / 2**20,
    }


def in_child(what: str, base: Path, clips: Path) -> dict[str, float]:
    """`child` in a process of its own."""
    made(clips.parent / FEW, 3)
    if what == "doctor":
        shutil.rmtree(f"{clips}-cache", ignore_errors=True)  # it contains the hashes of files
    command = [sys.executable, str(PROGRAM), "--child", what, str(base), str(clips)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope of seconds over sizes, both as logarithms."""
    slope, _ = np.polyfit(np.log(sizes), np.log(seconds), 1)
    return float(slope)


def least(
    repeats: int, measures: Sequence[Callable[[], dict[str, float]]]
) -> list[dict[str, float]]:
    """Each measured in turn, again and again: the repeat with the least seconds."""
    rounds = [[measure() for measure in measures] for _ in range(repeats)]
    return [min(found, key=lambda each: each["seconds"]) for found in zip(*rounds, strict=True)]


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def doctor(place: Path, base: Path, repeats: int) -> str:
    """The doctor's look at a dataset."""
    folders = [made(place / f"clips-{count}", count) for count in FILES]
    found = least(
        repeats, [lambda folder=folder: in_child("doctor", base, folder) for folder in folders]
    )  # type: ignore[misc]
    seconds = [each["seconds"] for each in found]
    rows = [
        (
            count,
            f"{each['seconds']:.2f} s",
            f"{1000 * each['seconds'] / count:.1f} ms",
            f"{each['grown']:.0f} MiB",
        )
        for count, each in zip(FILES, found, strict=True)
    ]
    return (
        f"## The doctor by number of clips\n\nEverything that `--check` does before its two steps. "
        f"Each clip has {FRAMES} frames of {SIDE} × {SIDE}; 9 of "
        f"them are trained on. Exponent {exponent(FILES, seconds):.2f}.\n\n"
        + table(("clips", "processor time", "per clip", "growth of peak memory"), rows)
    )


def second_start(place: Path, base: Path, repeats: int) -> str:
    """Reading and encoding an unchanged dataset again, and what a sample takes in the cache."""
    folders = [made(place / f"clips-{count}", count) for count in FILES]
    first = [in_child("encode", base, folder) for folder in folders]
    found = least(
        repeats, [lambda folder=folder: in_child("encode", base, folder) for folder in folders]
    )  # type: ignore[misc]
    seconds = [each["seconds"] for each in found]
    rows = []
    for count, folder, filled, each in zip(FILES, folders, first, found, strict=True):
        held = sum(
            path.stat().st_size for path in Path(f"{folder}-cache").rglob("*") if path.is_file()
        )
        rows.append(
            (
                count,
                f"{filled['seconds']:.2f} s",
                f"{each['seconds']:.2f} s",
                f"{1000 * each['seconds'] / count:.2f} ms",
                f"{held / count:,.0f}",
            )
        )
    return (
        "## A second start on an unchanged dataset\n\nThe tiny encoders of the demo fill the "
        "cache; the second start finds everything in it. Exponent of the second "
        f"start {exponent(FILES, seconds):.2f}. A sample is 9 frames of {SIDE} × {SIDE}: latents "
        f"of 16 × 3 × 8 × 8 numbers, and text rows of 32 numbers. "
        "Bytes count all files in the folder of the cache.\n\n"
        + table(("clips", "first start", "second start", "per clip", "bytes per clip"), rows)
    )


def shared(place: Path, base: Path, repeats: int) -> str:
    """Processes that fill one cache together, and as many that fill one each, which shows what two
    processes cost each other on this machine."""
    clips = made(place / f"clips-{FILES[1]}", FILES[1])
    halves = [made(place / f"half-{part}", FILES[1] // 2) for part in range(2)]

    def together(folders: Sequence[Path]) -> dict[str, float]:
        for folder in folders:
            shutil.rmtree(f"{folder}-cache", ignore_errors=True)
        shutil.rmtree(place / "started", ignore_errors=True)
        (place / "started").mkdir()
        with ThreadPoolExecutor(len(folders)) as threads:
            found = list(
                threads.map(
                    lambda folder: in_child(f"together {len(folders)}", base, folder), folders
                )
            )
        return {name: max(each[name] for each in found) for name in ("seconds", "wall")}

    made(clips.parent / FEW, 3)  # two processes would write it at once
    ways = {
        "one": [clips],
        "two, one cache": [clips, clips],
        "two, each half of the clips and its own cache": halves,
    }
    each = least(repeats, [lambda folders=folders: together(folders) for folders in ways.values()])  # type: ignore[misc]
    rows = []
    for way, one in zip(ways, each, strict=True):
        of_one = (f"{one[name] / each[0][name]:.2f}" for name in ("seconds", "wall"))
        rows.append((way, f"{one['seconds']:.2f} s", f"{one['wall']:.2f} s", *of_one))
    return (
        f"## Processes that fill one cache\n\nThe first start on {FILES[1]} clips, by the process "
        f"that took longest. The last row is what the machine gives to "
        "two processes that share nothing; the row before it has what claiming costs as well. Wall "
        "time counts what other programs took from the cores.\n\n"
        + table(
            (
                "processes",
                "processor time",
                "wall time",
                "of one's processor time",
                "of one's wall time",
            ),
            rows,
        )
    )


def near(place: Path, base: Path, repeats: int) -> str:
    """The search for near-duplicates among signatures, a tenth of which are copies with a few bits
    changed."""
    prints = {count: signatures(count) for count in SIGNATURES}

    def search(count: int) -> dict[str, float]:
        began = time.process_time()
        groups = near_duplicates(prints[count])
        return {"seconds": time.process_time() - began, "groups": len(groups)}

    found = least(repeats, [lambda count=count: search(count) for count in SIGNATURES])  # type: ignore[misc]
    rows = [
        (
            f"{count:,}",
            f"{each['groups']:,.0f}",
            f"{each['seconds']:.2f} s",
            f"{1e6 * each['seconds'] / count:.0f} µs",
        )
        for count, each in zip(SIGNATURES, found, strict=True)
    ]
    return (
        "## Near-duplicates by number of signatures\n\nA tenth of them are copies of others with "
        "three bits changed. Exponent "
        f"{exponent(SIGNATURES, [each['seconds'] for each in found]):.2f}.\n\n"
        + table(("signatures", "groups found", "processor time", "per signature"), rows)
    )


def signatures(count: int) -> dict[str, tuple[str, Fingerprint]]:
    random = np.random.default_rng(0)
    made: dict[str, tuple[str, Fingerprint]] = {}
    for number in range(count):
        if number % 10 == 9:
            other = made[str(number - 9)][1]
            bits = other.bits.copy()
            bits[random.choice(len(bits), 3, replace=False)] ^= True
            print = Fingerprint(bits=bits, colours=other.colours)
        else:
            print = Fingerprint(
                bits=random.random(3 * 63) < 0.5,
                colours=random.random((3, 8, 8, 3), dtype=np.float32) * 255,
            )
        made[str(number)] = str(number), print
    return made


def window(place: Path, base: Path, repeats: int) -> str:
    """A window at the end of a video, against decoding all that comes before it."""
    rows, seconds = [], []
    for frames in LENGTHS:
        path = place / f"long-{frames}.mp4"
        write_long(path, frames)

        def read(path: Path, start: int, count: int) -> dict[str, float]:
            began = time.process_time()
            clip = read_clip(
                path, frames=count, fps=FPS, height=SIDE, width=SIDE, start_seconds=start / FPS
            )
            assert clip.shape[1] == count
            return {"seconds": time.process_time() - began}

        last = frames - WINDOW
        at_end, all_of_it = least(
            repeats, [lambda p=path, s=last: read(p, s, WINDOW), lambda p=path, n=frames: read(p, 0,
            n)]  # type: ignore[misc]
        )  # fmt: skip
        seconds.append(at_end["seconds"])
        rows.append(
            (
                f"{frames:,}",
                f"{1000 * at_end['seconds']:.1f} ms",
                f"{1000 * all_of_it['seconds']:.1f} ms",
                f"{all_of_it['seconds'] / at_end['seconds']:.1f}",
            )
        )
    return (
        f"## The last {WINDOW} frames of a long video\n\nH.264 of {SIDE} × {SIDE} with a keyframe "
        f"every 250 frames, as the encoder sets them. Exponent of the window by the length of "
        f"the video {exponent(LENGTHS, seconds):.2f}.\n\n"
        + table(("frames", "window", "decoding from the start", "ratio"), rows)
    )


def demo_check(place: Path, base: Path, repeats: int) -> str:
    """`--demo --check` as it is typed, imports included."""
    rows = []
    for name in ("wan", "flux2"):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        command = [
            str(Path(sys.executable).with_name(f"{name}-train")),
            "--demo",
            "--check",
            "--run.folder",
            str(place / f"demo-{name}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        rows.append((f"`{name}-train --demo --check`", f"{wall:.0f} s", f"{used:.1f} s"))
    return (
        "## The demo's check\n\nOne run each, including the start of Python, imports and writing "
        "the demo's inputs.\n\n" + table(("command", "wall", "processor time"), rows)
    )


PARTS = {
    "doctor": doctor,
    "check": demo_check,
    "near": near,
    "window": window,
    "start": second_start,
    "shared": shared,
}


def made(folder: Path, count: int) -> Path:
    if not folder.exists():
        write_clips(folder, count)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part",
        choices=list(PARTS),
        action="append",
        help="only this table; may be given several times",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--child", nargs=3, metavar=("WHAT", "BASE", "CLIPS"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.child:
        what, base, clips = args.child
        print(json.dumps(child(what, Path(base), Path(clips))))
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        WAN.demo.write(place / "inputs")
        print(
            f"# Checking and reading data, on a CPU\n\n`uv run tools/bench/bench_data.py --repeats "
            f"{args.repeats}`, torch {torch.__version__}, Python {platform.python_version()}.\n"
        )
        print(
            "Other programs shared the machine during the measurement. So times are processor time "
            "of the measured call, the least of "
            f"{args.repeats} repeats, with the sizes in turn. Wall times are not corrected. The "
            f"exponent is the slope of the logarithms: 1 is linear.\n"
        )
        for name in args.part or PARTS:
            print(
                PARTS[name](place, place / "inputs" / "checkpoint", args.repeats) + "\n", flush=True
            )


if __name__ == "__main__":
    main()
