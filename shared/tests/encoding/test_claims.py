"""Processes that fill one cache: each item is encoded once, and what a dead process had begun is
encoded again."""

import errno
import json
import sys
import time
from collections import Counter
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from ditkit_core.encoding.missing import claimed
from ditkit_core.io.locks import alone_with
from ditkit_core.testing.ranks import once
from ditkit_core.testing.scripts import run_script

SCRIPT = Path(__file__).parents[1] / "support" / "encoding_processes.py"
NUM = 12 + 13
"""Clips and captions, the empty one included."""


def make(folder: Path) -> Any:
    return json.loads(run_script(SCRIPT, folder).splitlines()[-1])


@pytest.fixture
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return once(tmp_path_factory.getbasetemp(), SCRIPT.stem, make)


def begun(case: dict[str, Any]) -> Counter[str]:
    return Counter(item for _, item in case["log"])


@pytest.mark.ranks
@pytest.mark.slow
def test_processes_divide_the_work_and_encode_nothing_twice(cases: dict[str, Any]) -> None:
    one, two = cases["one"], cases["two"]
    assert len(begun(one)) == NUM
    assert begun(two) == begun(one) and set(begun(two).values()) == {1}
    by_process = Counter(process for process, _ in two["log"])
    assert len(by_process) == 2 and min(by_process.values()) > 1


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", ["two", "killed in encode", "killed in write"])
def test_the_cache_is_that_of_one_process(cases: dict[str, Any], name: str) -> None:
    """Every entry, what is returned, and no claim is left."""
    one, several = cases["one"], cases[name]
    assert several["entries"] == one["entries"] and len(one["entries"]) == NUM
    assert all(returned == one["returned"][0] for returned in several["returned"])
    assert len(several["returned"]) == several["codes"].count(0)
    assert several["claims"] == one["claims"] == []


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", ["killed in encode", "killed in write"])
def test_of_a_killed_process_one_item_is_encoded_again(cases: dict[str, Any], name: str) -> None:
    killed = cases[name]
    assert killed["codes"] == [-9] + [0] * (len(killed["codes"]) - 1)
    again = {item: count for item, count in begun(killed).items() if count > 1}
    assert list(again.values()) == [2] and begun(killed).keys() == begun(cases["one"]).keys()
    first = next(process for process, item in killed["log"] if item in again)
    assert sum(process == first for process, _ in killed["log"]) == 3


@pytest.mark.exhaustive
def test_two_processes_take_little_more_than_half_of_the_time(tmp_path: Path) -> None:
    """Of 60 clips and 61 captions, whose encoder waits as one on a GPU does."""
    found = json.loads(run_script(SCRIPT, tmp_path / "work", "timed").splitlines()[-1])
    assert found["two"]["codes"] == [0, 0] and len(begun(found["two"])) == 121
    assert found["two"]["seconds"] <= 0.6 * found["one"]["seconds"]


def test_a_claim_is_of_one_at_a_time_and_leaves_nothing(tmp_path: Path) -> None:
    entry = tmp_path / "media" / "ab" / "abc.safetensors"
    with claimed(entry) as first, claimed(entry) as second:
        assert first and not second
    with claimed(entry) as first:
        assert first
    assert list(entry.parent.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    """What cannot be claimed may be encoded: writing the entry says why it fails."""
    (tmp_path / "media").write_text("no folder")
    with (
        claimed(tmp_path / "media" / "abc.safetensors") as first,
        alone_with(tmp_path / "media" / "hashes.json"),
    ):
        assert first


@pytest.mark.skipif(sys.platform == "win32", reason="the locks of Windows are not flock's")
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK], ids=errno.errorcode.get)
def test_where_the_file_system_has_no_locks_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Not even for what a process of a machine that is gone has left; and nothing is left."""
    import fcntl

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    for name in (".abc.claim", ".hashes.json.lock"):
        (tmp_path / name).write_text("12345\nanother-machine\n")
    entry = tmp_path / "abc.safetensors"
    with claimed(entry) as first, claimed(entry) as second, alone_with(tmp_path / "hashes.json"):
        assert first and second
    assert not list(tmp_path.glob("*.claim"))


def test_a_second_process_waits_for_a_block_of_one(tmp_path: Path) -> None:
    """Threads stand in for processes: each has a lock of its own."""
    order, inside = list[str](), Event()

    def other() -> None:
        inside.wait()
        with alone_with(tmp_path / "hashes.json"):
            order.append("second")

    thread = Thread(target=other)
    thread.start()
    with alone_with(tmp_path / "hashes.json"):
        inside.set()
        time.sleep(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
