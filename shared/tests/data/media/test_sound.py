"""Sound of files and of videos: decoded, resampled, and in step with the first picture."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from ditkit_core.data.media.sound import decode_sound, sound_seconds
from ditkit_core.errors import UserError

RATE = 16_000


def tone(seconds: float = 1.0, rate: int = RATE) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def write(path: Path, codec: str, samples: np.ndarray, *, rate: int = RATE, delay: float = 0.0, fps: int = 0) -> Path:
    """A sound file, or a video of one second with a track that begins later by `delay` seconds."""
    with av.open(str(path), "w") as container:
        if fps:
            pictures = container.add_stream("libx264", rate=fps)
            pictures.width, pictures.height, pictures.pix_fmt = 64, 48, "yuv420p"
        stream = container.add_stream(codec, rate=rate, layout="mono")
        for _ in range(fps):
            container.mux(pictures.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")))
        if fps:
            container.mux(pictures.encode(None))
        frame = av.AudioFrame.from_ndarray((samples * 32767).astype(np.int16)[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = rate, round(delay * rate), Fraction(1, rate)
        resampler = av.AudioResampler(format=stream.codec_context.format, layout="mono", rate=rate)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return path


@pytest.mark.parametrize(
    ("name", "codec", "off"), [("a.wav", "pcm_s16le", 1e-4), ("a.flac", "flac", 1e-4), ("a.mp3", "libmp3lame", 0.1)]
)
def test_sound_files_are_decoded(tmp_path: Path, name: str, codec: str, off: float) -> None:
    sound, rate = decode_sound(write(tmp_path / name, codec, tone()))
    assert rate == RATE and abs(len(sound) - RATE) <= (0 if off < 0.01 else 1200)
    assert np.abs(sound[2000:14000] - tone()[2000:14000]).max() < off or codec == "libmp3lame"
    assert abs(float(np.sqrt(np.square(sound[2000:14000]).mean())) - 0.5 / np.sqrt(2)) < 0.02
    assert abs(sound_seconds(tmp_path / name) - 1) < 0.1


def test_it_is_resampled(tmp_path: Path) -> None:
    sound, rate = decode_sound(write(tmp_path / "a.wav", "pcm_s16le", tone(rate=48_000), rate=48_000), rate=RATE)
    assert rate == RATE and len(sound) == RATE
    assert np.abs(sound[200:-200] - tone()[200:-200]).max() < 1e-2


def test_decoding_stops(tmp_path: Path) -> None:
    path = write(tmp_path / "a.flac", "flac", tone(4.0))
    assert len(decode_sound(path, until_seconds=1.5)[0]) == 24_000
    assert len(decode_sound(path, until_seconds=9.0)[0]) == 64_000


@pytest.mark.parametrize("delay", [0.0, 0.25])
def test_the_track_of_a_video_is_in_step_with_its_first_picture(tmp_path: Path, delay: float) -> None:
    sound, _ = decode_sound(write(tmp_path / "a.mkv", "flac", tone(), delay=delay, fps=8))
    start = round(delay * RATE)
    assert not sound[:start].any()
    assert np.abs(sound[start : start + RATE] - tone()).max() < 1e-3
    assert abs(sound_seconds(tmp_path / "a.mkv") - 1 - delay) < 0.05


def test_a_video_without_sound_is_one_line(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")))
        container.mux(stream.encode(None))
    with pytest.raises(UserError, match=r"a\.mp4 has no sound; give a file with a sound track"):
        decode_sound(tmp_path / "a.mp4")
    assert sound_seconds(tmp_path / "a.mp4") == 0
    (tmp_path / "text.wav").write_text("not a sound")
    with pytest.raises(UserError, match="cannot be decoded as sound"):
        decode_sound(tmp_path / "text.wav")
