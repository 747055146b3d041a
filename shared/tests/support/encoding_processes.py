"""What `test_claims.py` starts once: processes that fill one cache together, some of which are
killed in the middle.

They are forked from this script, which has computed nothing yet. Each writes what it begins to
encode into a log that all of them share.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from data_specs import CLIPS
from media_files import picture
from toy_encoders import CountingEncoder, encode_with

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Sample, scan
from ditkit_core.encoding.cache import Cache, digest, opened
from ditkit_core.io import files
from ditkit_core.io.console import NullProgress

NUM = 12


class LoggedEncoder(CountingEncoder):
    """Takes its time, and logs what it begins."""

    seconds = 0.02
    """That an item takes."""

    def __init__(self, kind: str, log: Path, at_once: int = 1) -> None:
        super().__init__(kind)
        self.items_at_once = at_once
        self._log = log

    def encode(
        self, items: Sequence[Any], advance: Callable[[float], None] = NullProgress.advance
    ) -> list[dict[str, torch.Tensor]]:
        # appended in one write, so that lines of processes do not mix
        with self._log.open("a") as log:
            log.write("".join(f"{os.getpid()} {self.kind} {_name(item)}\n" for item in items))
        time.sleep(self.seconds * len(items))
        return super().encode(items, advance)


def _name(item: Any) -> str:
    return item if isinstance(item, str) else f"{item.float().mean():.6f}"


def samples(folder: Path, num: int = NUM) -> list[Sample]:
    for number in range(num):
        path = picture(folder / f"{number}.png", (16, 16), f"#{number * 240 // num:02x}4080")
        path.with_suffix(".txt").write_text(f"caption {number}")
    config = DataConfig(folder=str(folder), frames=1, height=16, width=16)
    return scan(config, CLIPS).samples


def fill(
    given: list[Sample],
    folder: Path,
    at_once: int,
    kill: Callable[[LoggedEncoder, LoggedEncoder], None],
) -> None:
    """The work of a process."""
    torch.set_num_threads(1)
    log = folder / "log"
    media, text = LoggedEncoder("media", log), LoggedEncoder("text", log, at_once)
    kill(media, text)
    found = encode_with(
        given, cache=Cache(folder / "cache"), media_encoder=media, text_encoder=text, fps=16.0
    )
    (folder / f"{os.getpid()}.json").write_text(json.dumps([each.keys for each in found]))


def nothing(media: LoggedEncoder, text: LoggedEncoder) -> None:
    pass


def as_a_gpu(media: LoggedEncoder, text: LoggedEncoder) -> None:
    """Most of an item's time, the process waits for another device."""
    media.seconds = text.seconds = 0.25


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_encode(media: LoggedEncoder, text: LoggedEncoder) -> None:
    """Kill the process while it encodes its third clip."""
    whole = media._one

    def one(item: Any) -> dict[str, torch.Tensor]:
        if len(media.items) == 2:
            die()
        return whole(item)

    media._one = one  # type: ignore[method-assign]


def in_write(media: LoggedEncoder, text: LoggedEncoder) -> None:
    """Kill the process when its third entry is written, but has no name yet."""
    rename, count = os.replace, [0]

    def replace(source: Any, target: Any) -> None:
        count[0] += str(target).endswith(".safetensors")
        if count[0] == 3:
            die()
        rename(source, target)

    files.os.replace = replace  # type: ignore[attr-defined]


def contents(path: Path) -> list[Any]:
    """All of an entry but the order of its header's words, which safetensors leaves to chance."""
    with opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it has no iterator)
        return [path.stat().st_size, dict(sorted(file.metadata().items())), digest(tensors)]


CASES: dict[str, tuple[Callable[[LoggedEncoder, LoggedEncoder], None], ...]] = {
    "one": (nothing,),
    "two": (nothing, nothing),
    "killed in encode": (in_encode, nothing),
    "killed in write": (in_write, nothing, nothing),
}
TIMED = {"one": (as_a_gpu,), "two": (as_a_gpu, as_a_gpu)}


def run(
    given: list[Sample], folder: Path, kills: Sequence[Callable[..., None]], at_once: int = 4
) -> dict[str, Any]:
    folder.mkdir()
    began = time.monotonic()
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=fill, args=(given, folder, at_once, kill)) for kill in kills
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(250)  # of a machine that does much else
    seconds = time.monotonic() - began
    cache = folder / "cache"
    return {
        "seconds": seconds,
        "codes": [process.exitcode for process in processes],
        "log": [line.split(" ", 1) for line in (folder / "log").read_text().splitlines()],
        "entries": {
            str(path.relative_to(cache)): contents(path)
            for path in sorted(cache.rglob("*.safetensors"))
        },
        "claims": [path.name for path in cache.rglob("*.claim")],
        "returned": [json.loads(path.read_text()) for path in folder.glob("*.json")],
    }


if __name__ == "__main__":
    into, cases = Path(sys.argv[1]), TIMED if "timed" in sys.argv else CASES
    given = samples(into / "data", 60 if cases is TIMED else NUM)
    print(json.dumps({name: run(given, into / name, kills) for name, kills in cases.items()}))
