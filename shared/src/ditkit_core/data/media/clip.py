"""Media files as clips: probing them, reading their frames by time, writing samples.

PyAV decodes videos, Pillow decodes still images (libav ignores the orientation of a photograph),
and folders of numbered images are read image by image. Each file becomes one tensor; an image is a
clip of one frame.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from ditkit_core.config.nearest import path_remedy
from ditkit_core.data.media import image as still
from ditkit_core.data.media import video
from ditkit_core.data.media.crop import CENTRE, Crop
from ditkit_core.data.media.files import is_folder, is_regular
from ditkit_core.data.media.image import RgbImage
from ditkit_core.data.media.image_sequence import open_folder
from ditkit_core.data.media.packets import SLACK_SECONDS
from ditkit_core.errors import EnvironmentFault, UserError
from ditkit_core.io.files import atomic_write

Kind = Literal["video", "image"]

_COMMON = {".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".gif"}
VIDEO_SUFFIXES = frozenset(
    _COMMON | {".mpg", ".mpeg", ".ts", ".mts", ".m2ts", ".flv", ".wmv", ".ogv", ".3gp"}
)
IMAGE_SUFFIXES = still.SUFFIXES

_LONG = 32.0
"""An image whose aspect ratio is this many times the aspect ratio of its clip is cropped before it
is resized."""
_KEPT_OF_LONG = 4.0
"""Length that is kept then, in lengths of the part that is left at the end; the rest is a margin
for the filter."""

TRANSFORM_VERSION = 2
"""Part of the cache key. Increase it when a change makes every file give other pixels than before;
see `changes_since_first` for some files."""
_COLOURS = "srgb"
"""The change in files whose colours are converted to sRGB; they were read as sRGB before."""
_TURNS = "mirrored"
"""The change in videos whose display matrix mirrors them, or is empty; they were turned by its
angle before."""


@dataclass(frozen=True, kw_only=True)
class MediaInfo:
    """Size and duration of a media file, as a player would show it."""

    kind: Kind
    width: int
    height: int
    seconds: float
    """Seconds from the start of the first frame to the end of the last; 0 for an image, and for a
    folder of images without `fps.txt`."""
    fps: float
    """Average frames per second; 0 in the same cases as `seconds`."""


def media_kind(path: Path) -> Kind:
    """Video or image, by the file's extension; a folder without such an extension is a video of
    numbered images.

    Raises:
        UserError: If the extension is unknown.
    """
    if not called_like_media(path) and is_folder(path):
        return "video"
    return kind_by_name(path)


def kind_by_name(path: Path) -> Kind:
    """Video or image, by the name alone; the file need not exist."""
    if not called_like_media(path):
        accepted = " ".join(sorted(VIDEO_SUFFIXES | IMAGE_SUFFIXES))
        raise UserError(
            f"{path} does not have the extension of a media file; convert it to one of {accepted}"
        )
    return "video" if Path(path).suffix.lower() in VIDEO_SUFFIXES else "image"


def called_like_media(path: str | Path) -> bool:
    """Whether a file has the extension of a video or an image."""
    return Path(path).suffix.lower() in VIDEO_SUFFIXES | IMAGE_SUFFIXES


def probe(path: Path) -> MediaInfo:
    """Size and duration of a media file; a video is measured over all of its packets.

    Raises:
        UserError: If the file is missing, empty, damaged, without a video stream, or of another
            type than its extension.
    """
    if _checked(path) == "image":
        height, width = still.image_size(path)
        return MediaInfo(kind="image", width=width, height=height, seconds=0.0, fps=0.0)
    if path.is_dir():
        images = open_folder(path)
        height, width = images.size()
        seconds = len(images.files) / images.fps if images.fps else 0.0
        return MediaInfo(kind="video", width=width, height=height, seconds=seconds, fps=images.fps)
    survey = video.survey(path)
    return MediaInfo(
        kind="video",
        width=survey.width,
        height=survey.height,
        seconds=survey.timeline.seconds,
        fps=survey.timeline.count / max(survey.timeline.seconds, SLACK_SECONDS),
    )


class Available(NamedTuple):
    """The frames that a file contains at some frame rate."""

    frames: int
    """Number of frames; 1 for an image."""
    height: int
    width: int


def available(path: Path, fps: float, *, at_most: int | None = None) -> Available:
    """Number and size of the frames that a file has at a frame rate; `at_most` stops reading when
    so many are found. Errors as of `probe`."""
    if _checked(path) == "image":
        return Available(1, *still.image_size(path))
    if path.is_dir():
        images = open_folder(path)
        num_frames = images.frames(fps)
        return Available(
            num_frames if at_most is None else min(num_frames, at_most), *images.size()
        )
    survey = video.survey(path, until_seconds=math.inf if at_most is None else at_most / fps)
    # Without the slack a duration that is rounded up to a millisecond would count one frame too
    # many.
    frames = max(1, math.ceil((survey.timeline.seconds - SLACK_SECONDS) * fps))
    return Available(
        frames if at_most is None else min(frames, at_most), survey.height, survey.width
    )


def read_clip(
    path: Path,
    *,
    frames: int,
    fps: float,
    height: int,
    width: int,
    start_seconds: float = 0.0,
    as_stored: bool = False,
    is_mirrored: bool = False,
    crop: Crop = CENTRE,
) -> Float[Tensor, "3 frames height width"]:
    """Read a clip: frame i is the image shown at `start_seconds + i / fps`, resized to cover the
    size and cropped, by default to the centre.

    Args:
        frames: Number of frames; 1 for an image.
        height: Pixels; likewise `width`.
        start_seconds: Time of the first frame, counted from the file's first frame.
        as_stored: Do not convert an image's colours to sRGB: the values mean something else, as in
            a mask.
        is_mirrored: Exchange left and right in the end.
        crop: Where the part is.

    Returns:
        float32 pixels in [-1, 1].

    Raises:
        UserError: If the file cannot be read, or ends before the last frame.
    """
    clip = torch.empty(3, frames, height, width)
    images = stored_images(
        path, frames=frames, fps=fps, start_seconds=start_seconds, as_stored=as_stored
    )
    for i, image in enumerate(images):
        clip[:, i] = _fit(image, height, width, crop)
    return clip.flip(-1) if is_mirrored else clip


def stored_images(
    path: Path, *, frames: int, fps: float, start_seconds: float = 0.0, as_stored: bool = False
) -> Iterator[RgbImage]:
    """The images of a clip at their stored size; if an image stays on screen, the same object is
    yielded again.

    Args and errors: see `read_clip`.
    """
    if _checked(path) == "image":
        if frames != 1:
            raise UserError(
                f"{path} is a still image, but {frames} frames were requested; request 1"
            )
        yield still.read_image(path, as_stored=as_stored)
        return
    times = [start_seconds + i / fps for i in range(frames)]
    if path.is_dir():
        yield from open_folder(path).at(times, fps, as_stored=as_stored)
    else:
        yield from video.frames_at(path, times)


def spread_images(path: Path, count: int) -> list[RgbImage]:
    """Up to `count` images of a media file at their stored size, spread evenly over its length: the
    middle one of each part. An image that stays on screen is taken once; a still image is one.

    Errors: as of `probe`.
    """
    if _checked(path) == "image":
        return [still.read_image(path)]
    if path.is_dir():
        folder = open_folder(path)
        seconds = len(folder.files) / (folder.fps or 1.0)
    else:
        seconds = video.survey(path).timeline.seconds
    times = [seconds * (2 * part + 1) / (2 * count) for part in range(count)]
    images: list[RgbImage] = []
    for image in folder.at(times, 1.0) if path.is_dir() else video.frames_at(path, times):
        if not images or image is not images[-1]:
            images.append(image)
    return images


class Colours(NamedTuple):
    """Colours of a file that are not stored as sRGB."""

    name: str
    """The colour space; if they are not converted, the reason."""
    is_converted: bool
    """Whether they are converted to sRGB when the file is read; else its numbers are taken as
    sRGB."""


def colours_of(path: Path) -> Colours | None:
    """How a file stores its colours, by its header; None for sRGB, and for HDR videos, which are
    tone mapped (`video.is_hdr`)."""
    if kind_by_name(path) == "image":
        colours = still.image_colours(path)
        return None if colours is None else Colours(colours.name, colours.to_srgb is not None)
    primaries = video.converted_primaries(path)
    return Colours(primaries, is_converted=True) if primaries else None


def changes_since_first(path: Path) -> str:
    """What is read from this content otherwise than the first versions with this
    `TRANSFORM_VERSION` did; "" for nothing, or an unreadable file.

    Part of the cache key, so that files which were always read right keep their entries.
    """
    if not called_like_media(path):
        return ""
    try:
        colours = colours_of(path)
        changes = [_COLOURS] if colours is not None and colours.is_converted else []
        changes += (
            [_TURNS] if kind_by_name(path) == "video" and video.is_turned_otherwise(path) else []
        )
    except EnvironmentFault:
        raise
    except UserError:  # reported by whoever uses the file
        return ""
    return " ".join(changes)


def _checked(path: Path) -> Kind:
    kind = media_kind(path)
    if is_folder(path):
        if not called_like_media(path):
            return kind
        raise UserError(f"{path} is a folder, not a media file; rename it or remove it")
    if not is_regular(path):
        raise UserError(f"{path} does not exist or is not a file; {path_remedy(path)}")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty (0 bytes); copy it again or remove it")
    return kind


def _fit(image: RgbImage, height: int, width: int, crop: Crop) -> Float[Tensor, "3 height width"]:
    """Scale to cover the size (antialiased), crop, map 0…255 to [-1, 1]."""
    source = np.ascontiguousarray(_without_far_ends(image, height, width, crop))
    pixels = torch.from_numpy(source).permute(2, 0, 1).float()
    source_height, source_width = pixels.shape[1:]
    scale = max(height / source_height, width / source_width)
    covering = max(height, round(source_height * scale)), max(width, round(source_width * scale))
    if covering != (source_height, source_width):
        resized = functional.interpolate(
            pixels[None], covering, mode="bicubic", antialias=True, align_corners=False
        )
        pixels = resized[0].clamp(0, 255)  # bicubic overshoots at edges
    top = int((covering[0] - height) * crop.down)
    left = int((covering[1] - width) * crop.right)
    return pixels[:, top : top + height, left : left + width] / 127.5 - 1


def _without_far_ends(image: RgbImage, height: int, width: int, crop: Crop) -> RgbImage:
    """The part around the crop of a very long image, from which resizing and cropping give the same part; any
    other image as it is.

    Resized as a whole, 1000 x 1 pixels at 480 x 832 would take 5 GB.
    """
    # Only from this ratio on: a crop moves the filter by part of a pixel, and would change the
    # cached latents of ordinary images.
    excess = (image.shape[0] * width) / (image.shape[1] * height)
    axis, excess = (0, excess) if excess > 1 else (1, 1 / excess)
    if excess <= _LONG:
        return image
    # An even number, so that as much is cut at both ends of the centre.
    cut = int(image.shape[axis] * (1 - _KEPT_OF_LONG / excess)) // 2 * 2
    first = round(cut * (crop.down, crop.right)[axis])
    kept = slice(first, image.shape[axis] - cut + first)
    return image[kept] if axis == 0 else image[:, kept]


def write_video(path: Path, pixels: Float[Tensor, "3 frames height width"], fps: float) -> None:
    """Write pixels in [0, 1] as an mp4 (H.264, yuv420p) atomically.

    Values outside are clamped. For an odd size the last row or column is repeated, because yuv420p
    needs even sizes.
    """
    height, width = pixels.shape[2:]
    images: list[RgbImage] = list(_bytes(pixels).permute(1, 2, 3, 0).numpy())
    missing = ((0, height % 2), (0, width % 2), (0, 0))
    even = [np.pad(image, missing, mode="edge") for image in images]
    video.write_h264(path, even, fps=fps)


def write_image(path: Path, pixels: Float[Tensor, "3 height width"]) -> None:
    """Write pixels in [0, 1] as a png atomically; values outside are clamped."""
    from PIL import Image

    with atomic_write(path) as temporary:
        Image.fromarray(_bytes(pixels).permute(1, 2, 0).numpy()).save(temporary, format="PNG")


def _bytes(pixels: Tensor) -> Tensor:
    levels = (pixels.detach().cpu().float().clamp(0, 1) * 255).round()
    return levels.to(torch.uint8).contiguous()
