"""The programs of tools/demo that train the base of a demo which teaches a place or a motion, in
their smallest runs, and what the bases share."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ditkit_flux2.demo import write as flux2
from ditkit_flux3.demo import write as flux3
from ditkit_krea2.demo import write as krea2
from ditkit_qwenimage.demo import write as qwenimage
from workspace import ROOT


@pytest.mark.parametrize(("first", "second"), [(flux2, flux3), (krea2, qwenimage)])
def test_the_vae_of_a_later_demo_is_that_of_an_earlier(first: Any, second: Any) -> None:
    theirs, ours = ((demo.WEIGHTS / "vae.safetensors").read_bytes() for demo in (first, second))
    assert ours == theirs


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "stages"),
    [
        *((family, 2) for family in ("flux2", "krea2", "ltx", "qwen")),
        *((family, 1) for family in ("flux3", "qwenimage", "zimage")),
    ],
)
def test_two_steps_of_every_stage_make_the_weights(
    family: str, stages: int, tmp_path: Path
) -> None:
    program = ROOT / "tools" / "demo" / f"train_demo_base_{family}.py"
    command = [sys.executable, str(program), "--steps", *["2"] * stages]
    command += ["--work", str(tmp_path / "work"), "--to", str(tmp_path / "base")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(file.stem for file in (tmp_path / "base").iterdir()) == ["transformer", "vae"]
    measured = ("held-out images of each size", "| base | known | - | 48 |")
    if family == "ltx":
        measured = ("dB of held-out clips", "48 samples of known motions")
    assert all(text in done.stdout for text in measured)
