"""Sound of files and of videos: decoded, resampled, made one channel, and placed where its
timestamps say, from the first picture on."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from ditkit_core.data.media.clip import available, read_clip
from ditkit_core.data.media.sound import decode_sound, sound_changes_since_first, sound_seconds
from ditkit_core.encoding.cache import MediaHashes
from ditkit_core.errors import UserError
from ditkit_core.testing.combinations import every_value

RATE = 16_000


def tone(seconds: float = 1.0, rate: int = RATE) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)).astype(
        np.float32
    )


def write(
    path: Path,
    codec: str,
    samples: np.ndarray,
    *,
    rate: int = RATE,
    delay: float = 0.0,
    fps: int = 0,
    moved: Callable[[float], float | None] = lambda seconds: seconds,
) -> Path:
    """A sound file, or a video of at least one second with a track that begins later by `delay`
    seconds.

    Args:
        samples: One channel, or channels by samples.
        moved: From the time of a packet of sound to the time that it gets; None leaves it out.
    """
    planes = np.atleast_2d(samples)
    layout = {1: "mono", 2: "stereo"}[len(planes)]
    with av.open(str(path), "w") as container:
        if fps:
            pictures = container.add_stream("libx264", rate=fps, options={"g": "8"})
            pictures.width, pictures.height, pictures.pix_fmt = 64, 48, "yuv420p"
        stream = container.add_stream(codec, rate=rate, layout=layout)
        for _ in range(round(fps * max(planes.shape[1] / rate, 1))):
            container.mux(
                pictures.encode(
                    av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")
                )
            )
        if fps:
            container.mux(pictures.encode(None))
        frame = av.AudioFrame.from_ndarray(
            (planes * 32767).astype(np.int16), format="s16p", layout=layout
        )
        frame.sample_rate, frame.pts, frame.time_base = rate, round(delay * rate), Fraction(1, rate)
        resampler = av.AudioResampler(format=stream.codec_context.format, layout=layout, rate=rate)
        frames = [*resampler.resample(frame), *resampler.resample(None), None]
        for packet in [packet for part in frames for packet in stream.encode(part)]:
            time = moved(float(packet.pts * packet.time_base))
            if time is not None:
                packet.pts = packet.dts = round(time / packet.time_base)
                container.mux(packet)
    return path


def clicks(*times: float, seconds: float = 2.5, rate: int = RATE) -> np.ndarray:
    """Silence with clicks of a hundredth of a second."""
    samples = np.zeros(round(seconds * rate), np.float32)
    for time in times:
        samples[round(time * rate) : round((time + 0.01) * rate)] = 0.8
    return samples


def click_times(path: Path) -> list[float]:
    """When the clicks of a file begin."""
    sound, rate = decode_sound(path, rate=RATE)
    loud = np.flatnonzero(np.abs(sound) > 0.4) / rate
    return [float(time) for time in loud[np.diff(loud, prepend=-1.0) > 0.1]]


def plainly_decoded(path: Path, rate: int) -> np.ndarray:
    """All samples of a sound file through one resampler, one after another, and the mean of the
    channels."""
    with av.open(str(path)) as container:
        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="fltp", layout=stream.layout, rate=rate)
        frames = [
            part
            for frame in [*container.decode(stream), None]
            for part in resampler.resample(frame)
        ]
    return np.concatenate([frame.to_ndarray().mean(axis=0) for frame in frames])


@pytest.mark.parametrize(
    ("name", "codec", "off"),
    [("a.wav", "pcm_s16le", 1e-4), ("a.flac", "flac", 1e-4), ("a.mp3", "libmp3lame", 0.1)],
)
def test_sound_files_are_decoded(tmp_path: Path, name: str, codec: str, off: float) -> None:
    sound, rate = decode_sound(write(tmp_path / name, codec, tone()))
    assert rate == RATE and abs(len(sound) - RATE) <= (0 if off < 0.01 else 1200)
    assert np.abs(sound[2000:14000] - tone()[2000:14000]).max() < off or codec == "libmp3lame"
    assert abs(float(np.sqrt(np.square(sound[2000:14000]).mean())) - 0.5 / np.sqrt(2)) < 0.02
    assert abs(sound_seconds(tmp_path / name) - 1) < 0.1


def test_it_is_resampled(tmp_path: Path) -> None:
    sound, rate = decode_sound(
        write(tmp_path / "a.wav", "pcm_s16le", tone(rate=48_000), rate=48_000), rate=RATE
    )
    assert rate == RATE and len(sound) == RATE
    assert np.abs(sound[200:-200] - tone()[200:-200]).max() < 1e-2


def test_decoding_stops(tmp_path: Path) -> None:
    path = write(tmp_path / "a.flac", "flac", tone(4.0))
    assert len(decode_sound(path, until_seconds=1.5)[0]) == 24_000
    assert len(decode_sound(path, until_seconds=9.0)[0]) == 64_000


@pytest.mark.parametrize("delay", [0.0, 0.25])
def test_the_track_of_a_video_is_in_step_with_its_first_picture(
    tmp_path: Path, delay: float
) -> None:
    sound, _ = decode_sound(write(tmp_path / "a.mkv", "flac", tone(), delay=delay, fps=8))
    start = round(delay * RATE)
    assert not sound[:start].any()
    assert np.abs(sound[start : start + RATE] - tone()).max() < 1e-3
    assert abs(sound_seconds(tmp_path / "a.mkv") - 1 - delay) < 0.05


def test_a_video_without_sound_is_one_line(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.mux(
            stream.encode(
                av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")
            )
        )
        container.mux(stream.encode(None))
    with pytest.raises(UserError, match=r"a\.mp4 has no sound; give a file with a sound track"):
        decode_sound(tmp_path / "a.mp4")
    assert sound_seconds(tmp_path / "a.mp4") == 0
    (tmp_path / "text.wav").write_text("not a sound")
    with pytest.raises(UserError, match="cannot be decoded as sound"):
        decode_sound(tmp_path / "text.wav")


def hole(seconds: float) -> float | None:
    """Without the packets from 0.5 s to 1 s."""
    return None if 0.5 <= seconds < 1 else seconds


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
@pytest.mark.parametrize(
    ("moved", "expected"),
    [
        (hole, [0.3, 1.5, 2.2]),
        # single packets that are lost
        (lambda t: None if round(t * RATE) // 1024 % 8 == 5 else t, [0.3, 1.5, 2.2]),
        # half a second of sound whose packets follow each other twice as fast as they last
        (lambda t: t if t < 0.5 else max(0.25 + t / 2, t - 0.25), [0.3, 1.25, 1.95]),
        # a clock that is slow by a twentieth, and one that is fast
        (lambda t: 1.05 * t, [0.315, 1.575, 2.31]),
        (lambda t: 0.95 * t, [0.285, 1.425, 2.09]),
        # each time a little off, and no hole
        (lambda t: t + 0.01 * (round(t * RATE) // 1024 % 3), [0.3, 1.5, 2.2]),
        # as if the recording had been stopped for a second
        (lambda t: t if t < 1 else t + 1, [0.3, 2.5, 3.2]),
    ],
)
def test_sound_is_where_its_timestamps_say(
    tmp_path: Path, name: str, moved: Callable[[float], float | None], expected: list[float]
) -> None:
    path = write(tmp_path / name, "aac", clicks(0.3, 1.5, 2.2), fps=16, moved=moved)
    assert click_times(path) == pytest.approx(expected, abs=0.045)
    sound, rate = decode_sound(path)
    assert abs(len(sound) / rate - sound_seconds(path)) < 0.1
    part, _ = decode_sound(path, until_seconds=0.9)
    assert len(part) == round(0.9 * rate) and np.array_equal(part[:-200], sound[: len(part) - 200])


def test_a_hole_is_silent_and_what_surrounds_it_as_without_it(tmp_path: Path) -> None:
    whole, _ = decode_sound(write(tmp_path / "whole.mkv", "flac", tone(2.5), fps=8))
    with_hole, _ = decode_sound(write(tmp_path / "hole.mkv", "flac", tone(2.5), fps=8, moved=hole))
    (missing,) = np.nonzero(whole != with_hole)
    # the packets of FLAC that begin in the hole, to a sample: Matroska rounds times to a
    # millisecond
    assert (
        not with_hole[missing[0] : missing[0] + 4608].any()
        and missing[-1] - missing[0] <= 2 * 4608 + 16
    )
    assert len(with_hole) == len(whole) and with_hole[: RATE // 2].any() and with_hole[-RATE:].any()


@pytest.mark.parametrize(
    ("kind", "rate"),
    every_value(
        [
            ("a.mp4", "aac"),
            ("a.mkv", "aac"),
            ("a.webm", "libopus"),
            ("a.mp3", "libmp3lame"),
            ("a.wav", "pcm_s16le"),
        ],
        [RATE, 44_100],
    ),
)
def test_sound_without_holes_is_bitwise_what_one_resampler_gives(
    tmp_path: Path, kind: tuple[str, str], rate: int
) -> None:
    name, codec = kind
    stereo = np.stack([tone(1.5, 48_000), 0.3 * np.cos(np.arange(72_000) / 9).astype(np.float32)])
    path = write(tmp_path / name, codec, stereo, rate=48_000)
    assert decode_sound(path, rate=rate)[0].tobytes() == plainly_decoded(path, rate).tobytes()
    assert sound_changes_since_first(path) == ""
    if path.suffix in (".mp4", ".mkv"):
        track = write(path.with_stem("video"), codec, stereo, rate=48_000, fps=8)
        assert decode_sound(track, rate=rate)[0].tobytes() == plainly_decoded(track, rate).tobytes()
        assert sound_changes_since_first(track) == ""


def test_a_window_in_a_hole_is_silence(tmp_path: Path) -> None:
    """A track that goes on later has sound there, which is silent; a track that has ended has
    none."""
    path = write(tmp_path / "a.mkv", "aac", tone(2.5), fps=16, moved=hole)
    sound, rate = decode_sound(path, until_seconds=0.95)
    assert len(sound) == round(0.95 * rate) and not sound[round(0.6 * rate) :].any()
    late = write(tmp_path / "late.mkv", "flac", tone(1.0), fps=8, delay=0.5)
    sound, rate = decode_sound(late, until_seconds=0.4)
    assert len(sound) == round(0.4 * rate) and not sound.any()
    ended = write(tmp_path / "ended.mp4", "aac", tone(0.5), fps=8)
    assert len(decode_sound(ended, until_seconds=0.9)[0]) < 0.6 * RATE


def test_a_rate_or_a_layout_that_changes_within_a_track_changes_no_times(tmp_path: Path) -> None:
    both = np.stack([clicks(0.5, seconds=1, rate=48_000)] * 2)
    first = write(tmp_path / "first.aac", "aac", clicks(0.5, seconds=1.024))
    (tmp_path / "a.aac").write_bytes(
        first.read_bytes() + write(tmp_path / "second.aac", "aac", both, rate=48_000).read_bytes()
    )
    start, seconds = click_times(first)[0], len(decode_sound(first)[0]) / RATE
    assert decode_sound(tmp_path / "a.aac")[1] == RATE
    assert click_times(tmp_path / "a.aac") == pytest.approx([start, seconds + 0.5], abs=0.045)


def test_time_begins_with_the_first_frame_that_is_shown(tmp_path: Path) -> None:
    """A stream that was caught between two keyframes: the packets before the first one cannot be
    decoded."""
    source = write(tmp_path / "a.mkv", "flac", clicks(1.5), fps=16)
    for name in ("part.mkv", "part.mp4", "part.ts"):
        with av.open(str(source)) as read, av.open(str(tmp_path / name), "w") as written:
            copies = [
                written.add_stream_from_template(read.streams.video[0]),
                written.add_stream("mp2", rate=RATE, layout="mono"),
            ]
            packets = [packet for packet in read.demux(video=0) if packet.dts is not None]
            for packet in packets[5:]:
                packet.stream = copies[0]
                written.mux(packet)
            read.seek(0)
            for frame in read.decode(audio=0):
                written.mux(copies[1].encode(frame))
            written.mux(copies[1].encode(None))
        # a keyframe every eight frames: the first frame is the ninth
        assert click_times(tmp_path / name) == pytest.approx([1.5 - 8 / 16], abs=0.045)
        assert sound_changes_since_first(tmp_path / name)
        frames = available(tmp_path / name, 16.0).frames
        assert (
            frames
            == 40 - 8
            == read_clip(tmp_path / name, frames=frames, fps=16.0, height=32, width=32).shape[1]
        )
        assert sound_seconds(tmp_path / name) == pytest.approx(2.5 - 8 / 16, abs=0.1)


def test_timestamps_that_need_all_memory_are_one_line(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.mkv", "aac", tone(1.0), fps=16, moved=lambda t: t if t < 0.5 else t + 90_000
    )
    with pytest.raises(
        UserError, match=r"a\.mkv has no sound for 90000 s, by its timestamps; convert it again"
    ) as caught:
        decode_sound(path)
    assert "\n" not in str(caught.value)
    assert len(decode_sound(path, until_seconds=2.0)[0]) == 2 * RATE


@pytest.mark.parametrize(
    ("share", "is_loudest"), [(-1.0, True), (-0.9, True), (0.0, False), (0.5, False), (1.0, False)]
)
def test_channels_that_cancel_leave_the_loudest(
    tmp_path: Path, share: float, is_loudest: bool
) -> None:
    path = write(tmp_path / "a.wav", "pcm_s16le", np.stack([share * tone(), tone()]))
    expected = share * tone() if share == -1 else tone() if is_loudest else (1 + share) / 2 * tone()
    assert np.abs(decode_sound(path)[0] - expected).max() < 1e-3
    assert bool(sound_changes_since_first(path)) == is_loudest


def test_only_sound_that_was_read_otherwise_gets_another_hash(tmp_path: Path) -> None:
    """The cache has entries of earlier versions, and remembers hashes that these computed."""
    whole = write(tmp_path / "whole.mkv", "aac", tone(1.5), fps=16)
    torn = write(tmp_path / "torn.mkv", "aac", tone(1.5), fps=16, moved=hole)
    table = tmp_path / "music.npy"
    np.save(table, np.zeros((2, 35)))
    for _ in range(2):
        with MediaHashes(tmp_path) as hashes:
            assert hashes.of_sound(whole) == hashes.of(whole) and hashes.of_sound(
                table
            ) == hashes.of(table)
            assert hashes.of_sound(torn) != hashes.of(torn)


def test_a_codec_that_nobody_knows_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mkv", "aac", tone())
    data = path.read_bytes()
    assert data.count(b"A_AAC") == 1
    path.write_bytes(data.replace(b"A_AAC", b"A_ZZZ"))
    with pytest.raises(UserError, match="has sound in a codec that is not supported; convert it"):
        decode_sound(path)
