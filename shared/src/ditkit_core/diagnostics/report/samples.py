"""The samples of a run on its page: for each prompt a strip over the steps, with videos that
play."""

import base64
import io
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from PIL import Image

from ditkit_core.data.media import image as still
from ditkit_core.data.media import video
from ditkit_core.diagnostics.report.data import SampleSet, Section
from ditkit_core.errors import UserError
from ditkit_core.io.run_dir import ListedSample

MEDIA_BYTES = 12_000_000
"""Largest total size of embedded samples: 16 MB in base64. A page that can still be sent by
mail."""
VIDEO_BYTES = 2_000_000
"""Largest size of an embedded video."""
_IMAGE_SIZE, _IMAGE_BYTES = (640, 640), 150_000
_STILL_SIZE, _STILL_BYTES = (320, 320), 40_000
"""Limits of a video's first frame, which is shown where the video itself is not embedded."""
_MOST_STRIPS = 24


class Strip(NamedTuple):
    """Samples side by side."""

    heading: str
    tiles: Sequence[tuple[str, ListedSample]]
    """The samples with their labels."""
    control: str = ""
    """Why the prompt is a control; empty if it is none."""


class SamplesPart(NamedTuple):
    """Strips below one title."""

    title: str
    strips: Sequence[Strip]
    num_more: int
    """Number of strips that are left out."""

    @property
    def has_controls(self) -> bool:
        """Whether prompts of it are controls, which the page explains."""
        return any(strip.control for strip in self.strips)


def samples_parts(sections: Sequence[Section]) -> list[SamplesPart]:
    """The parts of the page with all samples; empty if there are none."""
    parts = []
    for section in sections:
        of = f" of {section.name}" if section.name else ""
        titled = {f"Samples{of}": _over_steps(section)}
        titled[f"Samples of the sample command{of}"] = list(map(_side_by_side, section.by_command))
        parts += [
            SamplesPart(title, strips[:_MOST_STRIPS], max(0, len(strips) - _MOST_STRIPS))
            for title, strips in titled.items()
            if strips
        ]
    return parts


def _by_importance(sections: Sequence[Section]) -> list[SampleSet]:
    """The newest samples, those before training, and then the others: the page may have no room for
    all."""
    ordered: list[SampleSet] = []
    for section in sections:
        ordered += [*section.samples[-1:], *section.samples[:1], *section.by_command[::-1]]
    return ordered + [sample_set for section in sections for sample_set in section.samples[-2:0:-1]]


def _over_steps(section: Section) -> list[Strip]:
    """A strip for each prompt and seed, or one of all prompts if there are samples of one step
    only."""
    if len(section.samples) == 1:
        return [_side_by_side(section.samples[0])]
    strips: dict[tuple[str, str, int], list[tuple[str, ListedSample]]] = {}
    for sample_set in section.samples:
        occurrences = Counter[
            tuple[str, str]
        ]()  # one prompt may be listed twice, with other conditions
        for sample in sample_set.samples:
            key = (sample.prompt, sample.seed)
            occurrences[key] += 1
            label = "before training" if sample_set.title == "step 0" else sample_set.title
            strips.setdefault((*key, occurrences[key]), []).append((label, sample))
    controls = _controls(section.config)
    return [
        Strip(f"{prompt} (seed {seed})", tiles, controls.get(prompt, ""))
        for (prompt, seed, _), tiles in strips.items()
    ]


def _controls(config: Mapping[str, Any]) -> dict[str, str]:
    """Why prompts are controls: the last `sample.num_control_prompts`, and all without the trigger
    if some have it."""
    listed, count = config.get("sample.prompts"), config.get("sample.num_control_prompts")
    prompts = [str(prompt) for prompt in listed] if isinstance(listed, list) else []
    trigger = str(config.get("data.trigger") or "").strip().lower()
    without = [prompt for prompt in prompts if trigger and trigger not in prompt.lower()]
    controls = (
        dict.fromkeys(without, "control: without the trigger")
        if len(without) < len(prompts)
        else {}
    )
    # `--sample.prompts` may have replaced those that were counted.
    if isinstance(count, int) and 0 < count < len(prompts):
        controls |= dict.fromkeys(prompts[-count:], "control")
    return controls


def _side_by_side(sample_set: SampleSet) -> Strip:
    return Strip(
        sample_set.title, [(sample.prompt, sample) for sample in sample_set.samples[:_MOST_STRIPS]]
    )


class Medium(NamedTuple):
    """How the page shows a file."""

    source: str = ""
    """Its content, or the path that it is loaded from; empty if the page has no room for it."""
    link: str = ""
    """From the page to the file; empty if it cannot be opened."""
    is_video: bool = False
    is_embedded: bool = True
    preload: str = "auto"
    problem: str = ""
    """Why it cannot be shown."""


def embedded_media(
    sections: Sequence[Section], folder: Path, *, embeds: bool = True
) -> Mapping[Path, Medium]:
    """How the page shows each sample. Samples are embedded until the page is full; those that come
    later are links.

    Args:
        folder: The folder that the page is written into, which links begin at.
        embeds: Whether the page contains the samples; if not, it loads them from where it links.
    """
    media = defaultdict[Path, Medium](lambda: Medium(problem="in the run's folder"))
    left = MEDIA_BYTES
    for sample_set in _by_importance(sections):
        for sample in sample_set.samples[:_MOST_STRIPS]:
            if (file := sample.file) in media:
                continue
            link = quote(Path(os.path.relpath(file, folder)).as_posix())
            # No symbolic links: a folder from elsewhere must not put files of this computer into a
            # page that is sent on.
            if file.is_symlink() or not file.is_file():
                media[file] = Medium(problem=f"{file.name} is missing")
            elif not embeds:
                media[file] = Medium(link, link, is_video=file.suffix == ".mp4", preload="metadata")
            else:
                try:
                    media[file], num_bytes = _embedded(file, link, left)
                    left -= num_bytes
                except (
                    UserError,
                    OSError,
                ) as error:  # one damaged file must not prevent the report
                    media[file] = Medium(problem=str(error))
    return media


def _embedded(file: Path, link: str, left: int) -> tuple[Medium, int]:
    """A sample as content of the page, which has room for this many bytes; and how many it
    takes."""
    is_video, size = file.suffix == ".mp4", file.stat().st_size
    if is_video and size <= min(VIDEO_BYTES, left):
        return Medium(_data_url("video/mp4", file.read_bytes()), link, is_video=True), size
    if is_video:
        image = small_jpeg(next(video.frames_at(file, [0.0])), _STILL_SIZE, _STILL_BYTES)
    else:
        image = small_jpeg(still.read_image(file), _IMAGE_SIZE, _IMAGE_BYTES)
    if len(image) > left:
        return Medium("", link, is_embedded=False), 0
    return Medium(_data_url("image/jpeg", image), link, is_embedded=not is_video), len(image)


def _data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


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
