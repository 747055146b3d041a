"""Thumbnails are made once, and the crop frame is where training crops."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ditkit_core.data.media.clip import read_clip
from ditkit_core.data.media.image import image_size
from ditkit_ui import thumbnails
from ditkit_ui.thumbnails import SIDE, crop_frame, thumbnail


@pytest.mark.parametrize("stored", [(300, 400), (400, 300), (256, 256), (200, 700)])
@pytest.mark.parametrize("trained", [(64, 64), (48, 80), (96, 32)])
def test_the_frame_is_around_what_training_reads(
    tmp_path: Path, stored: tuple[int, int], trained: tuple[int, int]
) -> None:
    """Each pixel says where it is: what is read begins and ends at the frame."""
    height, width = stored
    rows, columns = np.mgrid[0:height, 0:width]
    image = np.stack([255 * rows / (height - 1), 255 * columns / (width - 1), rows * 0], -1)
    path = tmp_path / "where.png"
    Image.fromarray(image.round().astype("uint8")).save(path)
    clip = read_clip(path, frames=1, fps=1.0, height=trained[0], width=trained[1])
    read = (clip[:2, 0].numpy() + 1) / 2
    for axis, share in enumerate(crop_frame(stored, trained)):
        line = read[axis].mean(1 - axis)
        # Half a pixel of the result at each end is what averaging takes away.
        pixel = share / trained[axis]
        assert line[0] == pytest.approx((1 - share) / 2, abs=pixel + 0.01)
        assert line[-1] == pytest.approx((1 + share) / 2, abs=pixel + 0.01)


def test_a_thumbnail_is_made_once_and_again_after_the_picture_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    picture = tmp_path / "wide.png"
    Image.new("RGB", (1000, 500), "red").save(picture)
    file = thumbnail(picture)
    assert image_size(file) == (SIDE // 2, SIDE)
    with monkeypatch.context() as patch:
        patch.setattr(thumbnails, "read_image", None)
        assert thumbnail(picture) == file
    Image.new("RGB", (500, 1000), "blue").save(picture)
    assert image_size(thumbnail(picture)) == (SIDE, SIDE // 2)
    assert not list(picture.parent.glob(".*")), "nothing is written next to the pictures"
