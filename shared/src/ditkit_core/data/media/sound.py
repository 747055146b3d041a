"""The sound of a file: a sound file, or the sound track of a video."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from ditkit_core.data.media.files import open_container
from ditkit_core.errors import UserError

if TYPE_CHECKING:
    from av.container import InputContainer

_FORMATS = "wav,w64,aiff,mp3,flac,aac,ogg,mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,flv,asf"


def decode_sound(
    path: Path, *, until_seconds: float = math.inf, rate: int = 0
) -> tuple[Float[np.ndarray, " samples"], int]:
    """The first sound track of a file, averaged over its channels.

    In a video, time 0 is the time of its first frame: a track that begins later is preceded by silence, and sound before that frame is cut.

    Args:
        path: The file.
        until_seconds: Decoding stops here.
        rate: Samples per second to resample to; 0 keeps the file's.

    Returns:
        Samples in about [-1, 1], fp32, and the number of samples per second.

    Raises:
        UserError: If there is none, it cannot be decoded, or samples are not finite.
    """
    import av

    with _opened(path) as container:
        if not container.streams.audio:
            raise UserError(f"{path} has no sound; give a file with a sound track")
        stream = container.streams.audio[0]
        delay = _delay(container)
        rate = rate or stream.rate
        until = until_seconds - delay
        resampler = av.AudioResampler(format="fltp", layout=stream.layout, rate=rate)
        parts: list[np.ndarray] = []
        num_samples = 0
        for decoded in chain(container.decode(stream), [None]):  # None: flushes the resampler
            if num_samples >= until * stream.rate:
                break
            parts += [frame.to_ndarray().mean(axis=0) for frame in resampler.resample(decoded)]
            num_samples += 0 if decoded is None else decoded.samples
    sound = np.concatenate(parts).astype(np.float32) if parts else np.empty(0, np.float32)
    if not len(sound):
        raise UserError(f"{path} has no sound in it; give a file with sound")
    shift = round(delay * rate)
    sound = np.concatenate([np.zeros(max(shift, 0), np.float32), sound[max(-shift, 0) :]])
    sound = sound[: math.ceil(min(len(sound), until_seconds * rate))]
    if not np.isfinite(sound).all():
        raise UserError(f"{path} contains samples that are not finite numbers; convert it again")
    return sound, rate


def sound_seconds(path: Path) -> float:
    """Seconds until the end of a file's first sound track, from the first frame of a video; 0 without a track. Nothing is decoded.

    Raises:
        UserError: If the file cannot be read.
    """
    with _opened(path) as container:
        if not container.streams.audio:
            return 0.0
        stream = container.streams.audio[0]
        delay, unit = _delay(container), float(stream.time_base or 0)
        start, end = (stream.start_time or 0) * unit, 0.0
        for packet in container.demux(stream):  # Matroska has no length of a track in its header
            if packet.pts is not None:
                end = max(end, (packet.pts + (packet.duration or 0)) * unit)
        return max(end - start, 0.0) + delay


def _delay(container: "InputContainer") -> float:
    """Seconds from a video's first frame to the start of its sound; 0 for a sound file."""
    audio, videos = container.streams.audio[0], container.streams.video
    # The cover image in a sound file's tags is a video stream too, of one frame.
    if not videos or (videos[0].disposition & videos[0].disposition.attached_pic):
        return 0.0
    starts = [
        float(stream.start_time * stream.time_base) if stream.start_time is not None and stream.time_base else 0.0
        for stream in (videos[0], audio)
    ]
    return starts[1] - starts[0]


@contextmanager
def _opened(path: Path) -> Iterator["InputContainer"]:
    """A file opened for decoding; whatever libav raises inside is a `UserError`."""
    import av

    try:
        with open_container(path, _FORMATS) as container:
            yield container
    except (av.FFmpegError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:120]
        raise UserError(f"{path} cannot be decoded as sound ({reason}); convert it again or remove it") from error
