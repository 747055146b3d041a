"""Media files that the data tests write: small, and each with a property of its own."""

from collections.abc import Hashable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

LEVELS = 8
"""Brightness step between frames: far above what compression changes."""
_ENCODED: dict[Hashable, bytes] = {}


def numbered_video(
    path: Path,
    *,
    frames: int = 24,
    fps: float = 24,
    size: tuple[int, int] = (48, 64),
    ticks: Sequence[int] | None = None,
    codec: str = "libx264",
    rotation: int = 0,
    options: dict[str, str] | None = None,
) -> Path:
    """Write a video whose frame i has brightness LEVELS * i; `ticks` are presentation times in
    milliseconds. Of one kind the bytes are encoded once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = (
        *(path.suffix, frames, fps, size, ticks if ticks is None else tuple(ticks)),
        *(codec, rotation, tuple((options or {}).items())),
    )
    if kind in _ENCODED:
        path.write_bytes(_ENCODED[kind])
        return path
    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        if codec == "libx264":
            stream.options = {"crf": "10"}
        if rotation:
            stream.set_display_rotation(rotation)
        if ticks is not None:
            stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for i in range(frames):
            frame = av.VideoFrame.from_ndarray(
                np.full((*size, 3), LEVELS * i, np.uint8), format="rgb24"
            )
            if ticks is not None:
                frame.pts, frame.time_base = ticks[i], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    if path.suffix == ".mp4":  # others have a number of their own in each file
        _ENCODED[kind] = path.read_bytes()
    return path


def noisy_video(path: Path, codec: str = "libx264") -> Path:
    """Write 32 frames at 24 per second that do not compress, the file's index first; encoded once
    for a codec."""
    kind = path.suffix, codec
    if kind in _ENCODED:
        path.write_bytes(_ENCODED[kind])
        return path
    frames = np.random.default_rng(0).integers(0, 255, (32, 48, 64, 3), np.uint8)
    with av.open(str(path), "w", options={"movflags": "+faststart"}) as container:
        quiet = {"x265-params": "log-level=none"} if codec == "libx265" else {}
        stream = container.add_stream(codec, rate=24, options={"crf": "20", **quiet})
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    if path.suffix == ".mp4":
        _ENCODED[kind] = path.read_bytes()
    return path


def sound_only(path: Path) -> Path:
    """Write an mp4 without an image."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
        )
        frame.sample_rate, frame.pts = 16000, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def picture(path: Path, size: tuple[int, int] = (48, 64), colour: str = "teal") -> Path:
    """Write a still image of one colour, height × width."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (size[1], size[0]), colour).save(path)
    return path


def truncated(source: Path, path: Path, share: float = 0.6) -> Path:
    """Copy the first part of a file."""
    data = source.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path
