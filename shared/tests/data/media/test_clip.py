"""Reading and writing media: frames by time, orientation, colour, sizes."""

from contextlib import nullcontext
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from media_files import LEVELS, numbered_video, picture
from PIL import Image

from ditkit_core.data.media import packets as video_packets
from ditkit_core.data.media import video
from ditkit_core.data.media.clip import (
    available,
    probe,
    read_clip,
    spread_images,
    write_image,
    write_video,
)
from ditkit_core.data.media.packets import SLACK_SECONDS
from ditkit_core.errors import UserError


def frame_numbers(path: Path, *, frames: int, fps: float, start_seconds: float = 0.0) -> list[int]:
    """Which frames of a `numbered_video` a clip shows."""
    clip = read_clip(path, frames=frames, fps=fps, height=16, width=16, start_seconds=start_seconds)
    return [round(level / LEVELS) for level in ((clip.mean(dim=(0, 2, 3)) + 1) * 127.5).tolist()]


@pytest.mark.parametrize("container", ["mp4", "mkv", "mov"])
@pytest.mark.parametrize(("fps", "step"), [(24.0, 1.0), (16.0, 1.5), (12.0, 2.0), (48.0, 0.5)])
def test_a_clip_at_another_rate_shows_the_frames_on_screen_at_its_times(
    tmp_path: Path, container: str, fps: float, step: float
) -> None:
    path = numbered_video(tmp_path / f"clip.{container}", frames=24, fps=24.0)
    count = int(24 / step)
    assert available(path, fps).frames == count
    assert frame_numbers(path, frames=count, fps=fps) == [int(i * step) for i in range(count)]
    with pytest.raises(UserError, match=r"ends after 1\.00 s"):
        frame_numbers(path, frames=count + 1, fps=fps)


def test_a_clip_may_start_later(tmp_path: Path) -> None:
    path = numbered_video(tmp_path / "clip.mp4", frames=24, fps=24.0)
    assert frame_numbers(path, frames=3, fps=12.0, start_seconds=0.5) == [12, 14, 16]


def test_images_are_spread_evenly_over_a_file_and_repeated_ones_are_taken_once(
    tmp_path: Path,
) -> None:
    def numbers(path: Path, count: int) -> list[int]:
        return [round(float(image.mean()) / LEVELS) for image in spread_images(path, count)]

    path = numbered_video(tmp_path / "clip.mp4", frames=24, fps=24.0)
    assert numbers(path, 4) == [3, 9, 15, 21] and numbers(path, 1) == [12]
    assert numbers(numbered_video(tmp_path / "short.mp4", frames=3, fps=24.0), 8) == [0, 1, 2]
    for number in range(6):
        picture(tmp_path / "shot" / f"{number:03}.png", (8, 8), (number * LEVELS,) * 3)
    assert numbers(tmp_path / "shot", 3) == [1, 3, 5]
    assert numbers(tmp_path / "shot" / "004.png", 8) == [4]
    (tmp_path / "shot" / "fps.txt").write_text("2")
    assert numbers(tmp_path / "shot", 3) == [1, 3, 5]


def test_ntsc_rates_keep_their_time(tmp_path: Path) -> None:
    path = numbered_video(tmp_path / "clip.mp4", frames=30, fps=30000 / 1001)
    assert frame_numbers(path, frames=16, fps=16.0) == [
        int((i / 16 + SLACK_SECONDS) * 30000 / 1001) for i in range(16)
    ]


@pytest.mark.parametrize("container", ["mp4", "mkv"])
def test_a_variable_frame_rate_is_read_by_time_and_not_by_count(
    tmp_path: Path, container: str
) -> None:
    ticks = [0, 40, 80, 500, 540, 1000, 1700, 1740]
    path = numbered_video(tmp_path / f"vfr.{container}", frames=len(ticks), fps=25.0, ticks=ticks)
    expected = [max(j for j, tick in enumerate(ticks) if tick <= 100 * i) for i in range(18)]
    assert expected == [0, 2, 2, 2, 2, 3, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 6]
    assert frame_numbers(path, frames=18, fps=10.0) == expected


def test_time_counts_from_the_first_frame(tmp_path: Path) -> None:
    ticks = [700 + 40 * i for i in range(10)]
    path = numbered_video(tmp_path / "late.mkv", frames=10, fps=25.0, ticks=ticks)
    assert frame_numbers(path, frames=10, fps=25.0) == list(range(10))
    assert probe(path).seconds == pytest.approx(0.4, abs=0.002)


def test_frames_that_an_edit_list_hides_are_not_shown(tmp_path: Path) -> None:
    ticks = [40 * i - 200 for i in range(20)]
    path = numbered_video(
        tmp_path / "trimmed.mp4",
        frames=20,
        fps=25,
        ticks=ticks,
        options={"avoid_negative_ts": "disabled"},
    )
    assert available(path, 25.0).frames == 15
    assert frame_numbers(path, frames=15, fps=25.0) == list(range(5, 20))


def test_the_last_frame_stays_for_its_duration(tmp_path: Path) -> None:
    path = numbered_video(tmp_path / "clip.mp4", frames=3, fps=2.0)
    assert available(path, 10.0).frames == 15
    assert frame_numbers(path, frames=15, fps=10.0) == [0] * 5 + [1] * 5 + [2] * 5


def test_counting_stops_when_enough_is_there(tmp_path: Path) -> None:
    path = numbered_video(tmp_path / "clip.mp4", frames=24, fps=24.0)
    assert [available(path, 16.0, at_most=n).frames for n in (5, 16, 17)] == [5, 16, 16]


def test_probe_measures_a_video(tmp_path: Path) -> None:
    info = probe(numbered_video(tmp_path / "CLIP.MP4", frames=12, fps=24.0, size=(48, 64)))
    assert (info.kind, info.height, info.width) == ("video", 48, 64)
    assert (info.seconds, info.fps) == (pytest.approx(0.5), pytest.approx(24))


@pytest.mark.parametrize("rotation", [90, -90, 180])
def test_a_rotated_video_is_read_upright(tmp_path: Path, rotation: int) -> None:
    stored = np.zeros((32, 64, 3), np.uint8)
    stored[:16, :32] = 255  # the stored top left corner is white
    path = tmp_path / "turned.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.height, stream.width, stream.pix_fmt = 32, 64, "yuv420p"
        stream.set_display_rotation(rotation)
        container.mux(stream.encode(av.VideoFrame.from_ndarray(stored, format="rgb24")))
        container.mux(stream.encode(None))
    info = probe(path)
    upright = np.rot90(stored, rotation // 90)
    assert (info.height, info.width) == upright.shape[:2]
    clip = read_clip(path, frames=1, fps=8.0, height=info.height, width=info.width)
    expected = torch.from_numpy(upright.copy()).permute(2, 0, 1) / 127.5 - 1
    assert (clip[:, 0] - expected).abs().mean() < 0.05


def test_wide_pixels_are_shown_wide(tmp_path: Path) -> None:
    path = tmp_path / "anamorphic.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.height, stream.width, stream.pix_fmt = 32, 32, "yuv420p"
        stream.codec_context.sample_aspect_ratio = 2
        stored = np.zeros((32, 32, 3), np.uint8)
        stored[:, 8:24] = 255  # half of the width, in the middle
        container.mux(stream.encode(av.VideoFrame.from_ndarray(stored, format="rgb24")))
        container.mux(stream.encode(None))
    assert (probe(path).height, probe(path).width) == (32, 64)
    # the middle half is all that remains
    clip = read_clip(path, frames=1, fps=8.0, height=32, width=32)
    assert clip[:, 0, :, 4:28].min() > 0.8


def test_a_photograph_is_turned_as_its_exif_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise by a quarter to see it
    stored = Image.new("RGB", (64, 32), "black")
    stored.paste("white", (0, 0, 32, 32))
    stored.save(tmp_path / "photo.png", exif=exif)
    assert (probe(tmp_path / "photo.png").height, probe(tmp_path / "photo.png").width) == (64, 32)
    clip = read_clip(tmp_path / "photo.png", frames=1, fps=16.0, height=64, width=32)
    assert clip[:, 0, :32].eq(1).all() and clip[:, 0, 32:].eq(-1).all()


def test_transparency_is_put_on_white(tmp_path: Path) -> None:
    Image.new("RGBA", (16, 16), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert read_clip(tmp_path / "clear.png", frames=1, fps=16.0, height=16, width=16).eq(1).all()


def test_an_image_of_the_right_size_is_not_touched(tmp_path: Path) -> None:
    pixels = torch.randint(0, 256, (3, 33, 47), generator=torch.Generator().manual_seed(0))
    write_image(tmp_path / "noise.png", pixels / 255)
    clip = read_clip(tmp_path / "noise.png", frames=1, fps=16.0, height=33, width=47)
    assert clip.dtype == torch.float32 and clip.shape == (3, 1, 33, 47)
    assert torch.equal(((clip[:, 0] + 1) * 127.5).round().long(), pixels)


def test_resizing_covers_and_crops_to_the_centre(tmp_path: Path) -> None:
    image = Image.new("RGB", (120, 40), "black")
    image.paste("white", (40, 0, 80, 40))
    image.save(tmp_path / "wide.png")
    clip = read_clip(tmp_path / "wide.png", frames=1, fps=16.0, height=20, width=20)
    assert clip.min() > 0.75 and clip[:, :, :, 4:16].min() > 0.99
    assert clip.max() <= 1  # the resize overshoots at an edge


def test_shrinking_is_antialiased(tmp_path: Path) -> None:
    lines = np.zeros((64, 64, 3), np.uint8)
    lines[:, ::4] = 255
    Image.fromarray(lines).save(tmp_path / "lines.png")
    clip = read_clip(tmp_path / "lines.png", frames=1, fps=16.0, height=16, width=16)
    # a quarter of white; without antialiasing the lines are missed
    assert (clip[..., 2:-2] + 0.5).abs().max() < 0.05


@pytest.mark.parametrize(("height", "width"), [(48, 64), (33, 47)])
def test_a_written_video_is_read_back_in_colour_size_and_time(
    tmp_path: Path, height: int, width: int
) -> None:
    pixels = torch.zeros(3, 5, height, width)
    for i in range(5):
        pixels[:, i] = torch.tensor([0.8 - 0.1 * i, 0.2 + 0.1 * i, 0.35]).view(3, 1, 1)
    write_video(tmp_path / "new" / "out.mp4", pixels, fps=23.976)
    info = probe(tmp_path / "new" / "out.mp4")
    assert (info.height, info.width) == (height + height % 2, width + width % 2)
    assert info.fps == pytest.approx(24000 / 1001)
    clip = read_clip(
        tmp_path / "new" / "out.mp4", frames=5, fps=info.fps, height=height, width=width
    )
    assert ((clip + 1) / 2 - pixels).abs().max() < 0.03  # two or three of 255 levels, and the codec
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["out.mp4"]
    written = (tmp_path / "new" / "out.mp4").read_bytes()
    assert 0 < written.find(b"moov") < written.find(b"mdat"), "a browser plays it while it loads"


def test_the_same_images_are_the_same_file(tmp_path: Path) -> None:
    """x264 does not see to that by itself in small videos."""
    y, x, t = torch.meshgrid(torch.arange(64), torch.arange(64), torch.arange(9), indexing="ij")
    noise = torch.rand(64, 64, 9, generator=torch.Generator().manual_seed(0))
    disc = ((x - 10 - 4 * t) ** 2 + (y - 30) ** 2 < 150).float()
    pixels = (0.6 * disc + 0.4 * noise).permute(2, 0, 1).expand(3, -1, -1, -1)
    for i in range(20):
        write_video(tmp_path / f"{i}.mp4", pixels, fps=16.0)
    assert len({(tmp_path / f"{i}.mp4").read_bytes() for i in range(20)}) == 1


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "out.png").mkdir()
    (tmp_path / "out.mp4").mkdir()
    with pytest.raises(UserError, match="cannot write"):
        write_image(tmp_path / "out.png", torch.zeros(3, 4, 4))
    with pytest.raises(UserError, match="cannot write"):
        write_video(tmp_path / "out.mp4", torch.zeros(3, 1, 4, 4), fps=16.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.mp4", "out.png"]


def test_an_image_is_one_frame(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.JPG")
    assert available(path, 16.0).frames == 1
    with pytest.raises(UserError, match="still image"):
        read_clip(path, frames=5, fps=16.0, height=16, width=16)


def film(path: Path, codec: str, pix_fmt: str, frame: av.VideoFrame, **context: int) -> Path:
    """Write three times the same frame."""
    with av.open(str(path), "w") as container:
        options = {"x265-params": "log-level=none:lossless=1"} if codec == "libx265" else {}
        stream = container.add_stream(codec, rate=24, options=options)
        stream.height, stream.width, stream.pix_fmt = frame.height, frame.width, pix_fmt
        for name, value in context.items():
            setattr(stream.codec_context, name, value)
        for _ in range(3):
            frame.pts = None
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def colour(path: Path, frames: int = 1) -> list[int]:
    """The colour of a clip's middle, 0…255."""
    pixels = read_clip(path, frames=frames, fps=24.0, height=48, width=64)[
        :, -1, 20:28, 28:36
    ].mean(dim=(1, 2))
    return [round(value) for value in ((pixels + 1) * 127.5).tolist()]


def test_transparency_of_a_video_is_put_on_white(tmp_path: Path) -> None:
    rgba = np.full((48, 64, 4), (200, 0, 0, 128), np.uint8)
    path = film(
        tmp_path / "a.mov",
        "qtrle",
        "argb",
        av.VideoFrame.from_ndarray(rgba, format="rgba").reformat(format="argb"),
    )
    Image.fromarray(rgba).save(tmp_path / "a.png")
    assert colour(path, 3) == pytest.approx([227, 127, 127], abs=1)
    assert colour(path) == pytest.approx(colour(tmp_path / "a.png"), abs=1)


@pytest.mark.parametrize("codec", ["libvpx", "libvpx-vp9"])
def test_transparency_of_a_webm_is_put_on_white(tmp_path: Path, codec: str) -> None:
    """Also in a window: its transparency may have keyframes of its own, so it is decoded from the
    start."""
    path = tmp_path / "a.webm"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            codec, rate=24, options={"auto-alt-ref": "0", "g": "5", "deadline": "realtime"}
        )
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuva420p"
        for i in range(12):
            rgba = np.full((48, 64, 4), (200, 0, 0, 20 * i), np.uint8)
            container.mux(
                stream.encode(
                    av.VideoFrame.from_ndarray(rgba, format="rgba").reformat(format="yuva420p")
                )
            )
        container.mux(stream.encode(None))
    expected = np.array([[255 - (255 - c) * 20 * i / 255 for c in (200, 0, 0)] for i in range(12)])
    whole = read_clip(path, frames=12, fps=24.0, height=48, width=64)
    assert ((whole[:, :, 24, 32].T + 1) * 127.5).numpy() == pytest.approx(expected, abs=6)
    assert torch.equal(
        read_clip(path, frames=5, fps=24.0, height=48, width=64, start_seconds=7 / 24), whole[:, 7:]
    )


def test_a_transparency_that_no_decoder_here_reads_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = av.VideoFrame.from_ndarray(np.full((48, 64, 4), 128, np.uint8), format="rgba").reformat(
        format="yuva420p"
    )
    path = film(tmp_path / "a.webm", "libvpx-vp9", "yuva420p", frame)
    monkeypatch.setattr(video_packets, "_WITH_ALPHA", {"vp9": "libvpx-of-nobody"})
    with pytest.raises(
        UserError,
        match="has transparency .alpha_mode. in a codec that is not supported; convert it",
    ):
        read_clip(path, frames=1, fps=24.0, height=16, width=16)


def of_planes(
    pix_fmt: str, luma: int, width: int = 64, height: int = 48, chroma: int = 512
) -> av.VideoFrame:
    """A 10-bit 4:2:0 frame of one colour."""
    frame = av.VideoFrame(width, height, pix_fmt)
    for plane, code in zip(frame.planes, (luma, chroma, chroma), strict=True):
        plane.update(np.full(plane.buffer_size // 2, code, np.uint16).tobytes())
    return frame


@pytest.mark.parametrize(
    ("transfer", "code", "level"),
    [(16, 572, 241), (16, 447, 140), (18, 721, 241), (16, 64, 0), (16, 940, 255)],
)
def test_hdr_is_shown_as_sdr(tmp_path: Path, transfer: int, code: int, level: int) -> None:
    """PQ of 203 cd/m² is 58 % (code 572), HLG's white 75 % (721); PQ of 50 cd/m² is 44 % and 0.2463
    of white, which BT.1886 has at 142."""
    path = film(
        tmp_path / "a.mp4", "libx265", "yuv420p10le", of_planes("yuv420p10le", code),
        color_trc=transfer,
        color_primaries=9, colorspace=9, color_range=1,
    )  # fmt: skip
    assert video.is_hdr(path)
    assert colour(path) == pytest.approx([level] * 3, abs=3)


@pytest.mark.parametrize(("transfer", "refused"), [(2, True), (16, False)])
def test_dolby_vision_without_another_image_is_refused(
    tmp_path: Path, transfer: int, refused: bool
) -> None:
    path = film(
        tmp_path / "a.mp4",
        "libx265",
        "yuv420p10le",
        of_planes("yuv420p10le", 502),
        color_trc=transfer,
    )
    whole = path.read_bytes()
    assert whole.count(b"hev1") == 1
    path.write_bytes(whole.replace(b"hev1", b"dvh1"))
    with pytest.raises(UserError, match="is Dolby Vision profile 5") if refused else nullcontext():
        colour(path)


@pytest.mark.parametrize("type_of_stream", [0x80, 0xF0])
def test_a_type_of_stream_that_is_no_text_is_read(tmp_path: Path, type_of_stream: int) -> None:
    """Cameras and broadcasters number their streams in MPEG-TS from 0x80 on; what is in them, the
    decoder finds out."""
    path = numbered_video(tmp_path / "a.ts", frames=6, fps=12.0)
    whole = bytearray(path.read_bytes())
    tables = [
        at
        for at in range(0, len(whole), 188)
        if whole[at + 1] & 0x5F == 0x50 and whole[at + 2] == 0
    ]
    assert tables, "the program's map is in packets 0x1000"
    for start in tables:
        table = start + 5 + whole[start + 4]  # behind the header, a pointer and what it points over
        end = table + 3 + ((whole[table + 1] & 15) << 8 | whole[table + 2]) - 4
        assert whole[table] == 2 and whole[table + 12] == 0x1B, "H.264"
        whole[table + 12] = type_of_stream
        whole[end : end + 4] = mpeg_crc(whole[table:end]).to_bytes(4, "big")
    path.write_bytes(whole)
    assert frame_numbers(path, frames=6, fps=12.0) == list(range(6))


def mpeg_crc(data: bytes) -> int:
    """The checksum of MPEG-TS's tables (ISO 13818-1, annex A)."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte << 24
        for _ in range(8):
            value = (value << 1 ^ (0x04C11DB7 if value >> 31 else 0)) & 0xFFFFFFFF
    return value


def test_a_sample_entry_that_is_no_text_is_not_taken_for_dolby_vision(tmp_path: Path) -> None:
    """What MPEG-4's own description of the stream says is enough to decode it."""
    path = numbered_video(tmp_path / "a.mp4", frames=6, fps=12.0, codec="mpeg4")
    whole = path.read_bytes()
    assert whole.count(b"mp4v") == 1
    path.write_bytes(whole.replace(b"mp4v", b"mp\xe9v"))
    assert frame_numbers(path, frames=6, fps=12.0) == list(range(6))


def test_ten_bits_and_grey_are_read(tmp_path: Path) -> None:
    ten = film(tmp_path / "a.mp4", "libx265", "yuv420p10le", of_planes("yuv420p10le", 502))
    assert colour(ten) == pytest.approx([128] * 3, abs=2) and not video.is_hdr(ten)
    grey = av.VideoFrame.from_ndarray(np.full((48, 64), 90, np.uint8), format="gray")
    assert colour(film(tmp_path / "b.mkv", "ffv1", "gray", grey)) == pytest.approx([90] * 3, abs=1)
    Image.new("L", (64, 48), 90).save(tmp_path / "b.png")
    Image.new("CMYK", (64, 48), (0, 0, 0, 165)).save(tmp_path / "c.jpg")
    assert colour(tmp_path / "b.png") == [90] * 3
    assert colour(tmp_path / "c.jpg") == pytest.approx([90] * 3, abs=2)


def test_odd_sizes_are_read_whole(tmp_path: Path) -> None:
    frame = av.VideoFrame.from_ndarray(np.full((47, 63, 3), 90, np.uint8), format="rgb24")
    path = film(tmp_path / "a.mkv", "ffv1", "bgr0", frame.reformat(format="bgr0"))
    assert available(path, 24.0)[1:] == (47, 63)
    clip = read_clip(path, frames=3, fps=24.0, height=47, width=63)
    assert clip.shape == (3, 3, 47, 63) and clip.min() == clip.max()


@pytest.mark.parametrize("name", ["animated.png", "animated.webp", "pages.tif", "deep.tif"])
def test_images_that_are_not_one_of_8_or_16_bits_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "deep.tif":
        Image.fromarray(np.full((48, 64), 1000, np.float32)).save(path)
    else:
        one, other = (Image.new("RGB", (64, 48), shade) for shade in ("red", "blue"))
        one.save(path, save_all=True, append_images=[other])
    said = "numbers of 32 bits" if name == "deep.tif" else "animated or has several pages"
    with pytest.raises(UserError, match=said):
        read_clip(path, frames=1, fps=24.0, height=16, width=16)
