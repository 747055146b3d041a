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
"""Largest width and height of an embedded image, in pixels."""
_PICTURE_BYTES = 400_000
"""Largest size of an embedded image: a page with many images must still be small enough to send."""


def write_report(folder: Path) -> Path:
    """Write the report of a run's folder atomically, replacing an older one.

    Returns:
        The path of the page.

    Raises:
        UserError: If the folder contains no run, or the page cannot be written.
    """
    path = RunFolder(Path(folder)).report
    write_text(path, report_page(Path(folder).resolve().name, read_sections(folder)))
    return path


def report_page(name: str, sections: Sequence[Section]) -> str:
    """Build the page.

    Args:
        name: Name of the run.
        sections: Its sections, at least one.
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
    for title, group in charts(section):
        figures = [chart_figure(chart, section=number) for chart in group]
        parts += [element("h3", title), element("div", *figures, class_="charts")]
    for title, sheets in (("Samples", section.drawings), ("Samples of the sample command", section.by_hand)):
        if sheets:
            parts += [element("h3", title), *map(_sheet, sheets)]
    return element("section", *parts, *tables(section), data_name=section.name)


def _state(section: Section) -> str:
    steps = section.config.get("train.steps")
    if section.completed is not None and section.completed >= section.step:
        return f"Complete at step {section.completed}."
    return f"At step {section.step}" + (f" of {steps}." if isinstance(steps, int) else ".")


def _sheet(sheet: GeneratedSheet) -> Html:
    """The image that shows all samples, and their prompts."""
    prompts = [
        element(
            "li",
            element("span", str(each.get("prompt", "")), dir="auto"),
            f" (seed {each.get('seed')}, {each.get('file')})",
        )
        for each in sheet.samples
    ]
    parts = [element("figcaption", element("strong", sheet.title))]
    try:
        alternative = f"{sheet.title}: " + "; ".join(str(each.get("prompt", "")) for each in sheet.samples)
        parts.append(element("img", src=embedded_image(sheet.picture), alt=alternative, loading="lazy"))
    except UserError as error:  # one damaged image must not prevent the report
        parts.append(element("p", str(error)))
    details = element("details", element("summary", "Prompts, row by row"), element("ol", *prompts))
    return element("figure", *parts, details)


def embedded_image(path: Path) -> str:
    """An image as a data URL, with lower quality until it is small enough.

    Raises:
        UserError: If the image cannot be read.
    """
    image = Image.fromarray(still.read_image(path))
    image.thumbnail(_PICTURE_SIZE)
    # Quality before size: a sample should stay large enough to judge it.
    for quality in (80, 60, 40, 20, 10):
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=quality)
        if buffer.tell() <= _PICTURE_BYTES:
            break
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
