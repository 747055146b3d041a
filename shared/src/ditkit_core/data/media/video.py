"""Reading video files with PyAV (frames by time, upright, in RGB), and writing H.264.

Times come from the file's timestamps, never from a frame count: phones and screen recorders write a
variable frame rate, and the rate or duration in a header is an estimate. Seconds are counted from
the first frame shown.

torchcodec 0.17 was tried in place of this with the tests' clips, over the same FFmpeg. Its frames
were bitwise ours for constant rates and quarter turns. But from MPEG-2 it read other frames after a
seek, with variable rates the frame before at a rounded time; it neither mirrored by a display
matrix nor refused a sheared one, kept oblong pixels, left arbitrary colours where a clip is
transparent, and mapped no HDR to 8 bits. It has no FFmpeg of its own (11 MB without), so PyAV,
which has one, would have stayed for writing, sound and times.
"""

import errno
import gc
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ditkit_core.data.media import files
from ditkit_core.data.media import image as still
from ditkit_core.data.media import tonemap as hdr
from ditkit_core.data.media.colours import wide_primaries
from ditkit_core.data.media.image import RgbImage
from ditkit_core.data.media.packets import SLACK_SECONDS, SeekPoint, Timeline, decoder, find_entry
from ditkit_core.errors import UserError
from ditkit_core.io.files import atomic_write

if TYPE_CHECKING:
    from av import Packet, VideoFrame, VideoStream
    from av.container import InputContainer
    from av.sidedata.sidedata import SideData

    VideoPacket = Packet[VideoStream]

_ONE_DEGREE = 0.0175
"""Sine of the angle by which a quarter turn may be off, as in ffmpeg."""


class Orientation(NamedTuple):
    """One of the eight ways to turn and mirror an image, as the display matrix of a video asks for.

    Phones store what the sensor reads and ask players to turn it; front cameras, and editors that
    flip a clip without encoding it again, ask them to mirror it. Source: the matrix of ISO
    14496-12, 6.2.2, which libav hands on with every frame, whatever the container stored.
    """

    quarter_turns: int = 0
    """Anticlockwise, 0 to 3."""
    is_mirrored: bool = False
    """Whether left and right are exchanged after the turns."""

    def applied(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The image as a player shows it, height × width × channels."""
        turned = np.rot90(image, self.quarter_turns)
        return turned[:, ::-1] if self.is_mirrored else turned


def orientation_of(frame: "VideoFrame", path: Path) -> Orientation:
    """How a player shows a frame."""
    matrix = _matrix(frame)
    if matrix is None:
        return Orientation()
    a, b, _, c, d, *_ = matrix
    # A point (x, y) is shown at (a x + c y, b x + d y). Sizes do not matter: libav makes the aspect
    # ratio of pixels of them.
    across, down = np.hypot(a, c), np.hypot(b, d)
    # some programs leave the matrix empty, and players show such a file as it is stored
    if not across and not down:
        return Orientation()
    if across and down:
        if max(abs(c) / across, abs(b) / down) < _ONE_DEGREE:
            return Orientation(quarter_turns=2 * (d < 0), is_mirrored=(a < 0) != (d < 0))
        if max(abs(a) / across, abs(d) / down) < _ONE_DEGREE:
            return Orientation(quarter_turns=1 if b < 0 else 3, is_mirrored=(b < 0) == (c < 0))
    raise UserError(
        f"{path} asks players to show its frames at an angle that is no quarter turn, or sheared; "
        "re-encode it (ffmpeg -i IN OUT.mp4) and look at the result, or remove it"
    )


def was_read_otherwise(frame: "VideoFrame", orientation: Orientation) -> bool:
    """Whether versions that knew the angle of the matrix alone turned this frame in another way."""
    return orientation != Orientation(round(frame.rotation / 90) % 4)


def _matrix(frame: "VideoFrame") -> tuple[int, ...] | None:
    """The display matrix, row by row, in 1/65536; None if the frame has none."""
    data = cast("SideData | None", frame.side_data.get("DISPLAYMATRIX"))
    return None if data is None else struct.unpack("=9i", bytes(data))


_MOST_PIXELS = 2**26
"""Largest frame: twice 8K. Lower than for still images, because decoding keeps several copies of a
frame, with 16 bits per channel for HDR."""
_LARGE_PIXELS = 2**24
"""Twice as many as a frame of 4K has."""
_LIBAV_BYTES = 2**31
"""What libav allocates at once, unless a program allows more."""
_LONGEST_SHOWN = 600.0
"""Longest average display time of a frame in seconds: with damaged timestamps a file could seem
days long and give millions of windows."""
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpeg,mpegts,flv,asf,ogg"


@contextmanager
def _opened(path: Path) -> Iterator[tuple["InputContainer", "VideoStream"]]:
    """Open a file and its first video stream; libav's errors inside the block become one line about
    this file."""
    import av

    pixels = 0
    try:
        with files.open_container(path, _FORMATS) as container:
            if not container.streams.video:
                raise UserError(
                    f"{path} has no video stream (audio only, or truncated); replace it or remove "
                    f"it"
                )
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise UserError(
                    f"{path} has a codec that is not supported; re-encode it (ffmpeg -i IN OUT.mp4)"
                )
            if hdr.is_dolby_alone(_sample_entry(container, stream), stream.codec_context.color_trc):
                raise UserError(
                    f"{path} is Dolby Vision profile 5, which only Dolby Vision decoders show "
                    "correctly: it would look green and purple; convert it (ffmpeg -i IN -vf "
                    "libplacebo=colorspace=bt709:color_trc=bt709:format=yuv420p OUT.mp4)"
                )
            width = round(stream.codec_context.width * (stream.sample_aspect_ratio or 1))
            still.check_pixels(path, width, stream.codec_context.height, most=_MOST_PIXELS)
            pixels = width * stream.codec_context.height
            # By default a decoder conceals what it cannot decode, or (HEVC) silently drops frames.
            # The pixel limit is set again because a frame may be larger than the container's header
            # says.
            stream.codec_context.options = {
                "err_detect": "explode",
                "max_pixels": str(_MOST_PIXELS),
            }
            yield container, stream
    except (av.FFmpegError, OSError) as error:
        # libav says the same of a count in the file that fits in no memory: it allocates at most 2
        # GiB at once. And it says that the disk fails of some damaged files, too.
        is_damaged = (
            isinstance(error, OSError) and error.errno == errno.EIO and files.is_readable(path)
        )
        if (isinstance(error, OSError) and not is_damaged) or (
            isinstance(error, MemoryError) and not files.can_allocate(_LIBAV_BYTES)
        ):
            files.refuse_shortage(path, error)
        files.refuse_foreign(path, "video")
        reason = f"cannot be read as a video ({error.strerror or 'damaged'})"
        raise UserError(
            f"{path} {reason}; re-encode it (ffmpeg -i IN OUT.mp4) or remove it"
        ) from error
    finally:
        if pixels > _LARGE_PIXELS:
            # A frame whose side data were read refers to them and they to it. Python's collector
            # counts objects and not their bytes: frames of 100 MB would wait for it in hundreds.
            gc.collect()


def _sample_entry(container: "InputContainer", stream: "VideoStream") -> str:
    """The name of the sample entry of MP4 and MOV; "" for other containers, and if it is not text.

    Other containers store a number there (MPEG-TS the type of the stream), which PyAV cannot decode
    as text.
    """
    if "mp4" not in container.format.name:
        return ""
    try:
        return stream.codec_context.codec_tag
    except UnicodeDecodeError:
        return ""


def _packets(
    path: Path, container: "InputContainer", stream: "VideoStream", timeline: Timeline
) -> Iterator["VideoPacket"]:
    """The stream's packets in file order, which are added to the timeline; the last one is empty
    and flushes the decoder."""
    for packet in container.demux(stream):
        if packet.is_corrupt:
            raise UserError(
                f"{path} is truncated or damaged after {timeline.seconds:.2f} s; copy it again or "
                f"remove it"
            )
        timeline.add(packet)
        yield packet


class Survey(NamedTuple):
    """Times and size of a video's frames."""

    timeline: Timeline
    height: int
    """Pixels, upright and square."""
    width: int


def survey(path: Path, *, until_seconds: float = float("inf")) -> Survey:
    """Read the display times of a video's frames, to its end or until so many seconds are found,
    and decode the first frame for its size."""
    timeline, ticks = Timeline(), list[int]()
    first: VideoFrame | None = None
    with _opened(path) as (container, stream):
        decode = decoder(path, stream)
        for packet in _packets(path, container, stream, timeline):
            if first is None:
                ticks += [packet.pts] if packet.pts is not None and not packet.is_discard else []
                first = next(iter(decode(packet)), None)
                if (
                    first is not None
                    and (begin := _late_start(container, first, ticks)) is not None
                ):
                    timeline.begin_at(begin)
            elif timeline.seconds > until_seconds:
                break
        if first is None:
            raise UserError(f"{path} has no frame that can be decoded; replace it or remove it")
        height, width, _ = _upright(first, stream, orientation_of(first, path)).shape
    if timeline.seconds > _LONGEST_SHOWN * timeline.count:
        raise UserError(
            f"{path} has implausible timestamps ({timeline.count} frames in {timeline.seconds:.0f} "
            "s); re-encode it (ffmpeg -i IN OUT.mp4) or remove it"
        )
    return Survey(timeline, height, width)


def is_hdr(path: Path) -> bool:
    """Whether a video is marked as HDR; its frames are then converted to SDR (`hdr.to_sdr`)."""
    with _opened(path) as (_, stream):
        return stream.codec_context.color_trc in (hdr.PQ, hdr.HLG)


def late_start_seconds(path: Path) -> float | None:
    """Time of a video's first frame, in the file's own seconds, if packets before it cannot be
    shown: the recording begins between keyframes."""
    with _opened(path) as (container, stream):
        decode, ticks = decoder(path, stream), list[int]()
        for packet in container.demux(stream):
            if packet.pts is not None and not packet.is_discard:
                ticks.append(packet.pts)
            for frame in decode(packet):
                return _late_start(container, frame, ticks)
    return None


def _late_start(
    container: "InputContainer", first: "VideoFrame", ticks: Sequence[int]
) -> float | None:
    """The time of the first decoded frame, if it is later than one of the packets that were read
    until then; None if it is not."""
    # AVI has no display times: libav's are later by the frames that the decoder keeps.
    is_late = first.pts is not None and first.pts > min(ticks, default=first.pts)
    return first.time if is_late and container.format.name != "avi" else None


def is_turned_otherwise(path: Path) -> bool:
    """Whether earlier versions, which knew no mirrored clips, turned a video's first frame in
    another way."""
    with _opened(path) as (container, stream):
        decode = decoder(path, stream)
        first = next(
            (frame for packet in container.demux(stream) for frame in decode(packet)), None
        )
        return first is not None and was_read_otherwise(first, orientation_of(first, path))


def converted_primaries(path: Path) -> str:
    """The primaries from which the colours of a video's frames are converted to sRGB, by its
    header; "" if they are not converted."""
    with _opened(path) as (_, stream):
        context = stream.codec_context
        wide = wide_primaries(int(context.color_primaries), int(context.color_trc))
        return wide.name if wide else ""


_UNSPECIFIED = 2
"""libav's number for a matrix of colours that a stream does not name."""


def has_no_matrix(path: Path) -> bool:
    """Whether a video stores brightness and colour differences and does not say by which matrix;
    libav then takes BT.601."""
    with _opened(path) as (_, stream):
        context = stream.codec_context
        is_yuv = context.pix_fmt is not None and context.pix_fmt.startswith(("yuv", "nv", "p0"))
        return is_yuv and context.colorspace == _UNSPECIFIED


def frames_at(path: Path, times: Sequence[float]) -> Iterator[RgbImage]:
    """The image on screen at each time (seconds since the first frame, ascending); bitwise
    identical wherever the times begin.

    MP4 and Matroska are decoded only from the keyframe before the first time to the last time. In
    other containers a seek does not land on a known frame, so they are decoded from the start.
    """
    if times and times[0] > SLACK_SECONDS:
        with _opened(path) as (container, stream):
            entry = find_entry(container, stream, times[0])
            if entry is not None:
                yield from _on_screen(path, container, stream, times, entry)
                return
    with _opened(path) as (container, stream):
        yield from _on_screen(path, container, stream, times, None)


def _on_screen(
    path: Path,
    container: "InputContainer",
    stream: "VideoStream",
    times: Sequence[float],
    entry: SeekPoint | None,
) -> Iterator[RgbImage]:
    pending = deque(times)
    stop = 0.0
    for frame, stop in _shown(path, container, stream, entry):
        image: RgbImage | None = None
        while pending and pending[0] + SLACK_SECONDS < stop:
            if image is None:  # converted only if some time falls into this frame
                image = _upright(frame, stream, orientation_of(frame, path))
            pending.popleft()
            yield image
        if not pending:
            return
    raise UserError(
        f"{path} ends after {stop:.2f} s, but a frame at {pending[0]:.2f} s was requested; lower "
        f"data.frames"
    )


def _shown(
    path: Path, container: "InputContainer", stream: "VideoStream", entry: SeekPoint | None
) -> Iterator[tuple["VideoFrame", float]]:
    """Every frame in display order from a seek point on, with the time at which the next frame
    replaces it."""
    remedy = "re-encode it (ffmpeg -i IN OUT.mp4) or remove it"
    timeline, decode = Timeline(), decoder(path, stream)
    origin, shown = (entry.origin if entry else None), None
    for packet in _packets(path, container, stream, timeline):
        for frame in decode(packet):
            if (
                entry is not None
                and frame.time is not None
                and frame.time < entry.time - SLACK_SECONDS / 2
            ):
                # a leading frame: it is shown before the keyframe, but needs earlier packets to be
                # decoded
                continue
            if frame.is_corrupt:
                raise UserError(f"{path} is damaged: a frame cannot be decoded; {remedy}")
            if frame.time is None or (shown is not None and frame.time < shown.time):
                raise UserError(f"{path} has frames without a usable timestamp; {remedy}")
            if origin is None:
                origin = frame.time
            if shown is not None:
                yield shown, frame.time - origin
            shown = frame
    if shown is None or origin is None or shown.time < timeline.last - SLACK_SECONDS:
        raise UserError(f"{path} is damaged: its last frames cannot be decoded; {remedy}")
    yield shown, timeline.end - origin


def _upright(frame: "VideoFrame", stream: "VideoStream", orientation: Orientation) -> RgbImage:
    """The frame as a player shows it: square pixels, turned and mirrored, transparency on white,
    HDR and wide colours as sRGB."""
    width = round(frame.width * (stream.sample_aspect_ratio or 1))
    wide = wide_primaries(int(frame.color_primaries), int(frame.color_trc))
    in_srgb = wide.to_srgb if wide else lambda pixels: pixels
    if any(part.is_alpha for part in frame.format.components):
        rgba = np.asarray(
            frame.reformat(width=width, height=frame.height, format="rgba").to_ndarray(), np.uint8
        )
        opacity = rgba[..., 3:].astype(np.uint16)
        image = ((in_srgb(rgba[..., :3]) * opacity + 255 * (255 - opacity) + 127) // 255).astype(
            np.uint8
        )
    elif frame.color_trc in (hdr.PQ, hdr.HLG):
        deep = np.asarray(
            frame.reformat(width=width, height=frame.height, format="rgb48le").to_ndarray(),
            np.uint16,
        )
        image = hdr.to_sdr(deep, int(frame.color_trc))
    else:
        image = in_srgb(
            np.asarray(
                frame.reformat(width=width, height=frame.height, format="rgb24").to_ndarray(),
                np.uint8,
            )
        )
    return orientation.applied(image)


def write_h264(path: Path, images: Sequence[RgbImage], *, fps: float) -> None:
    """Write images of one even height and width as an H.264 mp4, atomically. The index comes first,
    so that browsers play it while it loads."""
    import av

    options = {"movflags": "faststart"}
    with (
        atomic_write(path) as temporary,
        av.open(str(temporary), "w", format="mp4", options=options) as container,
    ):
        # With macroblock-tree rate control x264 encodes the same small video differently from one
        # call to the next.
        encoder = {"crf": "16", "x264-params": "mbtree=0"}
        stream = container.add_stream(
            "libx264", rate=Fraction(fps).limit_denominator(1001), options=encoder
        )
        stream.height, stream.width = images[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        # Converted to BT.709 and tagged so: without the tag players guess the colour matrix.
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = context.color_range = 1
        for image in images:
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            yuv = frame.reformat(format="yuv420p", dst_colorspace="ITU709", dst_color_range="MPEG")
            container.mux(stream.encode(yuv))
        container.mux(stream.encode(None))
