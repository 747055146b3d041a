"""Samples that ranks divide among themselves: files, list and image of all as of one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_samples import ARCH, SIZES, requests_for

from ditkit_core.distributed.ranks import Ranks
from ditkit_core.models.protocol import run_plain
from ditkit_core.sampling.denoise import DenoiserStage, generate, single_stage
from ditkit_core.sampling.render import SampleFiles, render_samples
from ditkit_core.sampling.shares import SampleShares
from ditkit_core.testing.ranks import run_ranks_once
from ditkit_core.testing.toy import TOY, ToySampler
from ditkit_core.testing.world import make_model

SCRIPT = Path(__file__).parents[1] / "support" / "ranks_of_toy.py"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank found."""
    return [
        table["samples"] for table in run_ranks_once(SCRIPT, base=tmp_path_factory.getbasetemp())
    ]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("case", ["both", "first", "divided"])
@pytest.mark.parametrize("name", list(SIZES))
def test_what_ranks_write_is_bitwise_what_one_process_writes(
    tables: list[Any], name: str, case: str
) -> None:
    """Replicas, the first rank alone, and ranks that divide the weights; three samples of several
    sizes, and the image of all."""
    alone, first, second = (
        tables[0][f"{name} alone"],
        *(table[f"{name} {case}"] for table in tables),
    )
    assert len(alone["digests"]) == 5, "three samples, their list, and the image of all"
    assert first == alone
    assert second["files"] == ([] if case == "first" else alone["files"][1:2])


@pytest.mark.parametrize("count", [0, 1, 3, 8])
@pytest.mark.parametrize(("size", "num"), [(1, 1), (2, 2), (3, 2), (8, 8)])
def test_every_sample_has_one_rank_and_the_first_rank_has_the_first(
    size: int, num: int, count: int
) -> None:
    shares = [
        SampleShares(ranks=Ranks(rank, size), num=num).local_indices(count) for rank in range(size)
    ]
    assert sorted(place for share in shares for place, _ in share) == list(range(count))
    assert all(counts for share in shares for _, counts in share)
    lengths = [len(share) for share in shares]
    assert lengths == sorted(lengths, reverse=True) and max(lengths[:num]) - min(lengths[:num]) <= 1
    assert not any(lengths[num:])


@pytest.mark.parametrize("count", [0, 1, 3, 8, 9])
def test_ranks_that_divide_the_weights_generate_equally_many(count: int) -> None:
    every = [SampleShares.of(Ranks(rank, 4, shard=4)).local_indices(count) for rank in range(4)]
    assert {len(share) for share in every} == {-(-count // 4)}
    assert sorted(place for share in every for place, counts in share if counts) == list(
        range(count)
    )


def test_ranks_that_run_in_step_end_together_and_others_when_they_are_asked() -> None:
    class Other(Ranks):
        def any(self, flag: bool) -> bool:
            return True

    assert SampleShares.of(Other(0, 2, shard=2)).ends(False)
    assert not SampleShares.of(Other(0, 2)).ends(False) and SampleShares.of(Other(0, 2)).ends(True)


@pytest.mark.parametrize("ends_here", [True, False])
def test_samples_that_are_ended_on_one_rank_have_no_list(tmp_path: Path, ends_here: bool) -> None:
    class Other(Ranks):
        """Another rank ends if this one does not."""

        def any(self, flag: bool) -> bool:
            assert flag == ends_here
            return True

    model: Any = make_model(TOY, ARCH)
    to, steps = SampleFiles(folder=tmp_path, stem="step-000002", fps=8.0), list[None]()

    def on_step() -> bool:
        steps.append(None)
        return ends_here and len(steps) == 3

    shares = SampleShares(ranks=Other(0, 2), num=2)
    sampler, stages = ToySampler(torch.device("cpu")), single_stage(model, run_plain)
    assert render_samples(stages, sampler, requests_for("images"), to, on_step, shares) == []
    assert len(steps) == (3 if ends_here else 4), "two steps of each of two samples"
    assert len(list(tmp_path.iterdir())) == (1 if ends_here else 2), (
        "what is done stays, and nothing lists it"
    )
    assert model.training


def test_samples_that_are_ended_in_the_first_of_two_stages_do_not_open_the_second() -> None:
    model: Any = make_model(TOY, ARCH)
    opened: list[str] = []

    @contextmanager
    def stage(name: str) -> Iterator[tuple[Any, Any]]:
        opened.append(name)
        yield model, run_plain

    stages = [
        DenoiserStage(opened=partial(stage, name), min_sigma=least)
        for name, least in (("high", 0.6), ("low", 0.0))
    ]
    jobs = [request.job for request in requests_for("images")]
    assert list(generate(ToySampler(torch.device("cpu")), jobs, stages, lambda: True)) == []
    assert opened == ["high"]
    assert len(list(generate(ToySampler(torch.device("cpu")), jobs, stages, lambda: False))) == 3
    assert opened == ["high", "high", "low"]
