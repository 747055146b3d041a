"""The page of tasks: each piece of a run file is accepted with the model that it is for, and trains
in miniature."""

import json
import math
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from ditkit_core.commands import cli
from ditkit_core.config.resolve import resolve
from ditkit_core.config.toml import read_config_file
from ditkit_core.encoding.prior_preservation import PRIOR_MARK
from ditkit_core.families.demo_motions import CLIPS
from ditkit_core.run.checks import check_settings
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_flux2.spec import FLUX2
from ditkit_wan.demo.write import write_checkpoint
from ditkit_wan.spec import WAN
from workspace import ROOT

PAGE = (ROOT / "docs/tasks.md").read_text(encoding="utf-8")
PIECES = [
    pytest.param(family, variant, text, id=f"{number}-{family}")
    for number, (family, variant, text) in enumerate(
        re.findall(r"<!-- run: (\w+) ?(\S*) -->\n```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    )
]
SPECS = {"wan": (WAN, "t2v-1.3b"), "flux2": (FLUX2, "klein-base-4b")}
FILES = ("adapter.init", "base.merge", "base.assistant", "sample.adapter")
"""Keys that name files of adapters."""
FOLDERS = {
    "style": "a circle", "photos": "a woman at a desk", "anna": "annx, a woman",
    "ben": "benx, a man",
    "class_images": "a dog", "before": "", "after": "make it blue",
}  # fmt: skip
"""Folders that the pieces name, and the caption of their pictures."""


def test_every_piece_of_the_page_is_tried():
    assert len(PIECES) == PAGE.count("```toml") > 12


@pytest.mark.parametrize(("family", "variant", "text"), PIECES)
def test_a_piece_is_accepted_with_its_model(family, variant, text, tmp_path):
    spec, preset = SPECS[family]
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    overrides = {"model.preset": variant or preset, "model.base": "OWNER/NAME"}
    overrides |= {key: "" if key in ("adapter.init", "base.assistant") else () for key in FILES}
    config = resolve(RunConfig, file=file, flags=overrides)
    check_settings(create_run(spec, config))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with what the pieces name: pictures, clips, adapters of each family, and the demos'
    checkpoints."""
    folder = tmp_path_factory.mktemp("world")
    for name, caption in FOLDERS.items():
        (folder / name).mkdir()
        for number in range(12):
            pixels = np.random.default_rng([number, len(name)]).integers(
                0, 255, (64, 64, 3), dtype=np.uint8
            )
            Image.fromarray(pixels).save(
                folder / name / f"{name if name in ('anna', 'ben') else 'a'}{number}.png"
            )
            if caption:
                text = folder / name / f"{name if name in ('anna', 'ben') else 'a'}{number}.txt"
                text.write_text(f"{caption} {number}")
    for name, (spec, _) in SPECS.items():
        spec.demo.write(folder / name)
    shutil.copytree(folder / "wan/clips", folder / "clips")
    write_checkpoint(folder / "t2v-a14b", [clip.caption for clip in CLIPS], "t2v-a14b")
    return folder


def train(folder, family, run, text, *, base=""):
    """Two steps with a piece of a run file, and what the demo's tiny models need. Returns the
    records of the metrics."""
    spec, _ = SPECS[family]
    file = folder / f"{run}.toml"
    file.write_text(text, encoding="utf-8")
    piece = read_config_file(RunConfig, file)
    flags = {
        "run.folder": f"runs/{run}", "model.base": base or f"{family}/checkpoint",
        "model.dtype": "fp32", "encode.text_dtype": "fp32",
        "encode.cache": f"cache_{family}", "train.threads": 1, "train.steps": 2,
        "train.batch_size": 2, "save.every_steps": 1,
        "log.tensorboard": False, "sample.steps": 2, "sample.every_steps": 0,
    }  # fmt: skip
    flags |= {"data.frames": 9} if family == "wan" else {}
    flags |= (
        {"data.resolutions": [32, 64]}
        if "data.resolutions" in piece
        else {"data.height": 64, "data.width": 64}
    )
    flags |= {"data.bucket_step": 16, "data.folder": "clips" if family == "wan" else "photos"}
    for key in ("data.folder", "optim.lr", "adapter.init"):
        if key in piece:
            flags.pop(key, None)
    if "data.folders" in piece:
        del flags["data.folder"]
    if "held_out.clips" in piece:
        flags |= {"held_out.clips": 2, "held_out.every_steps": 1, "held_out.sigmas": [0.3, 0.7]}
    if "prior.images" in piece:
        flags["prior.images"] = 2
    words = [
        word
        for key, value in flags.items()
        for word in (f"--{key}", value if isinstance(value, str) else json.dumps(value))
    ]
    assert cli.run(spec, "train", [str(file), *words]) == 0
    metrics = next((folder / "runs" / run).rglob("metrics.jsonl"))
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", SPECS)
def test_the_pieces_train(family, world, monkeypatch):
    monkeypatch.chdir(world)
    train(world, family, f"{family}-first", "[adapter]\nrank = 16\n")
    file = world / "runs" / f"{family}-first" / "exports" / f"{family}-first.safetensors"
    for name in re.findall(r'"(\w+\.safetensors)', PAGE):
        shutil.copy(file, world / name)
    for piece in PIECES:
        of, variant, text = piece.values
        if of != family:
            continue
        records = train(world, family, f"task{piece.id}", text, base=variant)
        assert [math.isfinite(record["loss"]) for record in records if "loss" in record] == [
            True,
            True,
        ], piece.id
        if "[prior]\n" in text and "match_base" not in text:
            trained_on = (world / "runs" / f"task{piece.id}" / "data.json").read_text(
                encoding="utf-8"
            )
            assert trained_on.count(PRIOR_MARK) >= 2, piece.id
        if "clips = " in text:
            assert any("held_out" in record for record in records), piece.id
        assert list((world / "runs" / f"task{piece.id}").rglob("exports/*.safetensors"))
