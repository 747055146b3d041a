"""Several ranks that train one run as replicas."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from replicas_of_toy import DAILY, EVERY, WORLDS

from ditkit_core.testing.conformance_replicas import ReplicaConformance


class TestReplicas(ReplicaConformance):
    script = Path(__file__).parents[1] / "support" / "replicas_of_toy.py"
    worlds = WORLDS
    continued = DAILY

    def test_more_micro_batches_need_no_more_exchanges(self, folder):
        """Two replicas exchange gradients once a step, whether they add up two micro-batches each or four."""
        ranks = json.loads((folder / "ranks.json").read_text())["2"]
        names = "lora in bf16", "lora, eight micro-batches"
        four, eight = ([each[name]["exchanges"] for each in ranks] for name in names)
        assert four == eight and min(four) > 0


@pytest.mark.exhaustive
def test_a_run_goes_on_from_any_number_of_ranks_with_any_other(tmp_path):
    script = str(TestReplicas.script)
    assert subprocess.run([sys.executable, script, str(tmp_path), "all"], timeout=280, check=False).returncode == 0
    assert len(EVERY) == 16
    for pair in EVERY:
        TestReplicas.check_continued(tmp_path, *pair)
