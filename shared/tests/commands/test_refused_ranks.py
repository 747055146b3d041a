"""Random `[ranks]` tables on real ranks: whatever they say, all ranks take it or all refuse it, and
none waits for another."""

import json
import sys
from pathlib import Path

import pytest

from ditkit_core.testing.scripts import run_script

SCRIPT = Path(__file__).parents[1] / "support" / "refused_ranks_of_toy.py"
TABLES = 67
"""On each of two, three and four ranks. `run/test_checks.py` has the same of one process, daily."""


@pytest.mark.exhaustive
@pytest.mark.timeout(1000)
@pytest.mark.skipif(sys.platform == "win32", reason="ranks are forked")
def test_no_table_ends_in_a_traceback_or_in_ranks_that_wait(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    run_script(SCRIPT, folder, str(TABLES), seconds=900)
    for size, found in json.loads((folder / "worlds.json").read_text()).items():
        assert found["ended"] == {"codes": {}}
        name = f"{size} of {TABLES}"
        every = [
            json.loads((folder / f"{name} {rank}.json").read_text()) for rank in range(int(size))
        ]
        assert all(statuses == every[0] for statuses in every), "on all ranks the same"
        assert [status == 0 for status in every[0]] == found["fits"]
        assert 3 < sum(found["fits"]) < TABLES - 3 and set(every[0]) == {0, 1, 2}
        for rank in range(int(size)):
            assert "Traceback" not in (folder / f"{name} {rank}.log").read_text()
