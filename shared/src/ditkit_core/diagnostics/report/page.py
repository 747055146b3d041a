"""report.html: a run on one page."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ditkit_core.diagnostics.embedded import MEDIA_BYTES, PageMedia
from ditkit_core.diagnostics.report.data import Section, read_sections
from ditkit_core.diagnostics.report.overview import overview
from ditkit_core.diagnostics.report.samples import files_by_importance, samples_parts
from ditkit_core.diagnostics.report.sections import constants, groups, tables
from ditkit_core.documents.html import html_page, json_script, page_text
from ditkit_core.io.files import write_text
from ditkit_core.io.run_dir import RunFolder

RELOAD_SECONDS = 20
"""Time after which a page is loaded again while its run trains; reading one of 20 MB from a disk
takes much less."""


def write_report(folder: Path) -> Path:
    """Write the report of a run's folder atomically, replacing an older one."""
    path = RunFolder(Path(folder)).report
    write_text(path, report_page(path.parent, read_sections(folder)))
    return path


def report_page(
    folder: Path, sections: Sequence[Section], logs: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Build the page.

    Args:
        folder: The folder that it is written into; its name is the title.
        sections: The sections of the run, at least one.
        logs: Last lines by name, which a page shows that is sent by a server; it loads its samples
            from there. None for a file.
    """
    name, now = folder.resolve().name, datetime.now(UTC)
    by_name = sorted(sections, key=lambda section: bool(section.name))
    media = PageMedia(folder, at_most=MEDIA_BYTES, embeds=logs is None)
    for file in files_by_importance(by_name):
        media.add(file)
    return html_page(
        "diagnostics/report/page.html",
        title=f"{name}: report",
        script=page_text("documents/strips.js", "diagnostics/report/report.js"),
        is_served=logs is not None,
        name=name,
        now=now,
        reload=RELOAD_SECONDS if _is_training(folder, is_served=logs is not None) else None,
        overviews=[overview(section) for section in sections if section.series],
        sections=[
            (section.name, drawn := groups(section), constants(section, drawn), tables(section))
            for section in sections
        ],
        logs=logs or {},
        samples=samples_parts(by_name, media),
        # A server sends no page that it did not make.
        sheet=_sheet(folder) if logs is None else "",
        numbers=json_script(
            {"sections": [section.to_json() for section in sections]}, id="numbers"
        ),
    )


def _sheet(folder: Path) -> str:
    """The address of the run's sheet in a page next to it; empty if there is none."""
    page = RunFolder(folder).sheet_page
    return page.relative_to(folder).as_posix() if page.is_file() else ""


def _is_training(folder: Path, *, is_served: bool) -> bool:
    """Whether a process trains in the folder, or was killed there, and the run is not complete. One
    that is watched may still begin to."""
    run = RunFolder(folder)
    return (is_served or bool(run.owner())) and run.completed_step() is None
