"""Windows of long files: which ones, and read without decoding from the start, bitwise."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from data_specs import CLIPS
from media_files import numbered_video, picture

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset, scan
from ditkit_core.data.media import video
from ditkit_core.data.media.clip import read_clip
from ditkit_core.data.media.packets import h264_units
from ditkit_core.data.windows import Window, windows_of
from ditkit_core.errors import UserError

LENGTH = 72
GROUP = 12


def moving(path: Path, codec: str, options: dict[str, str]) -> Path:
    """Write frames that all differ, 24 a second, with a keyframe every GROUP."""
    still = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=24, options={"g": str(GROUP), **options})
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        for i in range(LENGTH):
            shown = np.roll(still, i, axis=1)
            shown[:8] = i
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shown, format="rgb24")))
        container.mux(stream.encode(None))
    return path


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the packets that are read, and so the frames that are decoded."""
    count = [0]
    packets = video._packets

    def counting(*given: Any) -> Iterator[Any]:
        for packet in packets(*given):
            count[0] += 1
            yield packet

    monkeypatch.setattr(video, "_packets", counting)
    return count


FROM_KEYFRAMES = {
    "h264.mp4": ("libx264", {"bf": "3"}),
    "fragments.mp4": ("libx264", {}),
    "h264.mkv": ("libx264", {}),
    "open.mp4": ("libx265", {"x265-params": f"log-level=none:open-gop=1:keyint={GROUP}"}),
    "vp9.webm": ("libvpx-vp9", {"deadline": "realtime"}),
    "mpeg2.mkv": ("mpeg2video", {"bf": "2"}),
}
FROM_THE_START = {
    "open.mp4": ("libx264", {"bf": "3", "x264-params": "open-gop=1"}),
    "refresh.mp4": ("libx264", {"x264-params": "intra-refresh=1"}),
    "old.avi": ("mpeg4", {}),
    "stream.ts": ("libx264", {}),
}


@pytest.mark.parametrize("name", [*FROM_KEYFRAMES, *(f"whole {name}" for name in FROM_THE_START)])
def test_a_window_is_what_decoding_from_the_start_gives(
    tmp_path: Path, decoded: list[int], name: str
) -> None:
    kind, _, file = name.rpartition(" ")
    codec, options = FROM_THE_START[file] if kind else FROM_KEYFRAMES[file]
    path = moving(tmp_path / file, codec, options)
    whole = list(video.frames_at(path, [i / 24 for i in range(LENGTH)]))
    for first in (1, GROUP - 1, GROUP, GROUP + 1, 50, LENGTH - 5):
        decoded[0] = 0
        window = list(video.frames_at(path, [(first + i) / 24 for i in range(5)]))
        assert all(
            np.array_equal(one, other)
            for one, other in zip(window, whole[first : first + 5], strict=True)
        )
        if not kind:
            assert decoded[0] <= 2 * GROUP + 5 + 8, "a decoder holds a few frames back"


def test_a_window_late_in_a_long_file_decodes_little_of_it(
    tmp_path: Path, decoded: list[int]
) -> None:
    path = numbered_video(tmp_path / "long.mp4", frames=30, fps=1)
    with av.open(str(tmp_path / "hour.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=8, options={"g": "16", "preset": "ultrafast"})
        stream.height, stream.width, stream.pix_fmt = 16, 16, "yuv420p"
        for i in range(8 * 600):
            frame = av.VideoFrame.from_ndarray(
                np.full((16, 16, 3), i % 250, np.uint8), format="rgb24"
            )
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    clip = read_clip(
        tmp_path / "hour.mp4", frames=9, fps=8.0, height=16, width=16, start_seconds=550.0
    )
    assert decoded[0] < 16 + 9 + 8 < 8 * 600
    levels = ((clip.mean(dim=(0, 2, 3)) + 1) * 127.5).tolist()
    assert levels == pytest.approx([(8 * 550 + i) % 250 for i in range(9)], abs=3)
    assert read_clip(path, frames=2, fps=1.0, height=16, width=16, start_seconds=20.0).shape == (
        3,
        2,
        16,
        16,
    )


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_a_window_of_a_variable_frame_rate_is_read_by_time(tmp_path: Path, name: str) -> None:
    ticks = [0, 40, 80, 300, 320, 340, 700, 900, 940, 1000, 1500, 1520]
    path = numbered_video(
        tmp_path / name,
        frames=12,
        ticks=ticks,
        options={"movie_timescale": "1000"} if ".mp4" in name else {},
    )
    for start in (0.32, 0.9, 1.1):
        clip = read_clip(path, frames=5, fps=10.0, height=16, width=16, start_seconds=start)
        levels = ((clip.mean(dim=(0, 2, 3)) + 1) * 127.5 / 8).round().tolist()
        assert levels == [
            sum(tick <= 1000 * (start + i / 10) + 1 for tick in ticks) - 1 for i in range(5)
        ]


def test_the_rotation_and_the_end_are_those_of_the_whole_file(tmp_path: Path) -> None:
    path = numbered_video(tmp_path / "turned.mp4", rotation=90)
    late = read_clip(path, frames=4, fps=24.0, height=64, width=48, start_seconds=0.5)
    assert torch.equal(late, read_clip(path, frames=16, fps=24.0, height=64, width=48)[:, 12:])
    with pytest.raises(UserError, match="ends after 1.00 s, but a frame at 1.00 s was requested"):
        read_clip(path, frames=13, fps=24.0, height=64, width=48, start_seconds=0.5)


def test_units_of_a_damaged_packet_are_none_or_few() -> None:
    header = bytes([1, 0, 0, 0, 0xFF])
    assert h264_units(b"\x00\x00\x00\x02\x65\x00\x00\x00\x00\x01\x41", header) == {5, 1}
    assert h264_units(b"\xff\xff\xff\xff\x65", header) == {5}
    assert h264_units(b"\x00\x00\x00\x02\x65\x00", b"") == set()


def config(**settings: Any) -> DataConfig:
    return DataConfig(**{"folder": "x", "frames": 9, **settings})


def firsts(there: int, **settings: Any) -> list[int]:
    return [window.first for window in windows_of(there, config(**settings), "clip")]


def test_uniform_windows_begin_at_the_start_and_end_at_the_end() -> None:
    assert firsts(49, windows="uniform", clips_per_file=5) == [0, 10, 20, 30, 40]
    assert firsts(50, windows="uniform", clips_per_file=3) == [0, 21, 41]
    assert firsts(49, windows="uniform") == [20], "a single one lies in the middle"
    assert firsts(9, windows="uniform", clips_per_file=5) == [0]
    assert firsts(11, windows="uniform", clips_per_file=5) == [0, 1, 2]


def test_all_windows_follow_each_other_without_a_gap() -> None:
    assert firsts(30, windows="all") == [0, 9, 18]
    found = windows_of(31, config(frames=0, frame_buckets=(5, 17), windows="all"), "clip")
    assert found == [Window(0, 0, 17), Window(1, 17, 5), Window(2, 22, 5)]


def test_random_windows_are_a_function_of_seed_name_and_number() -> None:
    two, five = (firsts(1000, windows="random", clips_per_file=count) for count in (2, 5))
    assert five[:2] == two and two == firsts(1000, windows="random", clips_per_file=2)
    assert five != firsts(1000, windows="random", clips_per_file=5, seed=1)
    other = [
        window.first
        for window in windows_of(1000, config(windows="random", clips_per_file=5), "other")
    ]
    assert five != other
    drawn = np.array([firsts(109, windows="random", seed=seed)[0] for seed in range(2000)])
    assert drawn.min() == 0 and drawn.max() == 100
    assert abs(drawn.mean() - 50) < 2.5  # 3.8 standard deviations


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, frames in (("long", 30), ("middle", 14), ("short", 7)):
        numbered_video(tmp_path / f"{name}.mp4", frames=frames, fps=16)
        (tmp_path / f"{name}.txt").write_text(name)
    picture(tmp_path / "still.png")
    (tmp_path / "still.txt").write_text("still")
    return tmp_path


def look(folder: Path, **settings: Any) -> Dataset:
    data = DataConfig(**{"folder": str(folder), "frames": 5, "height": 32, "width": 32, **settings})
    return scan(data, CLIPS)


def summary(dataset: Dataset) -> dict[str, tuple[int, float]]:
    return {sample.id: (sample.frames, 16 * sample.start_seconds) for sample in dataset.samples}


def test_each_window_is_a_sample_and_single_ones_keep_their_name(folder: Path) -> None:
    assert summary(look(folder)) == {
        "long": (5, 0),
        "middle": (5, 0),
        "short": (5, 0),
        "still": (1, 0),
    }
    assert summary(look(folder, windows="uniform", clips_per_file=2)) == {
        "long#0": (5, 0), "long#1": (5, 25), "middle#0": (5, 0), "middle#1": (5, 9), "short#0": (5,
        0),
        "short#1": (5, 2), "still": (1, 0),
    }  # fmt: skip
    assert [id for id in summary(look(folder, windows="all", frames=13,
        short_clips="shorten"))] == [
        "long#0", "long#1", "middle", "short", "still",
    ]  # fmt: skip


def test_a_file_with_the_name_of_a_window_is_refused(folder: Path) -> None:
    numbered_video(folder / "long#1.mp4", frames=5, fps=16)
    (folder / "long#1.txt").write_text("another")
    assert "long#1" in summary(look(folder))
    with pytest.raises(
        UserError, match=r"get the sample id 'long#1' .*; rename one of the files"
    ) as error:
        look(folder, windows="uniform", clips_per_file=2, on_bad="skip")
    assert "long.mp4" in str(error.value) and "long#1.mp4" in str(error.value)


def test_windows_are_read_where_they_lie(folder: Path) -> None:
    for sample in look(folder, windows="uniform", clips_per_file=3).samples:
        clip = read_clip(
            sample.media,
            frames=sample.frames,
            fps=16.0,
            height=16,
            width=16,
            start_seconds=sample.start_seconds,
        )
        if sample.frames > 1:
            levels = ((clip.mean(dim=(0, 2, 3)) + 1) * 127.5 / 8).round().tolist()
            assert levels == [16 * sample.start_seconds + i for i in range(5)]


def test_each_clip_gets_the_longest_length_that_it_fills(folder: Path) -> None:
    found = summary(look(folder, frames=0, frame_buckets=(5, 13, 29)))
    assert found == {"long": (29, 0), "middle": (13, 0), "short": (5, 0), "still": (1, 0)}
    with pytest.raises(
        UserError,
        match="short.mp4 has 7 frames at 16 fps, but data.frame_buckets asks for 13; add 5 to data.frame_buckets",
    ):
        look(folder, frames=0, frame_buckets=(13, 29))
    assert summary(look(folder, frames=0, frame_buckets=(13,), short_clips="shorten"))["short"] == (
        5,
        0,
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"clips_per_file": 3},
            'clips_per_file = 3 has no effect with data.windows = "first"; set data.windows = "uniform"',
        ),
        (
            {"clips_per_file": 3, "windows": "all"},
            'has no effect with data.windows = "all"; remove it',
        ),
        ({"clips_per_file": 0}, "clips_per_file = 0 is not between 1 and 1000; set 1"),
        (
            {"frame_buckets": (5, 9), "frames": 5},
            "data.frames and data.frame_buckets are both set; remove data.frames",
        ),
        ({"frame_buckets": (5, 5), "frames": 0}, "must contain different lengths from 1 to 65536"),
        ({"frame_buckets": (0, 5), "frames": 0}, "must contain different lengths"),
        (
            {"frame_buckets": (5, 10), "frames": 0},
            r"frame_buckets = \[5, 10\]: 10 is not 1 \+ k \* 4; set 9 or 13",
        ),
    ],
)
def test_windows_that_contradict_themselves_are_said(
    folder: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        look(folder, **settings)
