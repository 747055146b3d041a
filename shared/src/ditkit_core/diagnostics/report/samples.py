"""The samples of a run on its page: for each prompt a strip over the steps, with videos that play."""

import base64
import io
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from PIL import Image

from ditkit_core.data.media import image as still
from ditkit_core.data.media import video
from ditkit_core.diagnostics.rendering import Html, element
from ditkit_core.diagnostics.report.data import SampleSet, Section
from ditkit_core.errors import UserError
from ditkit_core.io.run_dir import ListedSample

MEDIA_BYTES = 12_000_000
"""Largest total size of embedded samples: 16 MB in base64. A page that can still be sent by mail."""
VIDEO_BYTES = 2_000_000
"""Largest size of an embedded video."""
_IMAGE_SIZE, _IMAGE_BYTES = (640, 640), 150_000
_STILL_SIZE, _STILL_BYTES = (320, 320), 40_000
"""Limits of a video's first frame, which is shown where the video itself is not embedded."""
_MOST_STRIPS = 24
_SIDE_BY_SIDE, _FEW = 2, 4
"""Most samples of a strip that has another next to it, and of one with large samples."""
_PLAYED = {"controls": "", "loop": "", "muted": "", "playsinline": "", "preload": "auto"}

_CONTROLS = (
    "Controls are prompts of what this run does not teach. Their samples should stay as they were before training; if they turn into the "
    "training data, the run has gone too far."
)


class Strip(NamedTuple):
    """Samples side by side."""

    heading: str
    tiles: Sequence[tuple[str, ListedSample]]
    """The samples with their labels."""
    control: str = ""
    """Why the prompt is a control; empty if it is none."""


def samples_part(sections: Sequence[Section], folder: Path, *, embeds: bool = True) -> list[Html]:
    """Build the part of the page with all samples; empty if there are none.

    Args:
        folder: The folder that the page is written into, which links begin at.
        embeds: Whether the page contains the samples; if not, it loads them from where it links.
    """
    media = _Media(folder, embeds)
    for sample_set in _by_importance(sections):
        for sample in sample_set.samples[:_MOST_STRIPS]:
            media.add(sample)
    parts: list[Html] = []
    for section in sections:
        of = f" of {section.name}" if section.name else ""
        for title, strips in (
            (f"Samples{of}", _over_steps(section)),
            (f"Samples of the sample command{of}", list(map(_side_by_side, section.by_command))),
        ):
            if strips:
                figures = [_strip(strip, media) for strip in strips[:_MOST_STRIPS]]
                about = [element("p", _CONTROLS, class_="constant")] if any(strip.control for strip in strips) else []
                parts += [element("h2", title), *about, element("div", *figures, class_="strips")]
                if len(strips) > _MOST_STRIPS:
                    parts.append(element("p", f"{len(strips) - _MOST_STRIPS} more prompts are in the folder samples."))
    return parts


def _by_importance(sections: Sequence[Section]) -> list[SampleSet]:
    """The newest samples, those before training, and then the others: the page may have no room for all."""
    ordered: list[SampleSet] = []
    for section in sections:
        ordered += [*section.samples[-1:], *section.samples[:1], *section.by_command[::-1]]
    return ordered + [sample_set for section in sections for sample_set in section.samples[-2:0:-1]]


def _over_steps(section: Section) -> list[Strip]:
    """A strip for each prompt and seed, or one of all prompts if there are samples of one step only."""
    if len(section.samples) == 1:
        return [_side_by_side(section.samples[0])]
    strips: dict[tuple[str, str, int], list[tuple[str, ListedSample]]] = {}
    for sample_set in section.samples:
        occurrences = Counter[tuple[str, str]]()  # one prompt may be listed twice, with other conditions
        for sample in sample_set.samples:
            key = (sample.prompt, sample.seed)
            occurrences[key] += 1
            label = "before training" if sample_set.title == "step 0" else sample_set.title
            strips.setdefault((*key, occurrences[key]), []).append((label, sample))
    controls = _controls(section.config)
    return [
        Strip(f"{prompt} (seed {seed})", tiles, controls.get(prompt, "")) for (prompt, seed, _), tiles in strips.items()
    ]


def _controls(config: Mapping[str, Any]) -> dict[str, str]:
    """Why prompts are controls: the last `sample.num_control_prompts`, and all without the trigger if some have it."""
    listed, count = config.get("sample.prompts"), config.get("sample.num_control_prompts")
    prompts = [str(prompt) for prompt in listed] if isinstance(listed, list) else []
    trigger = str(config.get("data.trigger") or "").strip().lower()
    without = [prompt for prompt in prompts if trigger and trigger not in prompt.lower()]
    controls = dict.fromkeys(without, "control: without the trigger") if len(without) < len(prompts) else {}
    if isinstance(count, int) and 0 < count < len(
        prompts
    ):  # `--sample.prompts` may have replaced those that were counted
        controls |= dict.fromkeys(prompts[-count:], "control")
    return controls


def _side_by_side(sample_set: SampleSet) -> Strip:
    return Strip(sample_set.title, [(sample.prompt, sample) for sample in sample_set.samples[:_MOST_STRIPS]])


def _strip(strip: Strip, media: "_Media") -> Html:
    figures = [media.tile(label, sample) for label, sample in strip.tiles]
    control = [element("span", strip.control, class_="control")] if strip.control else []
    caption = element("figcaption", element("span", element("strong", strip.heading, dir="auto"), *control))
    tiles = element("div", *figures, class_="tiles few" if len(figures) <= _FEW else "tiles")
    return element("figure", caption, tiles, class_="many" if len(figures) > _SIDE_BY_SIDE else None)


class _Shown(NamedTuple):
    """How the page shows a file."""

    element: Html
    link: str | None = None
    """From the page to the file; None if it cannot be opened."""
    is_embedded: bool = True


class _Media:
    """Embeds samples until the page is full. Those that come later are links."""

    def __init__(self, folder: Path, embeds: bool) -> None:
        self._folder, self._embeds, self._left = folder, embeds, MEDIA_BYTES
        self._shown: dict[Path, _Shown] = {}

    def add(self, sample: ListedSample) -> None:
        """Embed a sample if there is room for it; a sample that is added again is not counted twice."""
        if sample.file in self._shown:
            return
        try:
            self._shown[sample.file] = self._show(sample.file, sample.prompt)
        except (UserError, OSError) as error:  # one damaged file must not prevent the report
            self._shown[sample.file] = _Shown(element("p", str(error)))

    def _show(self, file: Path, prompt: str) -> _Shown:
        # No symbolic links: a folder from elsewhere must not put files of this computer into a page that is sent on.
        if file.is_symlink() or not file.is_file():
            return _Shown(element("p", f"{file.name} is missing"))
        link = quote(Path(os.path.relpath(file, self._folder)).as_posix())
        if not self._embeds and file.suffix == ".mp4":
            return _Shown(element("video", src=link, aria_label=prompt, **_PLAYED | {"preload": "metadata"}), link)
        if not self._embeds:
            return _Shown(element("a", element("img", src=link, alt=prompt, loading="lazy"), href=link), link)
        if file.suffix != ".mp4":
            image, is_embedded = small_jpeg(still.read_image(file), _IMAGE_SIZE, _IMAGE_BYTES), True
        elif file.stat().st_size <= VIDEO_BYTES and (source := self._embedded("video/mp4", file.read_bytes())):
            return _Shown(element("video", src=source, aria_label=prompt, **_PLAYED), link)
        else:
            image, is_embedded = small_jpeg(next(video.frames_at(file, [0.0])), _STILL_SIZE, _STILL_BYTES), False
        source = self._embedded("image/jpeg", image)
        inside = element("img", src=source, alt=prompt, loading="lazy") if source else element("span", prompt)
        return _Shown(element("a", inside, href=link), link, is_embedded and bool(source))

    def _embedded(self, kind: str, data: bytes) -> str:
        """The data as a URL; empty if the page has no room for it."""
        if len(data) > self._left:
            return ""
        self._left -= len(data)
        return f"data:{kind};base64,{base64.b64encode(data).decode()}"

    def tile(self, label: str, sample: ListedSample) -> Html:
        """A sample with its label, which is a link to the file."""
        medium = self._shown.get(sample.file, _Shown(Html()))
        named = label if medium.link is None else element("a", label, href=medium.link)
        notes = [] if medium.is_embedded else ["in the run's folder"]
        notes += [f"decoded {sample.decoded}"] if sample.decoded not in ("", "whole") else []
        small = [element("small", note) for note in notes]
        return element("figure", medium.element, element("figcaption", named, *small, dir="auto"), class_="tile")


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
