"""report.html: a run on one page."""

import base64
import io
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from PIL import Image

from ditkit_core.data.media import image as still
from ditkit_core.diagnostics.rendering import Html, element, html_page, json_script
from ditkit_core.diagnostics.report.charts import chart_figure
from ditkit_core.diagnostics.report.data import GeneratedSheet, Section, read_sections
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
    write_text(path, report_page(Path(folder).resolve().name, read_sections(folder)))
    return path


def report_page(name: str, sections: Sequence[Section]) -> str:
    """The page.

    Args:
        name: The run's.
        sections: Its parts, at least one.
    """
    written = datetime.now(UTC).isoformat(" ", "seconds").replace("+00:00", " UTC")
    return html_page(
        f"{name}: report",
        element("h1", name),
        element("p", f"Written {written}."),
        element("main", *(_section(section, number) for number, section in enumerate(sections))),
        json_script({"sections": [section.to_json() for section in sections]}, id="numbers"),
        script=files("ditkit_core.diagnostics.report").joinpath("report.js").read_text(encoding="utf-8"),
    )


def _section(section: Section, number: int) -> Html:
    parts: list[Html] = [element("h2", section.name)] if section.name else []
    if section.series:
        parts += [element("p", _state(section)), key_numbers(section)]
    for title, drawn in charts(section):
        frames = [chart_figure(chart, section=number) for chart in drawn]
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


def _drawing(drawing: GeneratedSheet) -> Html:
    """Samples: what shows all of them, and what was asked for."""
    asked = [
        element(
            "li",
            element("span", str(each.get("prompt", "")), dir="auto"),
            f" (seed {each.get('seed')}, {each.get('file')})",
        )
        for each in drawing.samples
    ]
    parts = [element("figcaption", element("strong", drawing.title))]
    try:
        alternative = f"{drawing.title}: " + "; ".join(str(each.get("prompt", "")) for each in drawing.samples)
        parts.append(element("img", src=embedded_image(drawing.picture), alt=alternative, loading="lazy"))
    except UserError as error:
        parts.append(element("p", str(error)))
    prompts = element("details", element("summary", "Prompts, row by row"), element("ol", *asked))
    return element("figure", *parts, prompts)


def embedded_image(path: Path) -> str:
    """A picture as a data address, made smaller until it takes little.

    Raises:
        UserError: If it cannot be read.
    """
    image = Image.fromarray(still.read_image(path))
    image.thumbnail(_PICTURE_SIZE)
    # So that a page of many images can still be sent to somebody.
    for quality in (80, 60, 40, 20, 10):
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=quality)
        if buffer.tell() <= _PICTURE_BYTES:
            break
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
