"""The train command started by torchrun: the demo on two ranks is that of one process. Wan's tests
have what goes wrong."""

import json
import subprocess
import sys

import pytest

from ditkit_core.commands import cli
from ditkit_core.testing.conformance_two_devices import TwoDevicesConformance
from ditkit_flux2.spec import FLUX2

STEPS = 4
FLAGS = [
    *(
        "--train.device",
        "cpu",
        "--encode.device",
        "cpu",
        "--train.threads",
        "1",
        "--train.steps",
        str(STEPS),
    ),
    *("--save.every_steps", "2", "--held_out.every_steps", "2", "--log.tensorboard", "false"),
    *("--sample.every_steps", "0", "--sample.prompts", "[]", "--sample.captions", "0"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "divided", [(), ("--ranks.shard", "2"), ("--ranks.context", "2")], ids=" ".join
)
def test_two_ranks_train_what_one_process_trains(tmp_path, divided):
    """Replicas bitwise: the index of a save has the digests of weights, optimizer, average and
    metrics."""
    runs = {name: tmp_path / name for name in ("alone", "two")}
    assert cli.run(FLUX2, "train", ["--demo", "--run.folder", str(runs["alone"]), *FLAGS]) == 0
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [
        *start,
        "-m",
        "ditkit_flux2.train",
        "--demo",
        "--run.folder",
        str(runs["two"]),
        *FLAGS,
        *divided,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "verified: diffusers loads" in done.stdout
    one, two = (
        json.loads((run / f"state/step-{STEPS:06d}/state.json").read_text())
        for run in runs.values()
    )
    assert two["held_out"] == pytest.approx(one["held_out"], rel=1e-4) and one["held_out"]
    if not divided:
        assert two == one


class TestTwoDevices(TwoDevicesConformance):
    module = "ditkit_flux2.train"
