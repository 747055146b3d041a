"""Ranks that divide the weights read their own rows: bitwise those of a whole model."""

import json
from pathlib import Path
from typing import Any

import pytest
from rows_of_toy import CASES, RARER

from ditkit_core.testing.ranks import once
from ditkit_core.testing.scripts import run_script

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

SCRIPT = Path(__file__).parents[1] / "support" / "rows_of_toy.py"
WORLDS = (2, 5)
"""Of five ranks, rows cannot be divided evenly, and blocks of nf4 begin in one and end in the
next."""


def load(folder: Path) -> Any:
    run_script(SCRIPT, folder)
    return {
        str(num): [
            json.loads((folder / str(num) / f"{rank}.json").read_text()) for rank in range(num)
        ]
        for num in WORLDS
    }


@pytest.fixture(params=WORLDS)
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = once(tmp_path_factory.getbasetemp(), SCRIPT.stem, load)[
        str(request.param)
    ]
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_rows_are_those_of_the_whole_model(ranks: list[dict[str, Any]], name: str) -> None:
    """Base, scales, adapters, and what is trained."""
    assert [each[name]["differ"] for each in ranks] == [[]] * len(ranks)
    assert all(each[name]["shard"] < each[name]["whole"] for each in ranks)


def test_what_is_trained_is_the_memory_that_the_model_runs_with(
    ranks: list[dict[str, Any]],
) -> None:
    """Also on a rank with fewer rows than others, whose rows FSDP2 pads: an optimizer would update
    rows that nobody reads."""
    assert [each["full"]["apart"] for each in ranks] == [[]] * len(ranks)


def test_a_model_that_has_run_has_the_weights_of_a_save_in_its_next_forward(
    ranks: list[dict[str, Any]],
) -> None:
    """As `--init-from` loads one after the model has generated class images."""
    assert all(each["lora in fp32"]["restored"] for each in ranks)


@pytest.mark.parametrize("name", [name for name in CASES if "merged" not in name])
def test_all_ranks_together_read_the_file_once(ranks: list[dict[str, Any]], name: str) -> None:
    """But for nf4 where a block of weights with one scale has rows of two ranks: 96 columns are one
    and a half blocks."""
    read, file = sum(each[name]["read"] for each in ranks), ranks[0][name]["file"]
    if "nf4" in name and len(ranks) == 5:
        assert read > 1.05 * file
    else:
        assert file <= read <= 1.05 * file


@pytest.mark.parametrize("name", CASES)
def test_a_host_never_has_more_than_its_shard_and_a_tensor(
    ranks: list[dict[str, Any]], name: str
) -> None:
    """Rounding to nf4 takes several copies of a part of a tensor, which is all of one as small as
    these; the norms of a DoRA's rows take two."""
    copies = 6 if "nf4" in name else 2 if "dora" in name else 1
    for each in ranks:
        assert (
            each[name]["shard"]
            <= each[name]["peak"]
            <= each[name]["shard"] + copies * 4 * each[name]["largest"]
        )


@pytest.mark.parametrize(
    "name", [name for name, (adapter, *_) in CASES.items() if adapter.method == "lora"]
)
def test_an_adapter_is_exported_with_one_whole_weight_at_a_time(
    ranks: list[dict[str, Any]], name: str
) -> None:
    """A DoRA's magnitudes over the norm of the base's rows need that. The last one is kept until
    the next one is gathered."""
    found = ranks[0][name]["exported"]
    assert found["same"]
    assert 0 < found["most"] <= found["trained"] + 2 * found["largest"]
    assert 4 * found["largest"] < ranks[0][name]["whole"] - found["trained"], (
        "or the base would fit into it"
    )


def test_what_stays_whole_is_of_the_rarer_dtype(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        assert {name: bool(found["undivided"]) for name, found in each.items()} == {
            name: name == "full in bf16" for name in CASES
        }
        assert all(name.endswith(RARER) for name in each["full in bf16"]["undivided"])
