"""Images and videos as content of a page, within its limits."""

import base64
import io
import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from PIL import Image

from ditkit_core.data.media.clip import media_kind, stored_images
from ditkit_core.data.media.image import RgbImage
from ditkit_core.data.media.image_sequence import open_folder
from ditkit_core.documents.document import Medium
from ditkit_core.errors import UserError

VIDEO_BYTES = 2_000_000
"""Largest size of an embedded video."""
_IMAGE_SIZE, _IMAGE_BYTES = (640, 640), 150_000
_STILL_SIZE, _STILL_BYTES = (320, 320), 40_000
"""Limits of a thumbnail, and of a video's first frame where the video itself is not embedded."""


def embedded_media(
    files: Iterable[Path],
    folder: Path,
    *,
    at_most: int,
    embeds: bool = True,
    thumbnails: bool = False,
) -> dict[Path, Medium]:
    """How a page shows each file. Files are embedded until the page is full; those that come later
    are links.

    Args:
        folder: The folder that the page is written into, which links begin at.
        at_most: Largest total size of what is embedded, in bytes.
        embeds: Whether the page contains the media; if not, it loads them from where it links.
        thumbnails: Whether images are embedded small, and of videos and folders of images the first
            image alone.
    """
    media, room = dict[Path, Medium](), at_most
    for file in dict.fromkeys(files):
        link = quote(Path(os.path.relpath(file, folder)).as_posix())
        num_bytes = 0
        try:
            image = open_folder(file).files[0] if file.is_dir() else file
            # No symbolic links: a folder from elsewhere must not put files of this computer into a
            # page that is sent on.
            if image.is_symlink():
                media[file] = Medium(problem=f"{file.name} is a link, which the page leaves out")
            elif not image.is_file():
                media[file] = Medium(problem=f"{file.name} is missing")
            elif embeds:
                media[file], num_bytes = _embedded(image, link, room, thumbnails=thumbnails)
            else:
                is_video = media_kind(image) == "video"
                media[file] = Medium(source=link, link=link, is_video=is_video, preload="metadata")
        except (UserError, OSError) as error:  # one damaged file must not prevent the page
            media[file] = Medium(problem=str(error))
        room -= num_bytes
    return media


def _embedded(file: Path, link: str, room: int, *, thumbnails: bool) -> tuple[Medium, int]:
    """A file as content of a page that has room for this many bytes; and how many it takes."""
    is_video, size = media_kind(file) == "video", file.stat().st_size
    if is_video and not thumbnails and size <= min(VIDEO_BYTES, room):
        content = file.read_bytes()
        return Medium(source=_data_url("video/mp4", content), link=link, is_video=True), size
    is_small = is_video or thumbnails
    limits = (_STILL_SIZE, _STILL_BYTES) if is_small else (_IMAGE_SIZE, _IMAGE_BYTES)
    image = small_jpeg(next(stored_images(file, frames=1, fps=1.0)), *limits)
    if len(image) > room:
        return Medium(link=link, is_embedded=False), 0
    is_whole = thumbnails or not is_video
    return Medium(source=_data_url("image/jpeg", image), link=link, is_embedded=is_whole), len(
        image
    )


def _data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def small_jpeg(pixels: RgbImage, size: tuple[int, int], most_bytes: int) -> bytes:
    """An image as a JPEG in a bounding box, with lower quality until it is small enough."""
    image = Image.fromarray(pixels)
    image.thumbnail(size)
    buffer = io.BytesIO()
    # Quality before size: a sample should stay large enough to judge it.
    for quality in (80, 60, 40, 20, 10):
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=quality)
        if buffer.tell() <= most_bytes:
            break
    return buffer.getvalue()
