"""Stands in for a run in the tests of the queue, without torch: it locks its folder, saves, and
ends when it may or is told to.

    python queued_stand_in.py FOLDER
"""

import os
import sys
import time
from pathlib import Path

from ditkit_core.io.run_dir import RunFolder, locked
from ditkit_core.io.run_requests import pending, remove_requests


def main() -> int:
    folder = RunFolder(Path(sys.argv[1]))
    folder.path.mkdir(parents=True, exist_ok=True)
    with locked(folder.path), open(folder.path.parent / "events", "a", encoding="utf-8") as events:
        gpu = os.environ["CUDA_VISIBLE_DEVICES"]
        events.write(f"begin {folder.name} {gpu} {os.getpid()}\n")
        events.flush()
        if (folder.path / "fails").exists():
            print("a line before\nerror: there is no such file\na line after", flush=True)
            return 1
        while not (folder.path / "may-end").exists():
            if pending(folder):
                remove_requests(folder, {"stop"})
                folder.save(1).mkdir(parents=True, exist_ok=True)
                return 130
            time.sleep(0.05)
        events.write(f"end {folder.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
