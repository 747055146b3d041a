"""Loss masks of a dataset: found by column, by folder and next to their clip, refused where they do
not fit, read as their clip is."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_specs import CLIPS
from media_files import numbered_video, picture
from PIL import Image

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset, scan
from ditkit_core.data.masks import at_latent_size, read_mask
from ditkit_core.data.media.clip import read_clip
from ditkit_core.errors import UserError


def look(folder: Path, **settings: Any) -> Dataset:
    config = {"folder": str(folder), "frames": 5, "height": 32, "width": 32, **settings}
    return scan(DataConfig(**config), CLIPS)


def masks_of(dataset: Dataset) -> dict[str, str]:
    return {sample.id: sample.mask.name for sample in dataset.samples if sample.mask is not None}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two images, one of them in a subfolder, and a video of 24 frames."""
    for name in ("a", "sub/b"):
        picture(tmp_path / "set" / f"{name}.png", (40, 60))
        (tmp_path / "set" / f"{name}.txt").write_text(name)
    numbered_video(tmp_path / "set" / "c.mp4")
    (tmp_path / "set" / "c.txt").write_text("c")
    return tmp_path / "set"


def test_a_file_named_after_its_clip_is_its_mask_unless_it_has_a_caption(folder: Path) -> None:
    picture(folder / "a-mask.png", (20, 30), "white")
    picture(folder / "sub" / "b-masklabel.jpg", (40, 60), "white")
    numbered_video(folder / "c-mask.mp4")
    dataset = look(folder)
    assert masks_of(dataset) == {"a": "a-mask.png", "sub/b": "b-masklabel.jpg", "c": "c-mask.mp4"}
    assert [sample.id for sample in dataset.samples] == ["a", "c", "sub/b"] and not dataset.excluded
    (folder / "a-mask.txt").write_text("a face with a mask")
    assert masks_of(look(folder)).keys() == {"sub/b", "c"}
    assert [sample.id for sample in look(folder).samples] == ["a", "a-mask", "c", "sub/b"]
    picture(folder / "c-mask.png", (48, 64), "white")
    with pytest.raises(
        UserError, match=r"c-mask\.mp4 and c-mask\.png in .* are both the mask of c\.mp4; remove"
    ):
        look(folder)


@pytest.mark.parametrize("place", ["masks", "set/masks"])
def test_a_folder_has_masks_of_the_same_names(folder: Path, place: str) -> None:
    masks = folder.parent / place
    picture(masks / "sub" / "b.webp", (40, 60), "white")
    picture(masks / "c.png", (48, 64), "white")
    picture(masks / "d.png", (40, 60), "white")
    dataset = look(folder, masks=str(masks))
    assert masks_of(dataset) == {"sub/b": "b.webp", "c": "c.png"}
    assert dataset.excluded == [(str(masks / "d.png"), "no sample has this name")]


@pytest.mark.parametrize("column", ["mask", "mask_path"])
@pytest.mark.parametrize("metadata", ["metadata.jsonl", "metadata.csv"])
def test_metadata_names_masks(folder: Path, column: str, metadata: str) -> None:
    picture(folder / "m" / "any.png", (40, 60), "white")
    if metadata.endswith("csv"):
        (folder / metadata).write_text(f"image,text,{column}\na.png,a,m/any.png\nsub/b.png,b,\n")
    else:
        rows = [
            {"image": "a.png", "text": "a", column: "m/any.png"},
            {"image": "sub/b.png", "text": "b"},
        ]
        (folder / metadata).write_text("\n".join(map(json.dumps, rows)))
    dataset = look(folder)
    assert masks_of(dataset) == {"a": "any.png"} and len(dataset.samples) == 2


def test_what_is_wrong_with_a_mask_is_one_line_that_names_it(folder: Path) -> None:
    def refused(match: str, **settings: Any) -> None:
        with pytest.raises(UserError, match=match) as raised:
            look(folder, **settings)
        assert "\n" not in str(raised.value)

    def listed(**row: object) -> None:
        (folder / "metadata.jsonl").write_text(json.dumps({"text": "a", **row}))

    refused(
        "data.masks nowhere does not exist or is not a folder; correct the path", masks="nowhere"
    )
    refused(
        "data.masks is data.folder .* itself; put the files into a folder of their own",
        masks=str(folder),
    )
    with pytest.raises(UserError, match="data.masks works with one folder only"):
        DataConfig(folders=("a", "b"), masks="m")
    refused(
        "data.controls has 'mask=m'; set data.masks to the folder of loss masks",
        controls=("mask=m",),
    )
    empty = folder.parent / "empty"
    empty.mkdir()
    refused("data.masks .*empty: no file has the name of a sample", masks=str(empty))
    listed(image="a.png", mask="no.png")
    refused(r"mask .*no\.png does not exist; correct the path")
    listed(image="a.png", masks="no.png")
    refused("line 1 has a column 'masks'; did you mean 'mask'")
    listed(image="a.png", mask=["a.png", "sub/b.png"])
    refused("'mask' is not the path of a single file")
    listed(image="a.png", mask="c.mp4")
    refused(r"mask .*c\.mp4 is a video, but .*a\.png is an image; convert the mask to an image")
    listed(image="a.png", mask="a.txt")
    refused(r"mask .*a\.txt is not of kind video by its extension; accepted")
    picture(folder / "m" / "wide.png", (40, 80), "white")
    listed(image="a.png", mask="m/wide.png")
    refused(r"mask .*wide\.png has 80 x 40 pixels and .*a\.png 60 x 40, another aspect ratio")
    numbered_video(folder / "m" / "short.mp4", frames=3)
    listed(video="c.mp4", mask="m/short.mp4")
    refused(
        r"mask .*short\.mp4 has 2 frames at 16 fps, but its clip needs 5; make it as long as the "
        r"clip"
    )
    (folder / "m" / "torn.png").write_bytes((folder / "a.png").read_bytes()[:40])
    listed(image="a.png", mask="m/torn.png")
    refused(r"mask: .*torn\.png cannot be read as an image")
    picture(folder / "m" / "a.png", (40, 60), "white")
    listed(image="a.png", mask="m/a.png")
    refused(
        r"a\.png has mask of its own and in data\.masks; remove one of the two",
        masks=str(folder / "m"),
    )
    skipped = look(folder.parent / "set" / "sub")
    assert len(skipped.samples) == 1
    (folder / "metadata.jsonl").write_text(
        "\n".join(
            json.dumps({"text": "a", **row})
            for row in (
                {"image": "a.png", "mask": "no.png"},
                {"image": "sub/b.png", "mask": "m/a.png"},
            )
        )
    )
    kept = look(folder, on_bad="skip")
    assert masks_of(kept) == {"sub/b": "a.png"} and [name for name, _ in kept.excluded] == [
        "a.png",
        "c.mp4",
    ]


def test_a_mask_gets_the_frames_the_size_and_the_crop_of_its_clip(tmp_path: Path) -> None:
    window = {"frames": 5, "fps": 8.0, "start_seconds": 0.5, "height": 32, "width": 48}
    clip = numbered_video(tmp_path / "clip.mp4", frames=30)
    assert torch.equal(
        read_mask(clip, **window), (read_clip(clip, **window).mean(0) / 2 + 0.5).clamp(0, 1)
    )
    image = np.random.default_rng(0).integers(0, 256, (50, 90, 3), np.uint8)
    Image.fromarray(image).save(tmp_path / "image.png")
    Image.fromarray(image.repeat(2, 0).repeat(2, 1)).save(tmp_path / "larger.png")
    still = {"frames": 1, "fps": 0.0, "height": 32, "width": 48}
    own = read_mask(tmp_path / "image.png", **still, start_seconds=0.0)
    assert torch.equal(own[0], read_clip(tmp_path / "image.png", **still)[:, 0].mean(0) / 2 + 0.5)
    repeated = read_mask(tmp_path / "image.png", **window)
    assert repeated.shape == (5, 32, 48) and all(torch.equal(frame, own[0]) for frame in repeated)
    # a mask of another size covers the same part; resizing it rounds differently
    assert (
        read_mask(tmp_path / "larger.png", **still, start_seconds=0.0) - own
    ).abs().mean() < 0.02


@pytest.mark.parametrize(("frames", "grid"), [(1, (1, 4, 6)), (9, (3, 4, 6)), (5, (2, 2, 3))])
def test_a_latent_has_the_mean_of_its_pixels(frames: int, grid: tuple[int, int, int]) -> None:
    mask = torch.rand(frames, 32, 48, generator=torch.Generator().manual_seed(0))
    found = at_latent_size(mask, grid)
    assert found.shape == (1, *grid)
    side = 32 // grid[1]
    for t in range(grid[0]):
        pixels = mask[:1] if t == 0 else mask[1 + 4 * (t - 1) : 1 + 4 * t]
        for row in range(grid[1]):
            for column in range(grid[2]):
                part = pixels[:, row * side : (row + 1) * side, column * side : (column + 1) * side]
                assert abs(float(found[0, t, row, column]) - float(part.mean())) < 1e-6


def test_numbered_images_are_the_mask_of_a_folder_of_images(tmp_path: Path) -> None:
    for i in range(5):
        picture(tmp_path / "set" / "shot" / f"{i:04}.png", (40, 60))
        picture(
            tmp_path / "set" / "shot-mask" / f"{i:04}.png", (40, 60), "white" if i < 2 else "black"
        )
    (tmp_path / "set" / "shot.txt").write_text("a shot")
    (sample,) = look(tmp_path / "set", image_folders=True).samples
    assert sample.mask == tmp_path / "set" / "shot-mask"
    mask = read_mask(sample.mask, frames=5, fps=16.0, height=32, width=32, start_seconds=0.0)
    assert mask.mean((1, 2)).tolist() == [1, 1, 0, 0, 0]
    shutil.rmtree(tmp_path / "set" / "shot-mask")
    assert masks_of(look(tmp_path / "set", image_folders=True)) == {}
