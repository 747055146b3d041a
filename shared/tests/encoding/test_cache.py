"""The store of encoded tensors, and the memory of file contents."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from ditkit_core.encoding import cache as cache_module
from ditkit_core.encoding.cache import Cache, MediaHashes, key
from ditkit_core.errors import EnvironmentFault, UserError
from ditkit_core.io.files import file_hash

TENSORS = {"latents": torch.arange(24.0).reshape(2, 3, 4), "mask": torch.tensor([True, False])}
KEY = key("something")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def entry(cache: Cache) -> Path:
    (path,) = (path for path in cache.folder.rglob("*") if path.is_file())
    return path


def test_what_was_put_is_got_bitwise(cache: Cache) -> None:
    assert cache.get("media", KEY) is None and not cache.has("media", KEY)
    bf16 = torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16()
    cache.put(
        "media",
        KEY,
        {**TENSORS, "bf16": bf16, "turned": TENSORS["latents"].transpose(0, 2)},
        {"source": "a.mp4"},
    )
    got = cache.get("media", KEY)
    assert got is not None and cache.has("media", KEY) and not cache.has("text", KEY)
    assert got["bf16"].dtype == torch.bfloat16 and torch.equal(got["bf16"], bf16)
    assert torch.equal(got["latents"], TENSORS["latents"]) and torch.equal(
        got["mask"], TENSORS["mask"]
    )
    assert torch.equal(got["turned"], TENSORS["latents"].transpose(0, 2))


def test_keys_are_stable_and_tell_parts_apart() -> None:
    assert key("a", "b") == "c95b5b0a5d45c522dc032df817b0abc7"
    assert len({key("a", "b"), key("ab"), key("b", "a"), key("a", "b", ""), key('a", "b')}) == 5


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_a_torn_entry_counts_as_absent_and_is_removed(cache: Cache, length: int) -> None:
    cache.put("media", KEY, TENSORS, {})
    path = entry(cache)
    path.write_bytes(path.read_bytes()[:length])
    assert not cache.has("media", KEY)
    assert not path.exists()
    assert cache.get("media", KEY) is None


def test_a_foreign_file_counts_as_absent_and_is_removed(cache: Cache) -> None:
    cache.put("media", KEY, TENSORS, {})
    for metadata in (None, {"ditkit_key": key("something else")}):
        path = cache.folder / "media" / KEY[:2] / f"{KEY}.safetensors"
        save_file(TENSORS, path, metadata)
        assert cache.get("media", KEY) is None
        assert not path.exists()


def test_a_failed_put_leaves_nothing(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module, "save_file", full)
    with pytest.raises(UserError, match="No space left on device"):
        cache.put("media", KEY, TENSORS, {})
    assert not [path for path in cache.folder.rglob("*") if path.is_file()]


def old_file(path: Path, text: str = "content") -> Path:
    path.write_text(text)
    os.utime(path, ns=(10**18, 10**18))
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose bytes were read."""
    names: list[str] = []
    read = cache_module.file_hash

    def counting(path: Path) -> str:
        names.append(Path(path).name)
        return read(path)

    monkeypatch.setattr(cache_module, "file_hash", counting)
    return names


def test_a_memory_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    """A cache that may only be read has all that a run needs."""
    (tmp_path / "cache" / "hashes.json").mkdir(parents=True)
    (tmp_path / "a").write_bytes(b"x")
    os.utime(tmp_path / "a", (1, 1))
    with MediaHashes(tmp_path / "cache") as hashes:
        assert hashes.of(tmp_path / "a")
    assert [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == [
        tmp_path / "cache" / "hashes.json"
    ]


def test_a_second_start_hashes_nothing(tmp_path: Path, hashed: list[str]) -> None:
    paths = [old_file(tmp_path / name, name) for name in ("a", "b")]
    with MediaHashes(tmp_path / "cache") as hashes:
        first = [hashes.of(path) for path in paths]
    with MediaHashes(tmp_path / "cache") as hashes:
        assert [hashes.of(path) for path in paths] == first
    assert hashed == ["a", "b"] and first[0] != first[1]


def test_a_change_of_size_or_time_is_hashed_again(tmp_path: Path, hashed: list[str]) -> None:
    path = old_file(tmp_path / "a", "one")
    hashes = MediaHashes(tmp_path / "cache")
    before = hashes.of(path)
    old_file(path, "longer")
    assert hashes.of(path) != before
    old_file(path, "change")
    os.utime(path, ns=(10**18, 10**18 + 1))
    hashes.of(path)
    assert hashed == ["a"] * 3


def exchanged(one: Path, other: Path) -> None:
    spare = one.with_name("spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


def test_files_of_one_size_and_time_that_change_places_change_hashes(
    tmp_path: Path, hashed: list[str]
) -> None:
    """Uncompressed images of one archive: only their names are exchanged, or those of their
    folders."""
    files = []
    for folder, colour in (("a", "red"), ("b", "blue")):
        (tmp_path / folder).mkdir()
        files.append(tmp_path / folder / "x.bmp")
        Image.new("RGB", (64, 64), colour).save(files[-1])
        os.utime(files[-1], (1.6e9, 1.6e9))

    def hashes() -> list[str]:
        with MediaHashes(tmp_path / "cache") as found:
            return [found.of(file) for file in files]

    before = hashes()
    exchanged(*files)
    assert hashes() == before[::-1]
    exchanged(tmp_path / "a", tmp_path / "b")
    assert hashes() == before
    assert hashes() == before and len(hashed) == 6


@pytest.mark.skipif(
    os.name == "nt", reason="Windows tells when a file was created, not when it was changed"
)
def test_another_content_under_old_size_and_time_is_hashed_again(
    tmp_path: Path, hashed: list[str]
) -> None:
    path, content = tmp_path / "a", b"x" * 500_000
    for change in (b"y", b"z"):  # where no sample is taken
        path.write_bytes(content[:100_000] + change + content[100_000:])
        os.utime(path, ns=(10**18, 10**18))
        time.sleep(0.05)  # longer than a tick of the file system's clock
        with MediaHashes(tmp_path / "cache") as hashes:
            assert hashes.of(path) == hashes.of(path) == file_hash(path)
    assert hashed == ["a", "a"]


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system on which nothing but its size tells that a file has changed."""
    unseen = classmethod(lambda cls, path: cls(path.stat().st_size, 10**18, 10**18))
    monkeypatch.setattr(cache_module._FileState, "of", unseen)


@pytest.mark.usefixtures("deaf")
@pytest.mark.parametrize(
    ("size", "place"),
    [(5, 2), (40_000, 30_000), (500_000, 3), (500_000, 250_001), (500_000, 499_999)],
)
def test_a_sample_tells_where_no_time_does(tmp_path: Path, size: int, place: int) -> None:
    path, content = tmp_path / "a", bytearray(size)
    path.write_bytes(content)
    with MediaHashes(tmp_path / "cache") as hashes:
        before = hashes.of(path)
    content[place] = 1
    path.write_bytes(content)
    with MediaHashes(tmp_path / "cache") as hashes:
        assert hashes.bytes_to_read(path) == size
        assert hashes.of(path) == file_hash(path) != before


def test_hashes_of_earlier_versions_are_taken_once_more(tmp_path: Path, hashed: list[str]) -> None:
    path = old_file(tmp_path / "a")
    known = {str(path.resolve()): [path.stat().st_size, path.stat().st_mtime_ns, "0" * 32]}
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "hashes.json").write_text(json.dumps(known))
    for _ in range(2):
        with MediaHashes(tmp_path / "cache") as hashes:
            assert hashes.of(path) == file_hash(path)
    assert hashed == ["a"]


def test_windows_of_a_file_take_one_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = old_file(tmp_path / "a")
    with MediaHashes(tmp_path / "cache") as hashes:
        hashes.of(path)
    samples: list[Path] = []
    sample = cache_module._sample
    monkeypatch.setattr(
        cache_module, "_sample", lambda path, size: samples.append(path) or sample(path, size)
    )
    with MediaHashes(tmp_path / "cache") as hashes:
        assert {hashes.of(path) for _ in range(5)} == {file_hash(path)}
    assert samples == [path]


def test_what_is_still_to_be_read_is_counted_in_bytes(tmp_path: Path) -> None:
    path = old_file(tmp_path / "a")
    hashes = MediaHashes(tmp_path / "cache")
    assert hashes.bytes_to_read(path) == path.stat().st_size > 0
    hashes.of(path)
    assert hashes.bytes_to_read(path) == hashes.bytes_to_read(tmp_path / "nowhere") == 0


def test_a_file_written_a_moment_ago_is_not_remembered(tmp_path: Path, hashed: list[str]) -> None:
    path, now = tmp_path / "new", time.time_ns()
    hashes = MediaHashes(tmp_path / "cache")
    digests = set()
    for content in ("one", "two"):
        path.write_text(content)
        os.utime(path, ns=(now, now))  # a clock too coarse to tell them apart
        digests.add(hashes.of(path))
    assert len(digests) == 2
    assert hashed == ["new", "new"]


@pytest.mark.parametrize(
    "spoiled",
    [
        "",
        "{",
        "[1, 2]",
        '{"x": 3}',
        '{"PATH": [7]}',
        '{"PATH": [1, 2, 3]}',
        '{"PATH": [1, 2, 3, 4, 5, 6]}',
    ],
)
def test_an_unreadable_memory_is_an_empty_one(
    tmp_path: Path, hashed: list[str], spoiled: str
) -> None:
    path = old_file(tmp_path / "a")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "hashes.json").write_text(
        spoiled.replace("PATH", path.resolve().as_posix())
    )
    with MediaHashes(tmp_path / "cache") as hashes:
        hashes.of(path)
    assert MediaHashes(tmp_path / "cache").of(path)
    assert hashed == ["a"]


def test_a_long_pass_saves_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_SAVE_EVERY", 2)
    hashes = MediaHashes(tmp_path / "cache")
    for name, saved in (("a", False), ("b", True)):
        hashes.of(old_file(tmp_path / name))
        assert (tmp_path / "cache" / "hashes.json").exists() == saved


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read .*gone"):
        MediaHashes(tmp_path).of(tmp_path / "gone")


def test_shapes_are_read_from_the_header(cache: Cache) -> None:
    assert cache.shapes("media", KEY) is None
    cache.put("media", KEY, TENSORS, {})
    assert cache.shapes("media", KEY) == {"latents": (2, 3, 4), "mask": (2,)}
    path = entry(cache)
    path.write_bytes(path.read_bytes()[:-1])
    assert cache.shapes("media", KEY) is None and not path.exists()


def test_a_flipped_bit_is_found_at_the_first_read(
    cache: Cache, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.put("media", KEY, TENSORS, {})
    path = entry(cache)
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    assert cache.has("media", KEY), "its header is right"
    assert cache.get("media", KEY) is None and not path.exists()
    assert (
        capsys.readouterr().err
        == f"the cache entry {path} is damaged: it is removed, and encoded again\n"
    )


def test_an_entry_is_compared_once_in_a_process(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put("media", KEY, TENSORS, {})
    calls: list[object] = []
    own = cache_module.digest
    monkeypatch.setattr(
        cache_module, "digest", lambda tensors: calls.append(tensors) or own(tensors)
    )
    assert cache.get("media", KEY) and cache.get("media", KEY) and len(calls) == 1
    assert Cache(cache.folder).get("media", KEY) and len(calls) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"other": torch.zeros(2, 3, 4), "mask": TENSORS["mask"]},
        {"latents": torch.zeros(3, 2, 4), "mask": TENSORS["mask"]},
        {"latents": torch.zeros(2, 3, 4)},
    ],
    ids=["renamed", "axes swapped", "a tensor less"],
)
def test_a_changed_header_is_found_without_reading_the_tensors(
    cache: Cache, change: dict[str, torch.Tensor]
) -> None:
    cache.put("media", KEY, TENSORS, {})
    path = entry(cache)
    with cache_module.opened(path) as file:
        header = file.metadata()
    save_file(change, path, header)
    assert cache.shapes("media", KEY) is None and not path.exists()


def test_an_entry_of_an_earlier_version_needs_latents_and_no_digest(cache: Cache) -> None:
    cache.put("media", KEY, TENSORS, {})
    path = entry(cache)
    save_file(load_file(path), path, {"ditkit_key": KEY})
    assert cache.get("media", KEY) is not None
    save_file({"renamed": torch.zeros(3)}, path, {"ditkit_key": KEY})
    assert cache.shapes("media", KEY) is None and not path.exists()


def test_an_entry_that_may_not_be_read_is_said_as_such(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may read everything, as root may, sees the error through a stand-in."""
    cache.put("media", KEY, TENSORS, {})

    def denied(path: Path, mode: str = "r") -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", denied)
    for read in (cache.get, cache.shapes, cache.has):
        with pytest.raises(
            UserError,
            match=r"cannot read .*safetensors: Permission denied; correct its permissions",
        ):
            read("media", KEY)
    monkeypatch.undo()
    assert cache.get("media", KEY) is not None, "nothing was removed"


def test_an_entry_that_vanishes_while_it_is_opened_is_absent(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put("media", KEY, TENSORS, {})
    own = cache_module.safe_open

    def late(path: Path, framework: str) -> object:
        path.unlink()
        return own(path, framework=framework)

    monkeypatch.setattr(cache_module, "safe_open", late)
    assert cache.get("media", KEY) is None


def test_a_damaged_entry_that_cannot_be_removed_is_one_line(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put("media", KEY, TENSORS, {})
    entry(cache).write_bytes(b"no entry")

    def denied(path: Path, missing_ok: bool) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", denied)
    with pytest.raises(
        UserError, match="cannot remove .*Permission denied; correct its permissions"
    ):
        cache.get("media", KEY)


@pytest.mark.parametrize(
    "error",
    [
        OSError(24, "Too many open files"),
        OSError(5, "Input/output error"),
        MemoryError(),
        RuntimeError("unable to mmap 8 bytes"),
    ],
)
def test_a_shortage_is_no_damage_of_an_entry(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    cache.put("media", KEY, TENSORS, {})

    def short(path: Path, framework: str) -> None:
        raise error

    monkeypatch.setattr(cache_module, "safe_open", short)
    with pytest.raises(
        EnvironmentFault, match=r"safetensors cannot be read because .*, not because of its content"
    ):
        cache.get("media", KEY)
    monkeypatch.undo()
    assert cache.get("media", KEY) is not None, "nothing was removed"
