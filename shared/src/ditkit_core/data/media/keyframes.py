"""Seeking to a keyframe from which decoding gives bitwise the same frames as decoding from the start.

Not every seek does: MPEG streams and AVI are searched by bytes or decoding times, and a keyframe of H.264 may be an image from which the
decoder recovers only after some frames. Such keyframes are skipped, at the price of decoding more.
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
"""Containers that store a display time for every packet and that seek by a table of keyframes."""
_TRIES = 16
"""Number of keyframes to go back before giving up; the file is then decoded from its start."""
_H264_IDR = 5


class SeekPoint(NamedTuple):
    """The keyframe that a container was moved to."""

    time: float
    """Display time of the keyframe, in the file's own seconds; earlier frames may not be decodable."""
    origin: float
    """Display time of the file's first frame, in the file's own seconds."""


def find_entry(container: "InputContainer", stream: "VideoStream", seconds: float) -> SeekPoint | None:
    """Move an open container to the last keyframe at or before a time from which decoding gives the right frames.

    Args:
        container: An open container, from which nothing was read yet.
        seconds: Time since the first frame shown.

    Returns:
        The keyframe; None if the file must be decoded from its start, for which it must be opened again.
    """
    import av

    if container.format.name not in _INDEXED or stream.time_base is None:
        return None
    if has_second_stream(stream):  # the transparency may have its keyframes elsewhere
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
            # Not usable: seek to just before this keyframe. Seeks go by decoding time, which may be the earlier one.
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
    """The types of the NAL units in one H.264 packet.

    Args:
        extradata: The stream's header, which gives the size of the length fields; a header that is not avcC gives no units.

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
