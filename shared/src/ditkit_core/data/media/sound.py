"""The sound of a file: a sound file, or the sound track of a video.

Screen recorders, captured streams and calls leave out packets (a codec sends none while nobody
speaks), and clocks of sound and images drift apart. So sound is placed by its timestamps, as images
are, and a lost part does not make all that follows too early.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from ditkit_core.data.media.files import open_container
from ditkit_core.data.media.video import late_start_seconds
from ditkit_core.errors import UserError

if TYPE_CHECKING:
    from av import AudioFrame, AudioStream, VideoStream
    from av.container import InputContainer

_FORMATS = (
    "wav,w64,aiff,mp3,flac,aac,ogg,mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,flv,asf"
)
_LEAST_JUMP_SECONDS = 0.04
"""Sound is moved where its timestamps are so far from the number of samples before them. Containers
round times (AVI with MP3 to 26 ms) and clocks jitter without a hole; viewers notice sound that is
45 ms early (ITU-R BT.1359)."""
_WITH_TIMES = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "mpegts", "mpeg", "flv", "asf", "ogg"}
"""libav's names of the containers that store times of sound; of others libav computes them from the
number of bytes or of packets."""
_LONGEST_HOLE_SECONDS = 3600.0
"""With damaged timestamps the silence of a hole could need all memory."""
_CANCELLED_SHARE = 0.1
"""Channels cancel if their mean has less than this share of the power that the mean of unrelated
channels has."""
_PLACED = "placed"
_LOW_RATE = 8000
"""Enough samples per second to see whether channels cancel."""


def decode_sound(
    path: Path, *, until_seconds: float = math.inf, rate: int = 0
) -> tuple[Float[np.ndarray, " samples"], int]:
    """The first sound track of a file as one channel, each part of it at the time that its
    timestamps say.

    In a video, time 0 is the time of its first frame: a track that begins later is preceded by
    silence, and sound before that frame is cut. A hole in the track is silence. Of parts that
    overlap, the beginning of the later one is cut.

    Args:
        path: The file.
        until_seconds: Decoding stops here.
        rate: Samples per second to resample to; 0 keeps the file's.

    Returns:
        Samples in about [-1, 1], fp32, and the number of samples per second. They are the mean of
        the channels, or the loudest channel alone where channels cancel each other, as a channel
        and its inverse do.

    Raises:
        UserError: If there is none, it cannot be decoded, or samples are not finite.

    Source: the thresholds apart, `aresample=async=1` of FFmpeg does the same with timestamps.
    """
    track = _decoded(path, until_seconds, rate)
    if track.channels_cancel:
        track = _decoded(path, until_seconds, rate, channel=track.powers.most_common(1)[0][0])
    if not track.runs:
        raise UserError(f"{path} has no sound in it; give a file with sound")
    sound, end = [np.empty(0, np.float32)], 0
    for run in track.runs:
        first, samples = round(run.start * track.rate), np.concatenate([sound[0], *run.parts])
        sound += [
            np.zeros(max(first - end, 0), np.float32),
            samples[max(end - first, 0) :].astype(np.float32),
        ]
        end = max(end, first + len(samples))
    joined = np.concatenate(sound)[: math.ceil(min(end, until_seconds * track.rate))]
    if not np.isfinite(joined).all():
        raise UserError(f"{path} contains samples that are not finite numbers; convert it again")
    return joined, track.rate


class _Run:
    """Sound without a hole, of one rate and layout."""

    def __init__(self, start: float, frame: "AudioFrame", rate: int) -> None:
        """Begin with a frame that is not added yet, at a time in seconds, resampled to a rate."""
        import av

        self.start, self.end, self.rate = start, start, frame.sample_rate
        self.form = _form(frame)
        self.num_samples = 0
        self.resampler = av.AudioResampler(format="fltp", layout=frame.layout, rate=rate)
        self.parts: list[np.ndarray] = []


@dataclass(kw_only=True)
class _Track:
    """The sound of a file, decoded to one channel, and the power of its channels as sums of
    squares."""

    rate: int
    channel: int | None
    """The channel that is kept; None keeps the mean of all."""
    runs: list[_Run] = field(default_factory=list)
    powers: Counter[int] = field(default_factory=Counter)
    mean_power: float = 0.0
    unrelated_power: float = 0.0
    """The power that the mean has if channels neither support nor cancel each other."""

    @property
    def channels_cancel(self) -> bool:
        """Whether the mean of the channels lacks most of the sound."""
        return self.mean_power < _CANCELLED_SHARE * self.unrelated_power

    def add(self, frame: "AudioFrame | None") -> None:
        """Add a frame to the last run; None flushes its resampler."""
        run = self.runs[-1]
        for resampled in run.resampler.resample(frame):
            planes = resampled.to_ndarray()
            mean, powers = planes.mean(axis=0), [float(np.vdot(plane, plane)) for plane in planes]
            self.powers.update(dict(enumerate(powers)))
            self.mean_power += float(np.vdot(mean, mean))
            self.unrelated_power += sum(powers) / len(planes) ** 2
            run.parts.append(
                mean if self.channel is None else planes[min(self.channel, len(planes) - 1)]
            )
        if frame is not None:
            run.num_samples += frame.samples
            run.end = run.start + run.num_samples / run.rate


def _decoded(path: Path, until_seconds: float, rate: int, channel: int | None = None) -> _Track:
    """Decode the first sound track of a file up to a time."""
    with _opened(path) as container:
        if not container.streams.audio:
            raise UserError(f"{path} has no sound; give a file with a sound track")
        stream = container.streams.audio[0]
        if stream.codec_context is None:
            raise UserError(
                f"{path} has sound in a codec that is not supported; convert it (ffmpeg -i IN "
                f"OUT.wav)"
            )
        track = _Track(rate=rate or stream.rate, channel=channel)
        origin = _first_frame_seconds(path, container)
        for frame in container.decode(stream):
            origin = frame.time or 0.0 if origin is None else origin
            run = track.runs[-1] if track.runs else None
            end = run.end if run else 0.0
            is_timed = run is None or container.format.name in _WITH_TIMES
            time = frame.time - origin if is_timed and frame.time is not None else end
            is_jump = run is None or abs(time - end) > _LEAST_JUMP_SECONDS
            if run is None or is_jump or run.form != _form(frame):
                if run is not None:
                    track.add(None)
                if time - end > _LONGEST_HOLE_SECONDS and time < until_seconds:
                    raise UserError(
                        f"{path} has no sound for {time - end:.0f} s, by its timestamps; convert "
                        f"it again"
                    )
                run = _Run(time if is_jump else end, frame, track.rate)
                track.runs.append(run)
            if run.num_samples >= (until_seconds - run.start) * run.rate:
                run.start = min(run.start, until_seconds)  # a hole up to there is silence too
                break
            track.add(frame)
        else:
            if track.runs:
                track.add(None)
    return track


def _form(frame: "AudioFrame") -> tuple[str, str, int]:
    """What has to stay the same within one resampler."""
    return frame.format.name, frame.layout.name, frame.sample_rate


def sound_changes_since_first(path: Path) -> str:
    """What is read from a file's sound otherwise than the first versions did, for the cache key as
    `clip.changes_since_first`; "" for nothing.

    They placed all samples by the first timestamp alone, counted from a video's first packet, and
    always took the mean of the channels.
    """
    try:
        with _opened(path) as container:
            streams = container.streams
            is_with_video = streams.audio and _is_video(container)
            delay = (
                _start_seconds(streams.audio[0]) - _start_seconds(streams.video[0])
                if is_with_video
                else 0.0
            )
        track = _decoded(path, math.inf, _LOW_RATE)
    except UserError:  # reported by whoever uses the file
        return ""
    is_changed = track.channels_cancel or [run.start for run in track.runs] not in ([], [delay])
    return _PLACED if is_changed else ""


def sound_seconds(path: Path) -> float:
    """Seconds until the end of a file's first sound track, from the first frame of a video; 0
    without a track. No sound is decoded.

    Raises:
        UserError: If the file cannot be read.
    """
    with _opened(path) as container:
        if not container.streams.audio:
            return 0.0
        stream = container.streams.audio[0]
        origin, unit = _first_frame_seconds(path, container), float(stream.time_base or 0)
        start, end = _start_seconds(stream), 0.0
        for packet in container.demux(stream):  # Matroska has no length of a track in its header
            if packet.pts is not None:
                end = max(end, (packet.pts + (packet.duration or 0)) * unit)
        return max(end - start, 0.0) + (0.0 if origin is None else start - origin)


def _is_video(container: "InputContainer") -> bool:
    """Whether there is a video next to the sound. The cover image in a sound file's tags is a video
    stream too, of one frame."""
    videos = container.streams.video
    return bool(videos) and not videos[0].disposition & videos[0].disposition.attached_pic


def _first_frame_seconds(path: Path, container: "InputContainer") -> float | None:
    """Time of the first frame that a video shows, in the file's own seconds; None for a sound
    file."""
    if not _is_video(container):
        return None
    late_start = None
    # images that we do not read do not matter in a file that is given for its sound
    with suppress(UserError):
        late_start = late_start_seconds(path)
    return _start_seconds(container.streams.video[0]) if late_start is None else late_start


def _start_seconds(stream: "AudioStream | VideoStream") -> float:
    """The start of a stream by its header, in the file's own seconds; 0 if it has none."""
    return (
        float(stream.start_time * stream.time_base)
        if stream.start_time is not None and stream.time_base
        else 0.0
    )


@contextmanager
def _opened(path: Path) -> Iterator["InputContainer"]:
    """A file opened for decoding; whatever libav raises inside is a `UserError`."""
    import av

    try:
        with open_container(path, _FORMATS) as container:
            yield container
    except (av.FFmpegError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:120]
        raise UserError(
            f"{path} cannot be decoded as sound ({reason}); convert it again or remove it"
        ) from error
