"""Folders of numbered images as clips."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from data_specs import CLIPS
from media_files import picture

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset, scan
from ditkit_core.data.media.clip import available, probe, read_clip
from ditkit_core.encoding.cache import MediaHashes
from ditkit_core.errors import UserError

LEVELS = 20


def shot(
    folder: Path, count: int = 12, first: int = 1, name: str = "frame_{:04d}.png", fps: str = ""
) -> Path:
    for i in range(count):
        picture(
            folder / name.format(first + i), colour=f"rgb({LEVELS * i},{LEVELS * i},{LEVELS * i})"
        )
    if fps:
        (folder / "fps.txt").write_text(fps)
    return folder


def levels(clip: torch.Tensor) -> list[int]:
    return [round(level) for level in ((clip.mean(dim=(0, 2, 3)) + 1) * 127.5 / LEVELS).tolist()]


def look(folder: Path, **settings: Any) -> Dataset:
    data = DataConfig(
        **{
            "folder": str(folder),
            "frames": 5,
            "height": 32,
            "width": 32,
            "image_folders": True,
            **settings,
        }
    )
    return scan(data, CLIPS)


def test_each_image_is_a_frame_unless_the_folder_says_its_rate(tmp_path: Path) -> None:
    plain, timed = shot(tmp_path / "a"), shot(tmp_path / "b", fps="24\n")
    read = {"frames": 5, "height": 16, "width": 16}
    assert levels(read_clip(plain, fps=16.0, **read)) == [0, 1, 2, 3, 4]
    assert levels(read_clip(plain, fps=7.0, start_seconds=3 / 7, **read)) == [3, 4, 5, 6, 7]
    assert levels(read_clip(timed, fps=16.0, **read)) == [0, 1, 3, 4, 6]
    assert levels(read_clip(timed, fps=48.0, **read)) == [0, 0, 1, 1, 2]
    assert (
        available(plain, 16.0).frames,
        available(timed, 16.0).frames,
        available(timed, 16.0, at_most=3).frames,
    ) == (
        12,
        8,
        3,
    )
    info = probe(timed)
    assert (info.kind, info.fps, info.seconds, info.height, info.width) == (
        "video",
        24.0,
        0.5,
        48,
        64,
    )


@pytest.mark.parametrize("fps", [1.0, 7.0, 23.976, 24.0, 30.0, 60.0, 1000.0])
@pytest.mark.parametrize("own", ["", "24", "29.97", "1000"])
def test_every_frame_that_there_is_can_be_read(tmp_path: Path, fps: float, own: str) -> None:
    folder = shot(tmp_path / "a", 5, fps=own)
    count = available(folder, fps).frames
    clip = read_clip(folder, frames=count, fps=fps, height=16, width=16)
    assert levels(clip)[0] == 0 and max(levels(clip)) <= 4
    with pytest.raises(UserError, match="has 5 images, but a frame at"):
        read_clip(folder, frames=count + 2, fps=fps, height=16, width=16)


def test_a_folder_of_images_is_one_sample_with_its_caption_next_to_it(tmp_path: Path) -> None:
    shot(tmp_path / "a.v2")
    shot(tmp_path / "deep" / "b", fps="32")
    picture(tmp_path / "still.png")
    shot(tmp_path / "mixed", 2)
    picture(tmp_path / "mixed" / "cover.png")
    for name in ("a.v2", "deep/b", "still", "mixed/frame_0001", "mixed/frame_0002", "mixed/cover"):
        (tmp_path / f"{name}.txt").write_text(name)
    found = {sample.id: (sample.frames, sample.captions[0]) for sample in look(tmp_path).samples}
    assert found == {
        "a.v2": (5, "a.v2"), "deep/b": (5, "deep/b"), "mixed/cover": (1, "mixed/cover"),
        "mixed/frame_0001": (1, "mixed/frame_0001"), "mixed/frame_0002": (1, "mixed/frame_0002"),
        "still": (1, "still"),
    }  # fmt: skip
    windows = look(tmp_path, windows="all").samples
    assert [sample.id for sample in windows][:2] == ["a.v2#0", "a.v2#1"]


def test_a_folder_that_is_no_clip_is_refused_with_the_reason(tmp_path: Path) -> None:
    shot(tmp_path / "set" / "shot")
    (tmp_path / "set" / "shot.txt").write_text("a shot")
    with pytest.raises(UserError, match="or set data.image_folders = true if shot is one clip"):
        look(tmp_path / "set", image_folders=False)
    (tmp_path / "set" / "shot" / "Thumbs.db").write_text("x")
    with pytest.raises(
        UserError, match="or, if shot is one clip, leave only consistently numbered images in it"
    ):
        look(tmp_path / "set")


def test_metadata_may_name_a_folder_where_that_is_allowed(tmp_path: Path) -> None:
    shot(tmp_path / "a")
    (tmp_path / "metadata.csv").write_text("video,text\na,one\n")
    assert [sample.frames for sample in look(tmp_path).samples] == [5]
    with pytest.raises(UserError, match="a does not have the extension of a media file"):
        look(tmp_path, image_folders=False)


def test_a_folder_has_another_hash_with_another_image_or_rate(tmp_path: Path) -> None:
    folder = shot(tmp_path / "a", 3)

    def digest() -> str:
        with MediaHashes(tmp_path / "cache") as hashes:
            return hashes.of(folder)

    found = [digest(), digest()]
    picture(folder / "frame_0002.png", colour="red")
    found.append(digest())
    (folder / "fps.txt").write_text("12")
    found.append(digest())
    (folder / "frame_0003.png").rename(folder / "frame_0004.png")
    found.append(digest())
    assert found[0] == found[1] and len(set(found)) == 4


def missing(folder: Path) -> None:
    (folder / "frame_0003.png").unlink()


def another_size(folder: Path) -> None:
    picture(folder / "frame_0004.png", (20, 20))


def damaged(folder: Path) -> None:
    (folder / "frame_0004.png").write_bytes(b"no picture")


def rate(text: str) -> Any:
    return lambda folder: (folder / "fps.txt").write_text(text)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (missing, "has no image 3, before frame_0004.png; add it"),
        (
            another_size,
            (
                "frame_0004.png and frame_0001.png have different sizes|frame_0001.png and "
                "frame_0004.png"
            ),
        ),
        (damaged, "frame_0004.png cannot be read as an image"),
        (rate("fast"), "fps.txt does not contain a number of images"),
        (rate("0"), "fps.txt does not contain a number of images"),
        (rate("nan"), "fps.txt does not contain a number of images"),
    ],
)
def test_a_bad_folder_is_one_line(tmp_path: Path, spoil: Any, said: str) -> None:
    folder = shot(tmp_path / "a", 6)
    shot(tmp_path / "good")
    for name in ("a", "good"):
        (tmp_path / f"{name}.txt").write_text(name)
    spoil(folder)
    with pytest.raises(UserError, match=said) as caught:
        look(tmp_path)
    assert "\n" not in str(caught.value)
    assert [sample.id for sample in look(tmp_path, on_bad="skip").samples] == ["good"]


def test_images_behind_links_stay_inside(tmp_path: Path) -> None:
    folder = shot(tmp_path / "set" / "a", 5)
    (tmp_path / "set" / "a.txt").write_text("a")
    try:
        (folder / "frame_0006.png").symlink_to(picture(tmp_path / "secret.png"))
    except OSError:
        pytest.skip("this system does not let us make symbolic links")
    with pytest.raises(UserError, match="leaves the dataset folder"):
        look(tmp_path / "set")
    assert len(look(tmp_path / "set", allow_outside=True).samples) == 1


@pytest.mark.parametrize("name", ["frame_0003.png", "fps.txt"])
def test_a_named_pipe_among_images_is_said_and_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = shot(tmp_path / "a", 6)
    (tmp_path / "a.txt").write_text("a")
    (folder / name).unlink(missing_ok=True)
    try:
        os.mkfifo(folder / name)
    except (AttributeError, OSError):
        pytest.skip("this system has no named pipes")
    for read in (probe, lambda path: look(path.parent)):
        with pytest.raises(UserError, match=rf"{name} is not a regular file; remove it"):
            read(folder)
