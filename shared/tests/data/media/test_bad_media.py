"""Things that go wrong with media files: each is one line that names the file and a remedy."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from malformed_media import clear_packet
from media_files import noisy_video, numbered_video, sound_only, truncated
from one_line import assert_one_line
from PIL import Image

from ditkit_core.data.media.clip import available, probe, read_clip


def missing(path: Path) -> None:
    path.unlink(missing_ok=True)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def noise(path: Path) -> None:
    path.write_bytes(np.random.default_rng(0).bytes(5000))


def without_index(path: Path) -> None:
    truncated(numbered_video(path), path)


def cut_off(path: Path) -> None:
    truncated(noisy_video(path), path)  # its index comes first, so its start stays readable


def text(path: Path) -> None:
    path.write_text("these are no pixels\n" * 50)


def image_called_video(path: Path) -> None:
    Image.new("RGB", (32, 32)).save(path, format="PNG")


def playlist(path: Path) -> None:
    numbered_video(path.with_name("other.mkv"))
    path.write_text("ffconcat version 1.0\nfile other.mkv\n")


def unknown_codec(path: Path) -> None:
    path.write_bytes(numbered_video(path).read_bytes().replace(b"avc1", b"zzzz").replace(b"avcC", b"zzzC"))


def sound(path: Path) -> None:
    sound_only(path)


@pytest.mark.parametrize(
    "spoil", [missing, empty, noise, without_index, cut_off, text, image_called_video, playlist, unknown_codec, sound]
)
def test_a_bad_video_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], spoil: Callable[[Path], None]
) -> None:
    path = tmp_path / "clip.mp4"
    spoil(path)
    for use in (
        lambda: probe(path),
        lambda: available(path, 24.0).frames,
        lambda: read_clip(path, frames=32, fps=24.0, height=16, width=16),
    ):
        assert_one_line(use, str(path))
    assert capfd.readouterr() == ("", "")  # libav keeps quiet


def cut_image(path: Path) -> None:
    noisy = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(noisy).save(path)
    truncated(path, path)


def video_called_image(path: Path) -> None:
    numbered_video(path.with_suffix(".mp4")).rename(path)


def another_format(path: Path) -> None:
    Image.new("RGB", (16, 16)).save(path, format="PPM")


def deep(path: Path) -> None:
    Image.fromarray(np.zeros((16, 16), np.uint16)).save(path)


def animated(path: Path) -> None:
    frames = [Image.new("RGB", (16, 16), (0, 0, 60 * i)) for i in range(3)]
    frames[0].save(path, save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    "spoil", [missing, empty, noise, text, cut_image, video_called_image, another_format, deep, animated]
)
def test_a_bad_image_is_one_line(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = tmp_path / "photo.png"
    spoil(path)
    assert_one_line(lambda: read_clip(path, frames=1, fps=16.0, height=16, width=16), str(path))
    if spoil is not cut_image:  # what the header tells is found before anything is decoded
        assert_one_line(lambda: probe(path), str(path))


@pytest.mark.parametrize("damage", [("libx264", 8), ("libx264", 700), ("libx265", 8)])
@pytest.mark.parametrize("index", [18, 20, 22])
def test_a_damaged_frame_is_an_error_and_only_where_it_is_wanted(
    tmp_path: Path, damage: tuple[str, int], index: int
) -> None:
    codec, keep = damage
    path = noisy_video(tmp_path / "clip.mp4", codec)
    clear_packet(path, index, keep=keep)
    assert available(path, 24.0).frames == 32
    assert read_clip(path, frames=5, fps=24.0, height=16, width=16).shape == (3, 5, 16, 16)
    assert_one_line(lambda: read_clip(path, frames=32, fps=24.0, height=16, width=16), str(path))


def test_timestamps_that_go_backwards_are_an_error(tmp_path: Path) -> None:
    path = numbered_video(tmp_path / "clip.avi")  # avi cannot say when reordered frames are shown
    assert_one_line(lambda: read_clip(path, frames=20, fps=24.0, height=16, width=16), str(path))


def test_a_name_that_is_no_media_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.docx").write_text("x")
    assert_one_line(lambda: probe(tmp_path / "notes.docx"), "notes.docx")


def test_a_photograph_with_a_second_picture_inside_is_no_bad_image(tmp_path: Path) -> None:
    red, map_of_gains = Image.new("RGB", (16, 16), "red"), Image.new("RGB", (8, 8))
    red.save(tmp_path / "phone.jpg", format="MPO", save_all=True, append_images=[map_of_gains])
    assert read_clip(tmp_path / "phone.jpg", frames=1, fps=16.0, height=16, width=16)[0].min() > 0.9
