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

RELOAD_SECONDS = 20
"""Time after which a page is loaded again while its run trains; reading one of 20 MB from a disk takes much less."""


def write_report(folder: Path) -> Path:
    """Write the report of a run's folder atomically, replacing an older one."""
    path = RunFolder(Path(folder)).report
    write_text(path, report_page(path.parent, read_sections(folder)))
    return path


def report_page(folder: Path, sections: Sequence[Section], served: Html | None = None) -> str:
    """Build the page.

    Args:
        folder: The folder that it is written into; its name is the title.
        sections: The sections of the run, at least one.
        served: What a page that is sent by a server shows below its top; it loads its samples from there. None for a file.
    """
    name, now = folder.resolve().name, datetime.now(UTC)
    reload = RELOAD_SECONDS if _is_training(folder, is_served=served is not None) else None
    date_line = f"Written {now.isoformat(' ', 'seconds').replace('+00:00', ' UTC')}"
    date_line += ". This page reloads itself until the run is complete." if reload else "."
    header = [element("h1", name), element("p", date_line)]
    return html_page(
        f"{name}: report",
        element("header", *header, data_reload=reload, data_written=int(now.timestamp()) if reload else None),
        element(
            "main",
            *(overview(section) for section in sections if section.series),
            *([] if served is None else [served]),
            *samples_part(sorted(sections, key=lambda section: bool(section.name)), folder, embeds=served is None),
            *(_numbers(section, index) for index, section in enumerate(sections)),
        ),
        json_script({"sections": [section.to_json() for section in sections]}, id="numbers"),
        is_served=served is not None,
        script=files("ditkit_core.diagnostics.report").joinpath("report.js").read_text(encoding="utf-8"),
    )


def _is_training(folder: Path, *, is_served: bool) -> bool:
    """Whether a process trains in the folder, or was killed there, and the run is not complete. One that is watched may still begin to."""
    run = RunFolder(folder)
    return (is_served or bool(run.owner())) and run.completed_step() is None


def _numbers(section: Section, index: int) -> Html:
    """The charts and tables of a section."""
    heading = [element("h2", section.name)] if section.name else []
    section_groups = groups(section)
    parts = [_group(group, index) for group in section_groups if not group.is_folded]
    folded = [_group(group, index) for group in section_groups if group.is_folded]
    return element(
        "section",
        *heading,
        *parts,
        constants(section, section_groups),
        *folded,
        *tables(section),
        data_name=section.name,
    )


def _group(group: Group, index: int) -> Html:
    charts = element("div", *(chart_figure(chart, section=index) for chart in group.charts), class_="charts")
    title = [group.title, *([element("small", group.note)] if group.note else [])]
    if group.is_folded:
        return element("details", element("summary", *title), charts)
    return element("div", element("h2", *title), charts)
