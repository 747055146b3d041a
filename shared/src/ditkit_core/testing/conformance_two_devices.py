"""A family's demo on two devices under torchrun against one: over NCCL where there are two GPUs,
and over gloo on the CPU."""

import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from ditkit_core.testing.conformance_replicas import losses
from ditkit_core.testing.gpu import ON_A_GPU

_STEPS = 6
_FLAGS = (
    *(
        "--train.steps",
        str(_STEPS),
        "--save.every_steps",
        str(_STEPS),
        "--held_out.every_steps",
        str(_STEPS),
    ),
    *(
        "--sample.every_steps",
        "0",
        "--sample.prompts",
        "[]",
        "--sample.captions",
        "0",
        "--log.tensorboard",
        "false",
    ),
    *("--log.every_steps", "1"),
)
_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


class TwoDevicesConformance:
    """Inherit, and set `module`. The CPU runs the same lines, so that nothing in them is new when
    two GPUs come."""

    module: ClassVar[str]
    """Of the family's train command."""

    @pytest.mark.parametrize(
        "device",
        [
            pytest.param("cuda", marks=[pytest.mark.slow, ON_A_GPU, _TWO_GPUS]),
            pytest.param("cpu", marks=pytest.mark.exhaustive),
        ],
    )
    @pytest.mark.parametrize(
        "divided", [(), ("--ranks.shard", "2"), ("--ranks.context", "2")], ids=" ".join
    )
    def test_two_devices_train_what_one_trains(
        self, tmp_path: Path, device: str, divided: tuple[str, ...]
    ) -> None:
        """Kernels of a GPU may add in any order, and AdamW takes a whole step where a gradient is
        only rounding: 1 % in all steps."""
        runs = {name: tmp_path / name for name in ("one", "two")}
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        flags = ("--demo", *_FLAGS, "--train.device", device, "--encode.device", device)
        for name, start, more in (("one", (), ()), ("two", torchrun, divided)):
            command = [
                sys.executable,
                *start,
                "-m",
                self.module,
                "--run.folder",
                str(runs[name]),
                *flags,
                *more,
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            assert "verified: diffusers loads" in done.stdout
        expected, actual = ([loss for loss, _ in losses(run)] for run in runs.values())
        assert len(expected) == len(actual) == _STEPS
        assert actual == pytest.approx(expected, rel=1e-2)
