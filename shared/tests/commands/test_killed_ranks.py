"""A run of two ranks of which one is killed again and again, by itself to its end: bitwise that of
one process that was never disturbed."""

import json
import sys
from pathlib import Path

import pytest

from ditkit_core.testing.scripts import output_of

SCRIPT = Path(__file__).parents[1] / "support" / "killed_ranks_of_toy.py"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ranks are forked")


@pytest.mark.parametrize(
    ("kills", "inside"),
    [
        pytest.param(3, 1, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param(50, 15, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)]),
    ],
)
def test_random_kills_of_random_ranks_change_no_bit(tmp_path, kills, inside):
    """torchrun starts both ranks again after each kill, `inside` of which are inside a save."""
    output_of(SCRIPT, str(tmp_path), str(kills), str(inside), seconds=3000)
    found = json.loads((tmp_path / "kills.json").read_text())
    assert found["killed"] == found["alone"] == {"codes": {}}, (
        tmp_path / "killed 0.log"
    ).read_text()[-3000:]
    assert (
        len(found["rows"]) == kills
        and sum(was_saving for *_, was_saving in found["rows"]) >= inside
    )
    saved = f"state/step-{found['steps']:06d}/state.json"
    # It has the digests of weights, optimizer, average and metrics.
    assert json.loads((tmp_path / "killed" / saved).read_text()) == json.loads(
        (tmp_path / "alone" / saved).read_text()
    )
    assert not list((tmp_path / "killed" / "state").glob(".*.tmp"))
