"""Video files through PyAV: what was on screen when, upright and in RGB, and writing H.264.

Time is what the file says, never a frame count: phones and screen recorders write a variable frame rate, and a header's
rate or duration is an estimate. Seconds are counted from the first frame shown.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ditkit_core.errors import UserError
from ditkit_core.files import atomic_write
from ditkit_core.timeline import SLACK_SECONDS, Timeline

if TYPE_CHECKING:
    from av import Packet, VideoFrame, VideoStream
    from av.container import InputContainer

    VideoPacket = Packet[VideoStream]

Picture = NDArray[np.uint8]
"""One upright picture with square pixels: height × width × RGB."""

# libav also reads playlists and scripts, whatever a file is called: a text file named clip.mp4 could name any other
# file or host. Only real containers are opened, and nothing but the file itself.
_OPEN_OPTIONS = {
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpeg,mpegts,flv,asf,ogg",
    "protocol_whitelist": "file",
}


@contextmanager
def _opened(path: Path) -> Iterator[tuple["InputContainer", "VideoStream"]]:
    """Open a file and its first video stream; libav's errors inside the block become one line about this file."""
    import av

    try:
        # Tags may be in any encoding; nothing here reads them.
        with av.open(str(path), options=dict(_OPEN_OPTIONS), metadata_errors="replace") as container:
            if not container.streams.video:
                raise UserError(f"{path} has no video stream (only sound?); replace it or remove it")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise UserError(f"{path} has a codec that cannot be decoded here; re-encode it (ffmpeg -i IN OUT.mp4)")
            # A decoder otherwise paints over what it cannot decode, or (HEVC) leaves out frames without a word.
            stream.codec_context.options = {"err_detect": "explode"}
            yield container, stream
    except (av.FFmpegError, OSError) as error:
        reason = f"cannot be read as a video ({error.strerror or 'damaged'})"
        raise UserError(f"{path} {reason}; re-encode it (ffmpeg -i IN OUT.mp4) or remove it") from error


def _packets(
    path: Path, container: "InputContainer", stream: "VideoStream", timeline: Timeline
) -> Iterator["VideoPacket"]:
    """The stream's packets in file order, noted on the timeline; the last one is empty and flushes the decoder."""
    for packet in container.demux(stream):
        if packet.is_corrupt:
            raise UserError(
                f"{path} is truncated or damaged after {timeline.seconds:.2f} s; copy it again or remove it"
            )
        timeline.add(packet)
        yield packet


class Survey(NamedTuple):
    """What a video shows: when, and how large."""

    timeline: Timeline
    height: int
    """Pixels, upright and square."""
    width: int
    """Pixels, upright and square."""
    quarter_turns: int
    """Anticlockwise quarter turns (0 to 3) that brought it upright."""


def survey(path: Path, *, until_seconds: float = float("inf")) -> Survey:
    """Read off when the frames of a video are shown, and decode the first one.

    Args:
        path: A video file.
        until_seconds: Stop reading once this much is known to be there; by default the whole file is read.

    Raises:
        UserError: If the file cannot be read or its first frame not be decoded.
    """
    timeline = Timeline()
    first: VideoFrame | None = None
    with _opened(path) as (container, stream):
        for packet in _packets(path, container, stream, timeline):
            if first is None:
                first = next(iter(packet.decode()), None)
            elif timeline.seconds > until_seconds:
                break
        if first is None:
            raise UserError(f"{path} has no frame that can be decoded; replace it or remove it")
        height, width, _ = _upright(first, stream).shape
    return Survey(timeline, height, width, _quarter_turns(first))


def frames_at(path: Path, times: Sequence[float]) -> Iterator[Picture]:
    """The picture on screen at each time.

    The file is decoded from its start: where a seek lands depends on the container.

    Args:
        path: A video file.
        times: Seconds since the first frame, ascending, not negative.

    Raises:
        UserError: If a frame up to the last time cannot be decoded, or the video ends before it.
    """
    pending = deque(times)
    stop = 0.0
    with _opened(path) as (container, stream):
        for frame, stop in _shown(path, container, stream):
            picture: Picture | None = None
            while pending and pending[0] + SLACK_SECONDS < stop:
                if picture is None:
                    picture = _upright(frame, stream)
                pending.popleft()
                yield picture
            if not pending:
                return
    raise UserError(f"{path} ends after {stop:.2f} s, a frame at {pending[0]:.2f} s was asked for; lower data.frames")


def _shown(path: Path, container: "InputContainer", stream: "VideoStream") -> Iterator[tuple["VideoFrame", float]]:
    """Every frame in the order of display, with the time at which the next one replaces it."""
    remedy = "re-encode it (ffmpeg -i IN OUT.mp4) or remove it"
    timeline = Timeline()
    origin, shown = 0.0, None
    for packet in _packets(path, container, stream, timeline):
        for frame in packet.decode():
            if frame.is_corrupt:
                raise UserError(f"{path} is damaged: a frame cannot be decoded; {remedy}")
            if frame.time is None or (shown is not None and frame.time < shown.time):
                raise UserError(f"{path} has frames without a usable timestamp; {remedy}")
            if shown is None:
                origin = frame.time
            else:
                yield shown, frame.time - origin
            shown = frame
    if shown is None or shown.time < timeline.last - SLACK_SECONDS:
        raise UserError(f"{path} is damaged: its last frames cannot be decoded; {remedy}")
    yield shown, timeline.end - origin


def _upright(frame: "VideoFrame", stream: "VideoStream") -> Picture:
    """The frame as a player shows it: square pixels, the container's rotation applied."""
    width = round(frame.width * (stream.sample_aspect_ratio or 1))
    picture = frame.reformat(width=width, height=frame.height, format="rgb24").to_ndarray()
    return np.rot90(picture, _quarter_turns(frame))


def _quarter_turns(frame: "VideoFrame") -> int:
    return round(frame.rotation / 90) % 4


def write_h264(path: Path, pictures: Sequence[Picture], *, fps: float) -> None:
    """Write pictures of one even height and width as an H.264 mp4, atomically.

    Raises:
        UserError: If the file cannot be written.
    """
    import av

    with atomic_write(path) as temporary, av.open(str(temporary), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001), options={"crf": "16"})
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        # Written and tagged as BT.709, so that no player has to guess which matrix was used.
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = context.color_range = 1
        for picture in pictures:
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            yuv = frame.reformat(format="yuv420p", dst_colorspace="ITU709", dst_color_range="MPEG")
            container.mux(stream.encode(yuv))
        container.mux(stream.encode(None))
