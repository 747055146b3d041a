"""Crops that a person chose: where a file is read, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from data_specs import STILLS
from media_files import numbered_video
from PIL import Image

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset, scan
from ditkit_core.data.masks import read_mask
from ditkit_core.data.media.clip import read_clip
from ditkit_core.data.media.crop import CENTRE, Crop
from ditkit_core.errors import UserError
from ditkit_core.families.first_frame import column_image, own_frame
from ditkit_core.models.conditions import ClipInputs, Column


@pytest.mark.parametrize("size", [(40, 16), (16, 40), (4096, 8)])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_a_crop_is_a_part_of_the_resized_picture(
    tmp_path: Path, size: tuple[int, int], share: float
) -> None:
    width, height = size
    axis, longest, side = (2, width, height) if width > height else (1, height, width)
    ramp = torch.linspace(0, 255, longest).round().to(torch.uint8)
    pixels = ramp.expand(side, -1) if axis == 2 else ramp[:, None].expand(-1, side)
    Image.fromarray(pixels.contiguous().numpy()).save(tmp_path / "a.png")
    read = read_clip(
        tmp_path / "a.png",
        frames=1,
        fps=0.0,
        height=side,
        width=side,
        crop=Crop(share, 0.5) if axis == 2 else Crop(0.5, share),
    )[:, 0]
    first = round((longest - side) * share)
    expected = ramp[first : first + side].float() / 127.5 - 1
    line = read[0, 0] if axis == 2 else read[0, :, 0]
    assert torch.allclose(line, expected, atol=2 / 127.5)


def test_clip_and_mask_are_cropped_alike_and_the_centre_is_as_before(tmp_path: Path) -> None:
    numbered_video(tmp_path / "a.mp4")
    shape = {"frames": 3, "fps": 8.0, "height": 16, "width": 16, "start_seconds": 0.0}
    crop = Crop(0.0, 1.0)
    plain = read_clip(tmp_path / "a.mp4", **shape)  # type: ignore[arg-type]
    moved = read_clip(tmp_path / "a.mp4", **shape, crop=crop)  # type: ignore[arg-type]
    assert not torch.equal(plain, moved)
    centre = read_clip(tmp_path / "a.mp4", **shape, crop=CENTRE)  # type: ignore[arg-type]
    assert torch.equal(plain, centre)
    mask = read_mask(tmp_path / "a.mp4", **shape, crop=crop)  # type: ignore[arg-type]
    assert torch.equal(mask, (moved.mean(0) / 2 + 0.5).clamp(0, 1))


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    for name in ("a", "b=c"):
        Image.new("RGB", (64, 32)).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text("a hat")
    return DataConfig(folder=str(tmp_path), frames=1, height=32, width=32)


def look(config: DataConfig, columns: tuple[Column, ...] = ()) -> Dataset:
    return scan(config, STILLS, columns)


def test_a_sample_has_the_crop_of_its_file(config: DataConfig) -> None:
    crops = replace(config, crops=("b=c.png=0,0.5",))
    assert [sample.crop for sample in look(crops).samples] == [CENTRE, Crop(0.0, 0.5)]
    with pytest.raises(UserError, match=r"data\.crops has 'a\.pgn', .* did you mean a\.png\?"):
        look(replace(config, crops=("a.pgn=0,0",)))
    pose = Column(name="pose", kind="video")
    assert [sample.crop for sample in look(crops, (pose,)).samples] == [CENTRE, Crop(0.0, 0.5)]


def test_frames_of_a_clip_are_cropped_like_it_and_pictures_of_a_subject_are_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.png"
    pixels = torch.linspace(0, 255, 32).round().to(torch.uint8).expand(3, 16, -1).permute(1, 2, 0)
    Image.fromarray(pixels.contiguous().numpy()).save(path)
    names = ("input_image", "end_image", "subject", "pose")
    inputs = ClipInputs(
        clip=path,
        files=dict.fromkeys(names, str(path)),
        frames=1,
        height=16,
        width=16,
        fps=0.0,
        crop=Crop(0.0, 0.5),
    )
    size = {"frames": 1, "fps": 0.0, "height": 16, "width": 16}
    left = read_clip(path, **size, crop=Crop(0.0, 0.5))  # type: ignore[arg-type]
    centre = read_clip(path, **size)  # type: ignore[arg-type]
    for name in names[:2]:
        assert torch.equal(column_image(inputs, name), left)
    assert torch.equal(own_frame(inputs), left)
    assert torch.equal(column_image(inputs, "pose", is_aligned=True), left)
    assert torch.equal(column_image(inputs, "subject"), centre) and not torch.equal(left, centre)


@pytest.mark.parametrize(
    "entries",
    [("a.png",), ("a.png=0",), ("=0,0",), ("a.png=0,0,0",), ("a.png=0,x",), ("a.png=-0.1,0",),
     ("a.png=nan,0",), ("a.png=0,1.1",), ("a.png=0,0", "a.png=1,0")],
)  # fmt: skip
def test_what_is_no_crop_is_refused(entries: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=r"data\.crops has '.*write NAME=RIGHT,DOWN, once"):
        DataConfig(crops=entries)
