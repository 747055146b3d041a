"""What decodes the packets of a video stream: libav's choice, but for WebM with transparency, whose second picture that one leaves out.

VP8 and VP9 have no transparency of their own: WebM keeps a second, grey stream of it in an addition to each packet (the tag `alpha_mode`).
libav's own decoders read the colours alone, which mean nothing where nothing is to be seen; libvpx's read both.
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
    """Whether the transparency of a video is in the additions of its packets."""
    return {name.lower(): value for name, value in stream.metadata.items()}.get("alpha_mode") == "1"


def decoder(path: Path, stream: "VideoStream") -> Callable[["VideoPacket"], Sequence["VideoFrame"]]:
    """What makes frames of the packets of one stream, in order; the empty packet at its end flushes it.

    Args:
        path: The file, for messages.
        stream: Of an open container, with the options of its decoder set.

    Raises:
        UserError: If the stream has a transparency that no decoder here reads.
    """
    import av

    if not has_second_stream(stream):
        return lambda packet: packet.decode()
    try:
        context = av.VideoCodecContext.create(_WITH_ALPHA[stream.codec_context.name], "r")
    except (KeyError, av.codec.codec.UnknownCodecError) as error:
        raise UserError(
            f"{path} has transparency (alpha_mode) of a codec that cannot be read here; convert it (ffmpeg -c:v libvpx-vp9 -i IN -c:v qtrle OUT.mov)"
        ) from error
    assert isinstance(context, av.VideoCodecContext)
    context.options = stream.codec_context.options
    return lambda packet: context.decode(packet if packet.size else None)
