"""report.html: a run on one page that needs nothing beside it: no network, no other file, and no script to be complete.

The page forbids itself to load anything: its policy names the one script and the one style sheet by their digests, so that nothing else in
it could run either.
"""

import base64
import hashlib
import io
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from PIL import Image

from ditkit_core.data.media import image as still
from ditkit_core.diagnostics.report.charts import figure
from ditkit_core.diagnostics.report.data import Drawing, Section, read_sections
from ditkit_core.diagnostics.report.html import Html, element
from ditkit_core.diagnostics.report.sections import charts, key_numbers, tables
from ditkit_core.errors import UserError
from ditkit_core.io.files import write_text
from ditkit_core.io.run_dir import RunFolder

_PICTURE_SIZE = (1280, 1280)
"""What an embedded picture is made to fit in, in pixels."""
_PICTURE_BYTES = 400_000
"""What one takes at most."""


def write_report(folder: Path) -> Path:
    """Write the report of a run's folder anew, whole or not at all.

    Returns:
        The page.

    Raises:
        UserError: If the folder holds no run, or the page cannot be written.
    """
    path = RunFolder(Path(folder)).report
    write_text(path, page(Path(folder).resolve().name, read_sections(folder)))
    return path


def page(name: str, sections: Sequence[Section]) -> str:
    """The page.

    Args:
        name: The run's.
        sections: Its parts, at least one.
    """
    style, script = (
        files("ditkit_core.diagnostics.report").joinpath(f"report.{end}").read_text(encoding="utf-8")
        for end in ("css", "js")
    )
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{name}: report"),
        Html(f"<style>{style}</style>"),
    )
    written = datetime.now(UTC).isoformat(" ", "seconds").replace("+00:00", " UTC")
    body = element(
        "body",
        element("h1", name),
        element("p", f"Written {written}."),
        element("main", *(_section(section, number) for number, section in enumerate(sections))),
        Html(f'<script type="application/json" id="numbers">{_numbers(sections)}</script>'),
        Html(f"<script>{script}</script>"),
    )
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _numbers(sections: Sequence[Section]) -> str:
    """As JSON that can stand in a script element: nothing in it can end one."""
    text = json.dumps({"sections": [section.to_json() for section in sections]}, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _section(section: Section, number: int) -> Html:
    parts: list[Html] = [element("h2", section.name)] if section.name else []
    if section.series:
        parts += [element("p", _state(section)), key_numbers(section)]
    for title, drawn in charts(section):
        frames = [figure(chart, section=number) for chart in drawn]
        parts += [element("h3", title), element("div", *frames, class_="charts")]
    for title, drawings in (("Samples", section.drawings), ("Drawn by hand", section.by_hand)):
        if drawings:
            parts += [element("h3", title), *map(_drawing, drawings)]
    return element("section", *parts, *tables(section), data_name=section.name)


def _state(section: Section) -> str:
    steps = section.config.get("train.steps")
    if section.completed is not None and section.completed >= section.step:
        return f"Complete at step {section.completed}."
    return f"At step {section.step}" + (f" of {steps}." if isinstance(steps, int) else ".")


def _drawing(drawing: Drawing) -> Html:
    """Samples: what shows all of them, and what was asked for."""
    asked = [
        element(
            "li",
            element("span", str(each.get("prompt", "")), dir="auto"),
            f" (seed {each.get('seed')}, {each.get('file')})",
        )
        for each in drawing.samples
    ]
    title = drawing.title
    prompts = element("details", element("summary", "Prompts, row by row"), element("ol", *asked))
    try:
        source = picture(drawing.picture)
    except UserError as error:
        return element("figure", element("figcaption", element("strong", title)), element("p", str(error)), prompts)
    alternative = f"{title}: " + "; ".join(str(each.get("prompt", "")) for each in drawing.samples)
    return element(
        "figure",
        element("figcaption", element("strong", title)),
        element("img", src=source, alt=alternative, loading="lazy"),
        prompts,
    )


def picture(path: Path) -> str:
    """A picture as a data address, made smaller until it takes little.

    Raises:
        UserError: If it cannot be read.
    """
    image = Image.fromarray(still.read(path))
    image.thumbnail(_PICTURE_SIZE)
    for quality in (80, 60, 40, 20, 10):
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=quality)
        if buffer.tell() <= _PICTURE_BYTES:
            break
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
