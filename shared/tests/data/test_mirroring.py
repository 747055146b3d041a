"""Datasets that may be mirrored, and clips that are."""

from pathlib import Path

import pytest
import torch
from media_files import numbered_video
from one_line import assert_one_line

from ditkit_core.api.dataset import check_flip
from ditkit_core.data.dataset import Sample
from ditkit_core.data.masks import read_mask
from ditkit_core.data.media.clip import read_clip, write_image
from ditkit_core.models.conditions import Column


def sample(caption: str, id: str = "a", **controls: str) -> Sample:
    return Sample(
        id=id,
        media=Path(f"{id}.png"),
        captions=("a hat", caption),
        frames=1,
        height=8,
        width=8,
        controls=controls,
    )


@pytest.mark.parametrize(
    ("caption", "word"),
    [
        ("a man on the left", "left"),
        ("He turns RIGHT.", "RIGHT"),
        ("a left-handed guitar", "left-handed"),
        ("the rightmost tree", "rightmost"),
        ("it spins counter-clockwise", "counter-clockwise"),
        ("clockwise", "clockwise"),
        ("镜头向左移动", "左"),
        ("links steht ein Baum", "links"),
        ("une voiture à gauche", "gauche"),
    ],
)
def test_captions_that_name_a_side_are_refused(caption: str, word: str) -> None:
    message = assert_one_line(
        lambda: check_flip([sample("a cat", "b"), sample(caption)], ()), "data.flip"
    )
    assert f"the caption of a says: {word!r}" in message and "set data.flip = false" in message
    message = assert_one_line(
        lambda: check_flip([sample(caption), sample(caption, "b")], ()), "data.flip"
    )
    assert "(1 more do)" in message


@pytest.mark.parametrize(
    "caption", ["bright upright copyright", "leftovers", "a cat", "", "he leaves", "drinks"]
)
def test_other_captions_are_accepted(caption: str) -> None:
    check_flip([sample(caption)], ())


def test_conditions_that_cannot_be_mirrored_are_refused() -> None:
    columns = [Column(name="pose", kind="video"), Column(name="camera", kind="text")]
    check_flip([sample("a cat", pose="a.mp4")], columns)
    message = assert_one_line(
        lambda: check_flip([sample("a cat", camera="In")], columns), "data.flip"
    )
    assert "cannot mirror camera of a (a text)" in message


def test_a_clip_and_its_mask_are_mirrored_after_the_crop(tmp_path: Path) -> None:
    pixels = torch.rand(3, 20, 45, generator=torch.Generator().manual_seed(0))
    write_image(tmp_path / "a.png", pixels)
    for path, frames in ((tmp_path / "a.png", 1), (numbered_video(tmp_path / "b.mp4"), 5)):
        shape = {"frames": frames, "fps": 24.0, "height": 16, "width": 16}
        plain = read_clip(path, **shape)  # type: ignore[arg-type]
        assert torch.equal(read_clip(path, **shape, is_mirrored=True), plain.flip(-1))  # type: ignore[arg-type]
    shape = {"frames": 2, "fps": 24.0, "height": 16, "width": 16, "start_seconds": 0.0}
    mask = read_mask(tmp_path / "a.png", **shape)  # type: ignore[arg-type]
    assert torch.equal(read_mask(tmp_path / "a.png", **shape, is_mirrored=True), mask.flip(-1))  # type: ignore[arg-type]
