"""Where the decoding of a video may begin so that every frame from there on is the same as if decoded from the start.

Not every seek is such a place: MPEG streams and AVI are searched by bytes or by decoding times, and what H.264 calls a keyframe may be a
picture from which a decoder recovers only later. Those are passed over, at the price of decoding more.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

from ditkit_core.data.media.decoder import has_second_stream
from ditkit_core.data.media.timestamps import SLACK_SECONDS

if TYPE_CHECKING:
    from av import Packet, VideoStream
    from av.container import InputContainer

    VideoPacket = Packet[VideoStream]

_INDEXED = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"}
"""Containers whose every packet has its own time of display and whose seeks go by a table of keyframes."""
_TRIES = 16
"""Keyframes to go back before the file is decoded from its start."""
_H264_IDR = 5


class SeekPoint(NamedTuple):
    """A keyframe that a container was moved to."""

    time: float
    """When it is shown, in the file's own seconds; what is shown before may not be decodable."""
    origin: float
    """When the file's first frame is shown, in the same."""


def find_entry(container: "InputContainer", stream: "VideoStream", seconds: float) -> SeekPoint | None:
    """Move an open container to the last keyframe at or before a time, from which decoding gives the file's own frames.

    Args:
        container: Open, nothing read yet.
        stream: Its video.
        seconds: Since the first frame shown.

    Returns:
        Where it is now; None if it has to be decoded from its start, for which it must be opened again.
    """
    import av

    if container.format.name not in _INDEXED or stream.time_base is None:
        return None
    if has_second_stream(stream):  # whose keyframes may be others
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
            before = min(packet.pts, packet.pts if packet.dts is None else packet.dts) - 1
            if before >= ticks or time <= first.time:
                return None
            ticks = before
    except (av.FFmpegError, StopIteration):
        pass
    return None


def _begins_afresh(packet: "VideoPacket", stream: "VideoStream") -> bool:
    """Whether nothing shown after this packet needs anything that lies before it."""
    if not packet.is_keyframe:
        return False
    context = stream.codec_context
    if context.name != "h264":
        return True
    return _H264_IDR in h264_units(bytes(packet), context.extradata or b"")


def h264_units(data: bytes, extradata: bytes) -> set[int]:
    """The types of the NAL units of one H.264 packet, by the lengths that an avcC header announces (ISO 14496-15, 5.3.3.1).

    Args:
        data: The packet.
        extradata: The stream's header; one that is no avcC gives no units.
    """
    if len(extradata) < 5 or extradata[0] != 1:
        return set()
    size, at, types = (extradata[4] & 3) + 1, 0, set()
    while at + size < len(data):
        length = int.from_bytes(data[at : at + size], "big")
        types.add(data[at + size] & 31)
        at += size + length
    return types
