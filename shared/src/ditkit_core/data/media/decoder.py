"""Choosing the decoder of a video stream: libav's default, except for WebM with transparency, which needs libvpx.

VP8 and VP9 have no alpha channel. WebM stores transparency as a second, grey stream, in side data of each packet (the tag `alpha_mode`).
libav's own decoders read the colours only, which are arbitrary where the video is transparent; libvpx reads both.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ditkit_core.errors import UserError

if TYPE_CHECKING:
    from av import Packet, VideoFrame, VideoStream

    VideoPacket = Packet[VideoStream]

_WITH_ALPHA = {"vp8": "libvpx", "vp9": "libvpx-vp9"}


def has_second_stream(stream: "VideoStream") -> bool:
    """Whether a video stores its transparency in the side data of its packets."""
    return {name.lower(): value for name, value in stream.metadata.items()}.get("alpha_mode") == "1"


def decoder(path: Path, stream: "VideoStream") -> Callable[["VideoPacket"], Sequence["VideoFrame"]]:
    """A function that decodes the packets of one stream, in order; the empty packet at the end flushes it.

    Args:
        stream: Stream of an open container, with the options of its decoder set.
    """
    import av

    if not has_second_stream(stream):
        return lambda packet: packet.decode()
    try:
        context = av.VideoCodecContext.create(_WITH_ALPHA[stream.codec_context.name], "r")
    except (KeyError, av.codec.codec.UnknownCodecError) as error:
        raise UserError(
            f"{path} has transparency (alpha_mode) in a codec that is not supported; convert it (ffmpeg -c:v libvpx-vp9 -i IN -c:v qtrle OUT.mov)"
        ) from error
    assert isinstance(context, av.VideoCodecContext)
    context.options = stream.codec_context.options
    return lambda packet: context.decode(packet if packet.size else None)
