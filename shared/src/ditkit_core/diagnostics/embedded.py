"""Images and videos as content of a page, within its limits."""

import base64
import io
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from PIL import Image

from ditkit_core.data.media import image as still
from ditkit_core.data.media import video
from ditkit_core.data.media.image_sequence import open_folder
from ditkit_core.documents.document import Medium
from ditkit_core.errors import UserError

MEDIA_BYTES = 12_000_000
"""Largest total size of embedded media: 16 MB in base64. A page that can still be sent by mail."""
VIDEO_BYTES = 2_000_000
"""Largest size of an embedded video."""
_IMAGE_SIZE, _IMAGE_BYTES = (640, 640), 150_000
_STILL_SIZE, _STILL_BYTES = (320, 320), 40_000
"""Limits of a thumbnail, and of a video's first frame where the video itself is not embedded."""


class PageMedia(dict[Path, Medium]):
    """How a page shows each file. Files are embedded until the page is full; those that come later
    are links.

    Args:
        folder: The folder that the page is written into, which links begin at.
        at_most: Largest total size of what is embedded, in bytes.
        embeds: Whether the page contains the files; if not, it loads them from where it links.
        thumbnails: Whether images are embedded small, and of videos and folders of images the first
            image alone.
        links_videos: Whether a video that is too large to be embedded is loaded from where it
            links, and played; if not, its first frame is embedded, and links to it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        at_most: int = MEDIA_BYTES,
        embeds: bool = True,
        thumbnails: bool = False,
        links_videos: bool = False,
    ):
        super().__init__()
        self._folder, self._room = folder, at_most
        self._embeds, self._thumbnails, self._links_videos = embeds, thumbnails, links_videos

    def add(self, file: Path) -> None:
        """Show a file on the page, if it is not there yet."""
        if file in self:
            return
        link = quote(Path(os.path.relpath(file, self._folder)).as_posix())
        try:
            image = open_folder(file).files[0] if file.is_dir() else file
            # No symbolic links: a folder from elsewhere must not put files of this computer into a
            # page that is sent on.
            if file.is_symlink() or image.is_symlink():
                self[file] = Medium(problem=f"{file.name} is a link, which the page leaves out")
            elif not image.is_file():
                self[file] = Medium(problem=f"{file.name} is missing")
            elif self._embeds:
                self[file] = self._embedded(image, link)
            else:
                is_video = _is_video(image)
                self[file] = Medium(source=link, link=link, is_video=is_video, preload="metadata")
        except (UserError, OSError) as error:  # one damaged file must not prevent the page
            self[file] = Medium(problem=str(error))

    def tile(self, file: Path, label: str, prompt: str, notes: Sequence[str] = ()) -> Medium:
        """A file with its label, the text for who cannot see it, and notes below."""
        self.add(file)
        return replace(self[file], label=label, prompt=prompt, notes=notes)

    def _embedded(self, file: Path, link: str) -> Medium:
        """A file as content of the page; a link if there is no room for it."""
        is_video, size = _is_video(file), file.stat().st_size
        is_small = is_video or self._thumbnails
        if is_video and not self._thumbnails and size <= min(VIDEO_BYTES, self._room):
            kind, content = "video/mp4", file.read_bytes()
        elif is_video and self._links_videos:
            return Medium(source=link, link=link, is_video=True, preload="metadata")
        else:
            limits = (_STILL_SIZE, _STILL_BYTES) if is_small else (_IMAGE_SIZE, _IMAGE_BYTES)
            image = (
                next(video.frames_at(file, [0.0]))
                if is_video
                else still.read_image(file, at_least=max(_STILL_SIZE) if is_small else None)
            )
            kind, content = "image/jpeg", small_jpeg(image, *limits)
        if len(content) > self._room:
            return Medium(link=link, is_embedded=False)
        self._room -= len(content)
        return Medium(
            source=f"data:{kind};base64,{base64.b64encode(content).decode()}",
            link=link,
            is_video=kind == "video/mp4",
            is_embedded=kind == "video/mp4" or self._thumbnails or not is_video,
        )


def small_jpeg(pixels: still.RgbImage, size: tuple[int, int], most_bytes: int) -> bytes:
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


def _is_video(path: Path) -> bool:
    # Here: it imports torch, and a server of pages would wait seconds before it listens.
    from ditkit_core.data.media.clip import media_kind

    return media_kind(path) == "video"
