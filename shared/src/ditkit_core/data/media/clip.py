"""Media files as clips: probing, reading what was on screen when, writing samples.

Videos go through PyAV, still images through Pillow (libav ignores the orientation in a photograph), folders of numbered images
image by image. Each comes back as one tensor, an image being a clip of one frame.
"""

import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from ditkit_core.data.media import image as still
from ditkit_core.data.media import video
from ditkit_core.data.media.image_sequence import open_folder
from ditkit_core.data.media.timestamps import SLACK_SECONDS
from ditkit_core.errors import UserError

Kind = Literal["video", "image"]

_COMMON = {".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".gif"}
VIDEO_SUFFIXES = frozenset(_COMMON | {".mpg", ".mpeg", ".ts", ".mts", ".m2ts", ".flv", ".wmv", ".ogv", ".3gp"})
IMAGE_SUFFIXES = still.SUFFIXES

TRANSFORM_VERSION = 2
"""Raised when the same file would give other pixels than before; part of the cache key."""


@dataclass(frozen=True, kw_only=True)
class MediaInfo:
    """What a media file holds, as a player would show it."""

    kind: Kind
    width: int
    """Pixels, after rotation."""
    height: int
    """Pixels, after rotation."""
    seconds: float
    """Time from the first frame shown to the end of the last; 0 for an image, and for images of a folder that does not say."""
    fps: float
    """Frames per second on average; 0 as for `seconds`."""
    rotation: int
    """Anticlockwise degrees (0, 90, 180, 270) that the file asks a player to turn a video; 0 for an image."""


def media_kind(path: Path) -> Kind:
    """Video or image, by the file's extension; a folder that is not called like a file is a video of numbered images.

    Raises:
        UserError: If the extension is neither.
    """
    if not _called_like_media(path):
        found = status(path)
        if found is not None and stat.S_ISDIR(found.st_mode):
            return "video"
    return kind_by_name(path)


def kind_by_name(path: Path) -> Kind:
    """The same by the name alone, which need not be there.

    Raises:
        UserError: If the extension is neither.
    """
    if not _called_like_media(path):
        accepted = " ".join(sorted(VIDEO_SUFFIXES | IMAGE_SUFFIXES))
        raise UserError(f"{path} is not a media file by its extension; convert it to one of {accepted}")
    return "video" if Path(path).suffix.lower() in VIDEO_SUFFIXES else "image"


def _called_like_media(path: Path) -> bool:
    return Path(path).suffix.lower() in VIDEO_SUFFIXES | IMAGE_SUFFIXES


def status(path: Path) -> os.stat_result | None:
    """What lies at a path, links followed; None if nothing does.

    Raises:
        UserError: If it cannot be told: no permission, links in a circle, a name that no file can have.
    """
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); correct its name or its permissions") from error
    except ValueError as error:  # a null byte, half of a character
        raise UserError(f"{str(path)!r} has a character that no file name can have; correct the name") from error


def probe(path: Path) -> MediaInfo:
    """Size and duration of a media file, a video's measured over all of its packets.

    Raises:
        UserError: If the file is missing, empty, damaged, without a picture, or not what its extension says.
    """
    if _checked(path) == "image":
        height, width = still.image_size(path)
        return MediaInfo(kind="image", width=width, height=height, seconds=0.0, fps=0.0, rotation=0)
    if path.is_dir():
        images = open_folder(path)
        height, width = images.size()
        seconds = len(images.files) / images.fps if images.fps else 0.0
        return MediaInfo(kind="video", width=width, height=height, seconds=seconds, fps=images.fps, rotation=0)
    found = video.survey(path)
    return MediaInfo(
        kind="video",
        width=found.width,
        height=found.height,
        seconds=found.timeline.seconds,
        fps=found.timeline.count / max(found.timeline.seconds, SLACK_SECONDS),
        rotation=90 * found.quarter_turns,
    )


class Available(NamedTuple):
    """What a file has to give at a frame rate."""

    frames: int
    """1 for an image."""
    height: int
    """Pixels, as a player would show them."""
    width: int
    """Pixels, as a player would show them."""


def available(path: Path, fps: float, *, at_most: int | None = None) -> Available:
    """How many frames a file gives at a frame rate, and how large they are.

    Args:
        path: A media file.
        fps: Frames per second to be read at.
        at_most: Do not look further than for this many frames.

    Raises:
        UserError: As `probe`.
    """
    if _checked(path) == "image":
        return Available(1, *still.image_size(path))
    if path.is_dir():
        images = open_folder(path)
        there = images.frames(fps)
        return Available(there if at_most is None else min(there, at_most), *images.size())
    found = video.survey(path, until_seconds=math.inf if at_most is None else at_most / fps)
    frames = max(1, math.ceil((found.timeline.seconds - SLACK_SECONDS) * fps))
    return Available(frames if at_most is None else min(frames, at_most), found.height, found.width)


def read_clip(
    path: Path, *, frames: int, fps: float, height: int, width: int, start_seconds: float = 0.0
) -> Float[Tensor, "3 frames height width"]:
    """Read a clip: frame i is what was on screen at `start_seconds + i / fps`, resized to cover and centre cropped.

    Args:
        path: A media file.
        frames: Number of frames; 1 for an image.
        fps: Frames per second of the clip.
        height: Pixels.
        width: Pixels.
        start_seconds: Time of the first frame, counted from the file's first.

    Returns:
        float32 pixels in [-1, 1].

    Raises:
        UserError: If the file cannot be read, or does not hold every one of the frames.
    """
    clip = torch.empty(3, frames, height, width)
    for i, picture in enumerate(pictures(path, frames=frames, fps=fps, start_seconds=start_seconds)):
        clip[:, i] = _fit(picture, height, width)
    return clip


def pictures(path: Path, *, frames: int, fps: float, start_seconds: float = 0.0) -> Iterator[video.Picture]:
    """The pictures that a clip is made of, as they are stored; where one stays on screen it is given again, the same object.

    Args and errors as of `read_clip`.
    """
    if _checked(path) == "image":
        if frames != 1:
            raise UserError(f"{path} is a still image, {frames} frames were asked for; ask for 1")
        yield still.read_image(path)
        return
    times = [start_seconds + i / fps for i in range(frames)]
    yield from open_folder(path).at(times, fps) if path.is_dir() else video.frames_at(path, times)


def _checked(path: Path) -> Kind:
    kind = media_kind(path)
    found = status(path)
    if found is not None and stat.S_ISDIR(found.st_mode):
        if not _called_like_media(path):
            return kind
        raise UserError(f"{path} is a folder, not a media file; rename it or remove it")
    if found is None or not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path} does not exist or is no file; correct the path")
    if found.st_size == 0:
        raise UserError(f"{path} is empty (0 bytes); copy it again or remove it")
    return kind


def _fit(picture: video.Picture, height: int, width: int) -> Float[Tensor, "3 height width"]:
    """Scale to cover the size (antialiased), crop to the centre, map 0…255 to [-1, 1]."""
    pixels = torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1).float()
    scale = max(height / pixels.shape[1], width / pixels.shape[2])
    covering = (max(height, round(pixels.shape[1] * scale)), max(width, round(pixels.shape[2] * scale)))
    if covering != tuple(pixels.shape[1:]):
        resized = functional.interpolate(pixels[None], covering, mode="bicubic", antialias=True, align_corners=False)
        pixels = resized[0].clamp(0, 255)  # bicubic overshoots at edges
    top, left = (covering[0] - height) // 2, (covering[1] - width) // 2
    return pixels[:, top : top + height, left : left + width] / 127.5 - 1


def write_video(path: Path, pixels: Float[Tensor, "3 frames height width"], fps: float) -> None:
    """Write an mp4 (H.264, yuv420p) atomically; an odd last row or column is repeated, since yuv420p has even sizes.

    Args:
        path: The file.
        pixels: Values in [0, 1]; what lies outside is clamped.
        fps: Frames per second.

    Raises:
        UserError: If the file cannot be written.
    """
    height, width = pixels.shape[2:]
    pictures: list[video.Picture] = list(_bytes(pixels).permute(1, 2, 3, 0).numpy())
    even = [np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge") for picture in pictures]
    video.write_h264(path, even, fps=fps)


def write_image(path: Path, pixels: Float[Tensor, "3 height width"]) -> None:
    """Write a png atomically.

    Args:
        path: The file.
        pixels: Values in [0, 1]; what lies outside is clamped.

    Raises:
        UserError: If the file cannot be written.
    """
    still.save_image(path, _bytes(pixels).permute(1, 2, 0).numpy())


def _bytes(pixels: Tensor) -> Tensor:
    return (pixels.detach().cpu().float().clamp(0, 1) * 255).round().to(torch.uint8).contiguous()
