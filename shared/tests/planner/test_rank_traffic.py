"""Plans of ranks, next to bytes that real ranks have and send."""

import json
from pathlib import Path

import pytest
from planned_ranks import ARCH, CASES, SIZE, RankBytes, planned

from ditkit_core.testing.ranks import once
from ditkit_core.testing.scripts import run_script
from ditkit_core.testing.toy import TOY

SCRIPT = Path(__file__).parents[1] / "support" / "planned_ranks.py"


def measure(folder: Path) -> str:
    run_script(SCRIPT, folder)
    return (folder / "ranks.json").read_text()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_rank_has_and_sends_what_is_planned(tmp_path_factory, name):
    case, base = CASES[name], tmp_path_factory.getbasetemp()
    measured = RankBytes(**json.loads(once(base, SCRIPT.stem, measure))[name])
    plan = planned(case.job(TOY, ARCH, SIZE), case)
    assert plan.sent == pytest.approx(measured.sent, rel=0.01) and measured.sent > 10**6
    assert measured.told == pytest.approx(measured.sent, rel=0.01)
    assert plan.peak == pytest.approx(measured.peak, rel=0.05)
