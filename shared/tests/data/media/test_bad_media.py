"""Things that go wrong with media files: each is one line that names the file and a remedy."""

import errno
import gc
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from malformed_media import clear_packet
from media_files import noisy_video, numbered_video, picture, sound_only, truncated
from one_line import assert_one_line
from PIL import Image

from ditkit_core.data.media import clip, files, video
from ditkit_core.data.media.clip import available, probe, read_clip
from ditkit_core.errors import EnvironmentFault, UserError
from ditkit_core.testing.combinations import every_value


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
    path.write_bytes(
        numbered_video(path).read_bytes().replace(b"avc1", b"zzzz").replace(b"avcC", b"zzzC")
    )


def sound(path: Path) -> None:
    sound_only(path)


@pytest.mark.parametrize(
    "spoil",
    [
        missing,
        empty,
        noise,
        without_index,
        cut_off,
        text,
        image_called_video,
        playlist,
        unknown_codec,
        sound,
    ],
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


@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "a.png", "a.jpg"])
@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 5\n", "is a pointer of Git LFS, three lines of text"),
        (b"<!DOCTYPE html><html>" + b"x" * 900, "is a web page; the download needs a login"),
        (bytes(5000), "contains zeros from its first byte on; the download has not ended"),
        (b"PK\x03\x04" + bytes(900), "is a zip archive; unpack it"),
    ],
)  # fmt: skip
def test_media_that_were_not_fetched_are_called_so(
    tmp_path: Path, name: str, content: bytes, answer: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        probe(path)
    assert str(error.value).startswith(f"{path} {answer}") and str(error.value).endswith(
        ", or remove it"
    )


def test_an_image_called_a_video_is_an_image_and_the_other_way_round(tmp_path: Path) -> None:
    image_called_video(tmp_path / "a.mp4")
    video_called_image(tmp_path / "b.png")
    for name, kind in (("a.mp4", "an image"), ("b.png", "a video")):
        with pytest.raises(
            UserError,
            match=f"{name} is {kind} by its content; rename it so that its ending says so",
        ):
            probe(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    ["version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 5\n", "<html>\n<p>a cat"],
)
def test_a_pointer_is_no_caption(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(UserError, match=r"a\.txt is a (pointer of Git LFS|web page)"):
        files.read_dataset_text(tmp_path, "a.txt")
    for caption in ("", "GGUF", "a cat", "Rar! it said"):
        (tmp_path / "a.txt").write_text(caption)
        assert files.read_dataset_text(tmp_path, "a.txt") == caption


def cut_image(path: Path) -> None:
    noisy = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(noisy).save(path)
    truncated(path, path)


def video_called_image(path: Path) -> None:
    numbered_video(path.with_suffix(".mp4")).rename(path)


def another_format(path: Path) -> None:
    Image.new("RGB", (16, 16)).save(path, format="PPM")


def deep(path: Path) -> None:
    Image.fromarray(np.zeros((16, 16), np.float32)).save(path, format="TIFF")


def animated(path: Path) -> None:
    frames = [Image.new("RGB", (16, 16), (0, 0, 60 * i)) for i in range(3)]
    frames[0].save(path, save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    "spoil",
    [missing, empty, noise, text, cut_image, video_called_image, another_format, deep, animated],
)
def test_a_bad_image_is_one_line(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = tmp_path / "photo.png"
    spoil(path)
    assert_one_line(lambda: read_clip(path, frames=1, fps=16.0, height=16, width=16), str(path))
    if spoil is not cut_image:  # what the header tells is found before anything is decoded
        assert_one_line(lambda: probe(path), str(path))


@pytest.mark.parametrize(
    ("damage", "index"),
    every_value([("libx264", 8), ("libx264", 700), ("libx265", 8)], [18, 20, 22]),
)
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


def test_a_photograph_with_a_second_image_inside_is_no_bad_image(tmp_path: Path) -> None:
    red, map_of_gains = Image.new("RGB", (16, 16), "red"), Image.new("RGB", (8, 8))
    red.save(tmp_path / "phone.jpg", format="MPO", save_all=True, append_images=[map_of_gains])
    assert read_clip(tmp_path / "phone.jpg", frames=1, fps=16.0, height=16, width=16)[0].min() > 0.9


def test_a_tiff_without_its_size_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "photo.tif"
    Image.new("RGB", (16, 16)).save(path)
    data = path.read_bytes()
    # the tag ImageWidth and its type
    width = (256).to_bytes(2, "little") + (4).to_bytes(2, "little")
    assert data.count(width) == 1
    path.write_bytes(data.replace(width, (999).to_bytes(2, "little") + (4).to_bytes(2, "little")))
    assert_one_line(lambda: probe(path), str(path))


@pytest.mark.parametrize(
    "error", [TypeError, KeyError, IndexError, RuntimeError, ZeroDivisionError, struct.error]
)
def test_whatever_a_reader_of_images_raises_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def broken(*args: object, **settings: object) -> None:
        raise error("Missing dimensions")

    path = tmp_path / "photo.png"
    Image.new("RGB", (16, 16)).save(path)
    monkeypatch.setattr(Image, "open", broken)
    assert_one_line(lambda: probe(path), str(path))


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("name", ["clip.mp4", "photo.png"])
def test_a_shortage_of_the_machine_is_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    path = tmp_path / name
    (numbered_video if name == "clip.mp4" else picture)(path)

    def short(*args: object, **settings: object) -> None:
        if name == "clip.mp4":
            av.error.err_check(-number, str(path))  # as PyAV reports what libav returns
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "can_allocate", lambda num_bytes: False)
    monkeypatch.setattr(files, "is_readable", lambda path: False)
    monkeypatch.setattr(*((av, "open") if name == "clip.mp4" else (Image, "open")), short)
    with pytest.raises(
        EnvironmentFault, match=r"not because of its content; (stop other programs|check the disk)"
    ):
        read_clip(path, frames=1, fps=16.0, height=16, width=16)


def test_an_input_error_of_a_file_that_the_disk_reads_is_a_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matroska with a damaged cluster: libav answers as if the disk failed."""
    path = numbered_video(tmp_path / "clip.mkv")
    monkeypatch.setattr(av, "open", lambda *_, **__: av.error.err_check(-errno.EIO, str(path)))
    assert_one_line(lambda: probe(path), "clip.mkv cannot be read as a video", "re-encode it")


def test_no_large_frame_waits_for_the_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side data and their frame refer to each other: a folder of large images as videos would fill
    the memory."""
    path = numbered_video(tmp_path / "clip.mp4", rotation=90)
    monkeypatch.setattr(video, "_LARGE_PIXELS", 0)
    gc.collect()
    gc.disable()
    try:
        read_clip(path, frames=5, fps=16.0, height=16, width=16)
        assert not any(isinstance(each, av.VideoFrame) for each in gc.get_objects())
    finally:
        gc.enable()


@pytest.mark.parametrize("count", [2**28 - 1, 2**32 - 1])
def test_a_table_that_no_memory_could_hold_is_a_fault_of_the_file(
    tmp_path: Path, count: int
) -> None:
    path = tmp_path / "clip.mp4"
    data = bytearray(numbered_video(path).read_bytes())
    place = data.index(b"stts") + 8  # the number of entries of the table of times
    data[place : place + 4] = count.to_bytes(4, "big")
    path.write_bytes(data)
    assert_one_line(lambda: probe(path), "clip.mp4 cannot be read as a video", "re-encode it")
    with pytest.raises(UserError) as caught:
        probe(path)
    assert not isinstance(caught.value, EnvironmentFault)


@pytest.mark.parametrize("size", [(1, 1500), (30000, 2)])
def test_a_line_is_refused(tmp_path: Path, size: tuple[int, int]) -> None:
    Image.new("RGB", size).save(tmp_path / "line.png")
    assert_one_line(
        lambda: probe(tmp_path / "line.png"), "line.png has", "aspect ratio above 1000; crop it"
    )


def test_a_video_of_very_wide_pixels_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wide.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.height, stream.width, stream.pix_fmt = 16, 1024, "yuv420p"
        stream.codec_context.sample_aspect_ratio = 16
        container.mux(
            stream.encode(
                av.VideoFrame.from_ndarray(np.zeros((16, 1024, 3), np.uint8), format="rgb24")
            )
        )
        container.mux(stream.encode(None))
    assert_one_line(lambda: available(path, 16.0), "wide.mp4")


@pytest.mark.parametrize("size", [(8, 8000), (10000, 20), (100, 20000)])
def test_a_long_image_is_cropped_before_it_is_resized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    """Resized as a whole, the first one would take 8 GB."""
    image = Image.new("RGB", size, "white")
    width, height = size
    middle = (
        (0, height // 2 - 40, width, height // 2 + 40)
        if height > width
        else (width // 2 - 40, 0, width // 2 + 40, height)
    )
    image.paste("red", middle)
    image.save(tmp_path / "long.png")
    taken: list[int] = []
    resize = clip.functional.interpolate
    monkeypatch.setattr(
        clip.functional,
        "interpolate",
        lambda x, to, **how: taken.append(math.prod(to)) or resize(x, to, **how),
    )
    found = read_clip(tmp_path / "long.png", frames=1, fps=16.0, height=48, width=80)[:, 0]
    assert taken and max(taken) < 6 * 48 * 80
    assert found[0].min() > 0.9 > -0.9 > found[1, 24, 40], "the middle"


@pytest.mark.parametrize("size", [(48, 64), (640, 360), (31, 900), (1000, 33)])
def test_an_ordinary_image_is_resized_as_a_whole(size: tuple[int, int]) -> None:
    image = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    assert clip._without_far_ends(image, 48, 48, clip.CENTRE) is image


@pytest.mark.parametrize("suffix", [".avif", ".heic"])
def test_images_of_phones_are_read_upright(tmp_path: Path, suffix: str) -> None:
    if suffix == ".heic":
        pillow_heif = pytest.importorskip("pillow_heif")
        pillow_heif.register_heif_opener()
    image, turned = Image.new("RGB", (64, 32), "red"), Image.Exif()
    image.paste("blue", (0, 0, 32, 32))
    turned[0x0112] = 6  # a quarter turn clockwise: the left half comes to the top
    image.save(tmp_path / f"phone{suffix}", exif=turned.tobytes(), quality=95)
    assert probe(tmp_path / f"phone{suffix}").height == 64
    clip = read_clip(tmp_path / f"phone{suffix}", frames=1, fps=16.0, height=64, width=32)[:, 0]
    assert clip[2, 16].min() > 0.7 > -0.7 > clip[0, 16].max(), "blue above"
    assert clip[0, 48].min() > 0.7 > -0.7 > clip[2, 48].max(), "red below"
