"""The packets of a video stream: display times without decoding, the decoder, and keyframes from
which decoding gives bitwise the same frames.

Not every seek gives the same frames as decoding from the start: MPEG streams and AVI are searched
by bytes or decoding times, and a keyframe of H.264 may be an image from which the decoder recovers
only after some frames. Such keyframes are skipped, at the price of decoding more.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ditkit_core.errors import UserError

if TYPE_CHECKING:
    from av import Packet, VideoFrame, VideoStream
    from av.container import InputContainer

    VideoPacket = Packet[VideoStream]

SLACK_SECONDS = 0.001
"""Matroska rounds timestamps to a millisecond: a frame due at 1/24 s may say 0.042 s."""
_WITH_ALPHA = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
_INDEXED = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"}
"""Containers that store a display time for every packet and that seek by a table of keyframes."""
_TRIES = 16
"""Number of keyframes to go back before giving up; the file is then decoded from its start."""
_H264_IDR = 5


class Timeline:
    """First and last display times of the packets added so far, in the file's own seconds."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._begin = float("-inf")
        self.first = float("inf")
        self.last = float("-inf")
        self._end = float("-inf")

    def add(self, packet: "VideoPacket") -> None:
        """Add one packet; packets that an edit list hides do not count."""
        ticks = packet.dts if packet.pts is None else packet.pts
        if packet.is_discard or ticks is None or packet.time_base is None:
            return
        time = float(ticks * packet.time_base)
        if time < self._begin:
            return
        self._times.append(time)
        self.first, self.last = min(self.first, time), max(self.last, time)
        self._end = max(self._end, time + float((packet.duration or 0) * packet.time_base))

    def begin_at(self, time: float) -> None:
        """Leave out packets before a time, those added already too: a recording that begins between
        keyframes has such, which cannot be shown."""
        self._begin, self._times = time, [later for later in self._times if later >= time]
        self.first = min(self._times, default=float("inf"))

    @property
    def count(self) -> int:
        """Number of packets."""
        return len(self._times)

    @property
    def end(self) -> float:
        """End time of the last frame; if the file gives no duration, the frame is shown for the
        average duration of the others."""
        if self._end > self.last:
            return self._end
        # A single frame has no average; anything above the slack counts as shown.
        return self.last + (
            (self.last - self.first) / (self.count - 1) if self.count > 1 else 2 * SLACK_SECONDS
        )

    @property
    def seconds(self) -> float:
        """Total time in seconds that the frames added so far are shown."""
        return self.end - self.first if self.count else 0.0


def _has_second_stream(stream: "VideoStream") -> bool:
    """Whether transparency is a second, grey stream in the side data of each packet, as in WebM:
    VP8 and VP9 have no alpha channel."""
    return {name.lower(): value for name, value in stream.metadata.items()}.get("alpha_mode") == "1"


def decoder(path: Path, stream: "VideoStream") -> Callable[["VideoPacket"], Sequence["VideoFrame"]]:
    """A function that decodes the packets of one open stream, in order; the empty packet at the end
    flushes it.

    It is libav's own decoder, except for transparency in a second stream. Of that libav's decoders
    read the colours only, which are arbitrary where the video is transparent; libvpx reads both.
    """
    import av

    if not _has_second_stream(stream):
        return lambda packet: packet.decode()
    try:
        context = av.VideoCodecContext.create(_WITH_ALPHA[stream.codec_context.name], "r")
    except (KeyError, av.codec.codec.UnknownCodecError) as error:
        raise UserError(
            f"{path} has transparency (alpha_mode) in a codec that is not supported; convert it "
            f"(ffmpeg -c:v libvpx-vp9 -i IN -c:v qtrle OUT.mov)"
        ) from error
    assert isinstance(context, av.VideoCodecContext)
    context.options = stream.codec_context.options
    return lambda packet: context.decode(packet if packet.size else None)


class SeekPoint(NamedTuple):
    """The keyframe that a container was moved to."""

    time: float
    """Display time of the keyframe, in the file's own seconds; earlier frames may not be
    decodable."""
    origin: float
    """Display time of the file's first frame, in the file's own seconds."""


def find_entry(
    container: "InputContainer", stream: "VideoStream", seconds: float
) -> SeekPoint | None:
    """Move an open, unread container to the last keyframe at or before a time from which decoding
    gives the right frames.

    Times are seconds since the first frame shown. None means that the file must be opened again and
    decoded from its start.
    """
    import av

    if container.format.name not in _INDEXED or stream.time_base is None:
        return None
    if _has_second_stream(stream):  # the transparency may have its keyframes elsewhere
        return None
    first = next((frame for packet in container.demux(stream) for frame in packet.decode()), None)
    if first is None or first.time is None:
        return None
    wanted = first.time + seconds
    ticks = math.floor((wanted + SLACK_SECONDS) / stream.time_base)
    try:
        for _ in range(_TRIES):
            container.seek(ticks, stream=stream, backward=True)
            packet = next(container.demux(stream))
            if packet.pts is None:
                return None
            time = float(packet.pts * stream.time_base)
            if time <= wanted + SLACK_SECONDS and _begins_afresh(packet, stream):
                container.seek(ticks, stream=stream, backward=True)
                return SeekPoint(time, first.time)
            # Not usable: seek to just before this keyframe. Seeks go by decoding time, which may be
            # the earlier one.
            before = min(packet.pts, packet.pts if packet.dts is None else packet.dts) - 1
            if before >= ticks or time <= first.time:
                return None
            ticks = before
    except (av.FFmpegError, StopIteration):
        pass
    return None


def _begins_afresh(packet: "VideoPacket", stream: "VideoStream") -> bool:
    """Whether the frames shown after this packet can be decoded without any earlier packet."""
    if not packet.is_keyframe:
        return False
    context = stream.codec_context
    if context.name != "h264":
        return True
    return _H264_IDR in h264_units(bytes(packet), context.extradata or b"")


def h264_units(data: bytes, extradata: bytes) -> set[int]:
    """The types of the NAL units in one H.264 packet; none if the stream's header (`extradata`),
    which gives the size of the lengths, is not avcC.

    Source: ISO 14496-15, 5.3.3.1.
    """
    if len(extradata) < 5 or extradata[0] != 1:
        return set()
    size, at, types = (extradata[4] & 3) + 1, 0, set()
    while at + size < len(data):
        length = int.from_bytes(data[at : at + size], "big")
        types.add(data[at + size] & 31)
        at += size + length
    return types
