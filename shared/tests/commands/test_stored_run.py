"""A run that commit 58d647d saved goes on to the same bits."""

from pathlib import Path

import pytest
import torch
from media_files import picture
from safetensors.torch import save_file

from ditkit_core.testing.specs import altered
from ditkit_core.testing.stored_run import StoredRun, keep
from ditkit_core.testing.toy import TOY, ToyArch, official_name
from ditkit_core.testing.world import make_model

SPEC = altered(TOY, presets={"tiny": ToyArch(dim=16)})
STORED = StoredRun(SPEC, Path(__file__).parents[1] / "fixtures" / "run_58d647d.zip")

SETTINGS = {
    "model": {"preset": "tiny", "transformer": "inputs/toy.safetensors"},
    "adapter": {"rank": 2, "dropout": 0.1},
    "data": {"folder": "inputs/clips", "frames": 1, "height": 16, "width": 16},
    "flow": {"weighting": "bell"},
    "train": {"caption_dropout": 0.2, "seed": 5},
}


def write(folder: Path, commit: str) -> StoredRun:
    """Make a stored run in an empty folder with the code as it is; `STORED` was made so with that
    of 58d647d."""
    (folder / "inputs").mkdir()
    model = make_model(SPEC, SPEC.architecture.presets["tiny"], dtype=torch.bfloat16)
    state = {
        official_name(name): tensor.bfloat16().contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(state, folder / "inputs" / "toy.safetensors")
    for number, colour in enumerate(("teal", "red", "navy", "gold", "white")):
        file = picture(folder / "inputs" / "clips" / f"{number}.png", (16, 16), colour)
        file.with_suffix(".txt").write_text(f"a {colour} picture", encoding="utf-8", newline="\n")
    return keep(SPEC, folder, commit=commit, settings=SETTINGS)


def test_a_stored_run_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    STORED.check(tmp_path)
    assert "changed since the last part" not in capsys.readouterr().out, (
        "every stored key means what it meant"
    )


def test_a_run_that_is_kept_now_is_continued(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    write(tmp_path / "made", "now").check(tmp_path / "work")
