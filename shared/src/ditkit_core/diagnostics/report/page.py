"""report.html: a run on one page."""

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from ditkit_core.diagnostics.rendering import Html, element, html_page, json_script
from ditkit_core.diagnostics.report.charts import chart_figure
from ditkit_core.diagnostics.report.data import Section, read_sections
from ditkit_core.diagnostics.report.overview import overview
from ditkit_core.diagnostics.report.samples import samples_part
from ditkit_core.diagnostics.report.sections import Group, constants, groups, tables
from ditkit_core.io.files import write_text
from ditkit_core.io.run_dir import RunFolder


def write_report(folder: Path) -> Path:
    """Write the report of a run's folder atomically, replacing an older one.

    Raises:
        UserError: If the folder contains no run, or the page cannot be written.
    """
    path = RunFolder(Path(folder)).report
    write_text(path, report_page(path.parent, read_sections(folder)))
    return path


def report_page(folder: Path, sections: Sequence[Section]) -> str:
    """Build the page.

    Args:
        folder: The folder that it is written into; its name is the title.
        sections: The sections of the run, at least one.
    """
    name = folder.resolve().name
    written = datetime.now(UTC).isoformat(" ", "seconds").replace("+00:00", " UTC")
    return html_page(
        f"{name}: report",
        element("header", element("h1", name), element("p", f"Written {written}.")),
        element(
            "main",
            *(overview(section) for section in sections if section.series),
            *samples_part(sorted(sections, key=lambda each: bool(each.name)), folder),
            *(_numbers(section, index) for index, section in enumerate(sections)),
        ),
        json_script({"sections": [section.to_json() for section in sections]}, id="numbers"),
        script=files("ditkit_core.diagnostics.report").joinpath("report.js").read_text(encoding="utf-8"),
    )


def _numbers(section: Section, index: int) -> Html:
    """The charts and tables of a section."""
    heading = [element("h2", section.name)] if section.name else []
    shown = groups(section)
    parts = [_group(group, index) for group in shown if not group.is_folded]
    folded = [_group(group, index) for group in shown if group.is_folded]
    return element(
        "section", *heading, *parts, constants(section, shown), *folded, *tables(section), data_name=section.name
    )


def _group(group: Group, index: int) -> Html:
    charts = element("div", *(chart_figure(chart, section=index) for chart in group.charts), class_="charts")
    title = [group.title, *([element("small", group.note)] if group.note else [])]
    if group.is_folded:
        return element("details", element("summary", *title), charts)
    return element("div", element("h2", *title), charts)
