"""`wan-train --check` on the demo: what a person with Wan's own tokenizer, VAE and clips is shown,
in little time."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from ditkit_core.commands import cli
from ditkit_core.testing.demo import Demo
from ditkit_wan.spec import WAN


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return Demo.write(WAN, tmp_path_factory.mktemp("demo"))


def check(demo: Demo, run: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit status and findings of a check over the demo's inputs as they are in the run's
    folder."""
    config = [
        "--model.base",
        str(run / "inputs" / "checkpoint"),
        "--data.folder",
        str(run / "inputs" / "clips"),
    ]
    config += [
        "--run.folder",
        str(run),
        "--encode.cache",
        str(demo.cache),
        "--data.frames",
        "9",
        "--data.height",
        "64",
    ]
    config += [
        "--data.width",
        "64",
        "--model.dtype",
        "fp32",
        "--encode.text_dtype",
        "fp32",
        "--train.batch_size",
        "2",
    ]
    status = cli.run(WAN, "train", [*config, "--check", *flags])
    return status, json.loads((run / "check.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_demo_is_checked_in_little_time_and_long_captions_are_shown(
    demo: Demo, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(demo.inputs, run / "inputs")
    clip = next(iter(sorted((run / "inputs" / "clips").glob("*.mp4"))))
    began = time.process_time()
    status, found = check(demo, run)
    assert time.process_time() - began < 60
    assert status == 0 and not [each for each in found["findings"] if each["severity"] == "error"]
    assert found["captions"]["cut"] == [] and found["frames"]["dropped"] > 0
    (step,) = found["steps"]
    assert step["without_gradient"] == [] and step["reloaded"] is True and step["parameters"] > 0
    clip.with_suffix(".txt").write_text("red " * 600)
    status, found = check(demo, run, "--data.masks", str(demo.write_masks(tmp_path / "masks")))
    assert len(found["masks"]) == found["samples"] and all(
        abs(share - 0.5) < 0.02 for share in found["masks"]
    )
    (cut,) = found["captions"]["cut"]
    assert (
        status == 0
        and (cut["sample"], cut["tokens"]) == (clip.stem, 89)
        and cut["kept"].split() == ["red"] * 511
    )
