"""Reading a cache against its digests, and making room in it."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ditkit_core.encoding.cache import Cache, Rule, digest, key, keys_in, parse_rule, prune, verify
from ditkit_core.errors import UserError

NAMES = ("a", "b", "c")
DAY = 86400
NOW = 1_700_000_000.0


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """Three entries: of ten days, two days and a minute ago."""
    cache = Cache(tmp_path / "cache")
    for i, (name, age) in enumerate(zip(NAMES, (10 * DAY, 2 * DAY, 60), strict=True)):
        tensors = {
            "latents": torch.arange(6.0).reshape(2, 3) + i,
            "mask": torch.ones(1, dtype=torch.bfloat16),
        }
        cache.put("media", key(name), tensors, {})
        os.utime(path_of(cache, name), (NOW - age, NOW - age))
    return cache


def path_of(cache: Cache, name: str) -> Path:
    return cache.folder / "media" / key(name)[:2] / f"{key(name)}.safetensors"


def left(cache: Cache) -> set[str]:
    return {name for name in NAMES if path_of(cache, name).exists()}


def test_a_sound_cache_is_all_read_and_kept(cache: Cache) -> None:
    advanced: list[float] = []
    assert verify(cache, advanced.append) == 0
    assert left(cache) == set(NAMES) and sum(advanced) == 3


def test_one_flipped_bit_is_found_and_its_entry_removed(cache: Cache) -> None:
    path = path_of(cache, "b")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert cache.has("media", key("b")), "its length is right"
    assert verify(cache) == 1
    assert left(cache) == {"a", "c"} and verify(cache) == 0


def test_torn_and_exchanged_entries_are_found(cache: Cache) -> None:
    path_of(cache, "a").write_bytes(path_of(cache, "a").read_bytes()[:-5])
    path_of(cache, "b").write_bytes(path_of(cache, "c").read_bytes())
    assert verify(cache) == 2 and left(cache) == {"c"}


def test_entries_of_earlier_versions_are_kept(cache: Cache) -> None:
    path = path_of(cache, "b")
    save_file(load_file(path), path, {"ditkit_key": key("b")})
    assert verify(cache) == 0 and left(cache) == set(NAMES)


def test_the_digest_tells_names_types_shapes_and_values_apart() -> None:
    zeros = torch.zeros(2, 3)
    different = [
        {"a": zeros}, {"b": zeros}, {"a": zeros.int()}, {"a": zeros.T}, {"a": zeros + 1},
        {"a": torch.zeros(())},
        {"a": torch.zeros(0)}, {"a": zeros, "b": zeros},
    ]  # fmt: skip
    assert len({digest(tensors) for tensors in different}) == len(different)
    turned = torch.arange(6.0).reshape(3, 2).T
    assert digest({"a": turned}) == digest({"a": turned.contiguous()})


def test_entries_go_by_age_by_size_and_by_need(cache: Cache) -> None:
    size = path_of(cache, "a").stat().st_size
    assert prune(cache, Rule(days=30.0), now=NOW).removed == 0
    done = prune(cache, Rule(days=5.0), now=NOW)
    assert (done.removed, done.removed_bytes, done.remaining, done.left_bytes) == (
        1,
        size,
        2,
        2 * size,
    )
    assert left(cache) == {"b", "c"}
    assert prune(cache, Rule(unused=True), {key("b")}, now=NOW).removed == 0, (
        "b is kept, c is of this hour"
    )
    assert prune(cache, Rule(unused=True), now=NOW).removed == 1 and left(cache) == {"c"}


def test_a_size_takes_what_was_needed_longest_ago_first(cache: Cache) -> None:
    size = path_of(cache, "a").stat().st_size
    assert prune(cache, Rule(bytes=2 * size), {key("a")}, now=NOW).removed == 1
    assert left(cache) == {"a", "c"}
    assert prune(cache, Rule(bytes=1), now=NOW).remaining == 1, "what is of this hour stays"


def test_asking_for_an_entry_marks_it_as_needed(cache: Cache) -> None:
    assert cache.has("media", key("a"))
    assert prune(cache, Rule(days=5.0), now=path_of(cache, "a").stat().st_mtime + DAY).removed == 2
    assert left(cache) == {"a"}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("unused", Rule(unused=True)), ("30d", Rule(days=30.0)), ("1.5D", Rule(days=1.5)), ("50GB", Rule(bytes=50 * 10**9)),
        ("2 GiB", Rule(bytes=2 * 2**30)), ("0.5tb", Rule(bytes=5 * 10**11)),
    ],
)  # fmt: skip
def test_rules_as_they_are_written(text: str, rule: Rule) -> None:
    assert parse_rule(text) == rule


@pytest.mark.parametrize(
    "text", ["", "all", "30", "d", "-3d", "0d", "1e9GB", "GB", "3 weeks", "٣d"]
)
def test_what_is_no_rule_is_said(text: str) -> None:
    with pytest.raises(
        UserError, match="is not a rule; write unused, or days such as 30d, or a size such as 50GB"
    ):
        parse_rule(text)


def test_the_keys_of_runs_are_those_that_they_list(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(
        json.dumps({"a": ["m1", "t1", "reference r1", "vace v1"], "(base)": ["x", ""]})
    )
    assert keys_in([tmp_path / "data.json"]) >= {"m1", "t1", "r1", "v1"}
    (tmp_path / "bad.json").write_text("[")
    with pytest.raises(
        UserError,
        match="bad.json is not readable JSON .*; remove that run, or prune by age or size",
    ):
        keys_in([tmp_path / "bad.json"])


def test_leftovers_of_killed_writes_go_and_those_of_this_hour_stay(cache: Cache) -> None:
    old, new = (
        path_of(cache, "a").with_name(f".x.safetensors.{name}.tmp") for name in ("old", "new")
    )
    for path, age in ((old, 2 * 3600), (new, 60)):
        path.write_bytes(b"half")
        os.utime(path, (NOW - age, NOW - age))
    assert prune(cache, Rule(days=30.0), now=NOW).removed == 0
    assert not old.exists() and new.exists() and left(cache) == set(NAMES)


def test_what_another_process_removes_meanwhile_is_passed_over(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = list(cache.entries())
    path_of(cache, "b").unlink()
    monkeypatch.setattr(Cache, "entries", lambda cache: iter(entries))
    assert verify(cache) == 0
    assert prune(cache, Rule(days=30.0), now=NOW).remaining == 2
