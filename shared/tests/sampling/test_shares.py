"""Samples that ranks divide among themselves: files, list and image of all as of one process."""

from pathlib import Path
from typing import Any

import pytest
from toy_samples import SIZES

from ditkit_core.io.ranks import Ranks
from ditkit_core.sampling.shares import SampleShares
from ditkit_core.testing.ranks import run_ranks_once

SCRIPT = Path(__file__).parents[1] / "support" / "ranks_of_toy.py"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank found."""
    return [table["samples"] for table in run_ranks_once(SCRIPT, base=tmp_path_factory.getbasetemp())]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("case", ["both", "first", "divided"])
@pytest.mark.parametrize("name", list(SIZES))
def test_what_ranks_write_is_bitwise_what_one_process_writes(tables: list[Any], name: str, case: str) -> None:
    """Replicas, the first rank alone, and ranks that divide the weights; three samples of several sizes, and the image of all."""
    alone, first, second = tables[0][f"{name} alone"], *(table[f"{name} {case}"] for table in tables)
    assert len(alone["digests"]) == 5, "three samples, their list, and the image of all"
    assert first == alone
    assert second["files"] == ([] if case == "first" else alone["files"][1:2])


@pytest.mark.parametrize("count", [0, 1, 3, 8])
@pytest.mark.parametrize(("size", "num"), [(1, 1), (2, 2), (3, 2), (8, 8)])
def test_every_sample_has_one_rank_and_the_first_rank_has_the_first(size: int, num: int, count: int) -> None:
    shares = [SampleShares(ranks=Ranks(rank, size), num=num).own(count) for rank in range(size)]
    assert sorted(place for share in shares for place, _ in share) == list(range(count))
    assert all(counts for share in shares for _, counts in share)
    lengths = [len(share) for share in shares]
    assert lengths == sorted(lengths, reverse=True) and max(lengths[:num]) - min(lengths[:num]) <= 1
    assert not any(lengths[num:])


@pytest.mark.parametrize("count", [0, 1, 3, 8, 9])
def test_ranks_that_divide_the_weights_generate_equally_many(count: int) -> None:
    every = [SampleShares.of(Ranks(rank, 4, shard=4)).own(count) for rank in range(4)]
    assert {len(share) for share in every} == {-(-count // 4)}
    assert sorted(place for share in every for place, counts in share if counts) == list(range(count))
