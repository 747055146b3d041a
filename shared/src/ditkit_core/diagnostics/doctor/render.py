"""The doctor's report as a document."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

from ditkit_core.config.sizes import GIB
from ditkit_core.diagnostics.doctor.findings import (
    CODES,
    BucketRow,
    CheckReport,
    FileRow,
    Finding,
    MemoryPlan,
    StepRow,
    check_json,
    grouped,
    one_line,
)
from ditkit_core.diagnostics.embedded import PageMedia
from ditkit_core.diagnostics.report.words import plural
from ditkit_core.documents.document import Document, Media, Section, Strip, Text
from ditkit_core.documents.tables import Table

_MOST_OF_CODE = 8
"""Largest number of findings of one code and severity to print."""
_ORDER = ("error", "warning", "note")
_MOST_PICTURES = 60
"""Largest number of files that the page shows."""
_PICTURE_BYTES = 2_400_000
"""Largest total size of their thumbnails: 3.2 MB in base64, as 60 of the largest take."""


def check_document(checkup: CheckReport, folder: Path) -> Document:
    """The report; `folder` is the one that its page is written into, which links begin at.

    A terminal lists findings in groups at the end. The page lists each of them first, and has the
    pictures and the tables that may be long.
    """
    verdict = check_verdict(checkup)
    return Document(
        title=f"{checkup.model}: check",
        heading=f"{checkup.model}: {verdict}",
        sections=list(_sections(checkup, folder)),
        closing=[*_finding_lines(checkup.findings), verdict],
        values=check_json(checkup),
    )


def _finding_lines(findings: Sequence[Finding]) -> Iterator[str]:
    for severity in _ORDER:
        groups = grouped([finding for finding in findings if finding.severity == severity])
        # Limited per code: a finding about every file must not hide the others.
        for code in dict.fromkeys(group[0].code for group in groups):
            its = [group for group in groups if group[0].code == code]
            yield from (f"{severity}: {one_line(group)}" for group in its[:_MOST_OF_CODE])
            if more := sum(map(len, its[_MOST_OF_CODE:])):
                yield f"{severity}: {code} and {more} more, which are in the files"


def check_verdict(checkup: CheckReport) -> str:
    """The last line: whether the run can be trained, and the number of findings."""
    counts = {
        severity: sum(finding.severity == severity for finding in checkup.findings)
        for severity in _ORDER
    }
    counted = ", ".join(plural(count, severity) for severity, count in counts.items() if count)
    numbers = f" ({counted})" if counted else ""
    return f"{'can be trained' if checkup.trainable else 'cannot be trained as it is'}{numbers}; checked in {checkup.seconds:.0f} s"


def _sections(checkup: CheckReport, folder: Path) -> Iterator[Section]:
    findings = sorted(
        checkup.findings, key=lambda finding: (_ORDER.index(finding.severity), finding.code)
    )
    yield Table(
        head=["code", "", "where", "what", "how to fix it"],
        rows=[
            [finding.code, finding.severity, finding.where, finding.observation, finding.remedy]
            for finding in findings
        ],
        row_classes=[finding.severity for finding in findings],
        linked=2,
        only="page",
    )
    yield _buckets(checkup)
    if files := checkup.files:
        yield _pictures(files, findings, folder)
        names = [(row.file, Path(row.file).name, *row.ids) for row in files]
        yield replace(_of_rows(files), title="files", names=names, only="page")
    if checkup.excluded:
        title = f"not trained on: {len(checkup.excluded)}"
        rows = [
            [entry.name, entry.reason, "stops the run" if entry.stops else "left out"]
            for entry in checkup.excluded
        ]
        yield Text(title=title, only="terminal")  # which has them among the findings
        names = [(entry.name,) for entry in checkup.excluded]
        head = ["file", "reason", ""]
        yield Table(title=title, head=head, rows=rows, names=names, only="page")
    if (captions := checkup.captions) is not None:
        cut = (
            "length not checked"
            if captions.cut is None
            else f"{len(captions.cut)} too long for the text encoder"
        )
        counted = f"captions: {captions.count}, {captions.distinct} different"
        yield Text(title=f"{counted}, {captions.empty} empty, {cut}")
        if captions.cut:
            head = ["sample", "tokens cut", "text that is read"]
            rows = [[cut.sample, str(cut.tokens), cut.kept] for cut in captions.cut]
            yield Table(title="truncated captions", head=head, rows=rows, linked=0, only="page")
    if masks := checkup.masks:
        ends = dict.fromkeys(f"{100 * share:.0f} %" for share in (min(masks), max(masks)))
        learnt = f"{' to '.join(ends)} of their pixels learnt in full"
        yield Text(title=f"loss masks: {plural(len(masks), 'sample')}, {learnt}")
    for title, groups in {"same content": checkup.same, "nearly alike": checkup.alike}.items():
        if groups:
            rows = [[", ".join(group)] for group in groups]
            yield Table(title=title, head=["samples"], rows=rows, linked=0, only="page")
    if checkup.memory is not None:
        yield _memory(checkup.memory)
    yield from map(_step, checkup.steps)
    codes = {finding.code for finding in findings}
    rows = [[code, about] for code, about in CODES.items() if code in codes]
    yield Table(title="codes", head=["code", "about"], rows=rows, only="page")


def _pictures(files: Sequence[FileRow], findings: Sequence[Finding], folder: Path) -> Media:
    """The files with the codes of their findings, those with findings first."""
    codes = defaultdict[str, list[str]](list)
    for finding in findings:
        for name in {finding.where, *finding.where.split(", ")}:
            codes[name].append(finding.code)
    notes = {
        row.file: list(dict.fromkeys(code for name in (row.file, *row.ids) for code in codes[name]))
        for row in files
    }
    shown = sorted(notes, key=lambda file: not notes[file])[:_MOST_PICTURES]
    media = PageMedia(folder, at_most=_PICTURE_BYTES, thumbnails=True)
    tiles = [media.tile(Path(file), Path(file).name, file, notes[file]) for file in shown]
    more = [f"and {len(notes) - len(shown)} more, in the table of files"]
    lines = more if len(notes) > len(shown) else []
    return Media(title="pictures", strips=[Strip(tiles=tiles)], lines=lines)


def _buckets(checkup: CheckReport) -> Table:
    total = sum(row.micro_batches or 0 for row in checkup.buckets)
    epoch = f", {plural(total, 'micro-batch')} in an epoch" if total else ""
    kept, dropped = checkup.kept, checkup.dropped
    frames = f"; {kept} frames are used, {dropped} are not" if kept + dropped else ""
    classes = f" and {plural(checkup.class_images, 'class image')}" if checkup.class_images else ""
    of = f"{plural(checkup.samples, 'sample')}{classes} of {plural(len(checkup.files), 'file')}"
    title = f"{checkup.model}: {of}{epoch}{frames}"
    return replace(_of_rows(checkup.buckets), title=title)


def _of_rows(rows: Sequence[BucketRow | FileRow]) -> Table:
    """A table with a column for each field, except fields that say nothing about any row: ten
    columns do not fit a terminal."""
    names = [field.name for field in fields(rows[0]) if field.name != "ids"] if rows else []
    names = [
        name
        for name in names
        if name not in _USUAL or any(getattr(row, name) != _USUAL[name] for row in rows)
    ]
    cells = [[_cell(row, name) for name in names] for row in rows]
    return Table(head=[_TITLES.get(name, name) for name in names], rows=cells)


_USUAL = {
    "dataset": "data",
    "references": 0,
    "held_out": 0,
    "seconds": 0,
    "fps": 0,
    "trained_fps": 0,
    "enlarged": 1,
}
"""By field, the value that says nothing: images have no rate, and most runs neither references nor
class images."""
_TITLES = {
    "held_out": "held out",
    "tokens": "tokens each",
    "batch_size": "batch size",
    "micro_batches": "micro-batches",
    "trained_fps": "trained at",
}
_SHOWN = {"seconds": "{:.2f}", "fps": "{:.3g}", "trained_fps": "{:g}", "enlarged": "×{:.2f}"}


def _cell(row: BucketRow | FileRow, name: str) -> str:
    value = getattr(row, name)
    if name == "micro_batches" and row.dataset == "prior" or name == "enlarged" and value == 1:
        return ""
    return "?" if value is None else _SHOWN.get(name, "{}").format(value)


def _memory(plan: MemoryPlan) -> Table | Text:
    if plan.fits is None:
        return Text(title=f"fits: not planned: {plan.why_not}")
    rows = []
    for row in plan.devices:
        free = row.total - row.reserve - row.peak
        sizes = [f"{size / GIB:.2f}" for size in (row.peak, row.reserve, row.total, max(0, free))]
        rows.append([row.device, *sizes, "fits" if row.fits else f"lacks {-free / GIB:.2f}"])
    return Table(
        title=f"fits: {'yes' if plan.fits else 'no'}, as planned for {plan.batch}",
        head=["GiB", "planned peak", "reserve", "total", "free", ""],
        rows=rows,
    )


def _step(row: StepRow) -> Table:
    size = (
        f"{row.frames} frames of {row.height}x{row.width}"
        if row.frames > 1
        else f"{row.height}x{row.width}"
    )
    expert = f" with the {row.expert} expert" if row.expert else ""
    title = f"tried{expert}: {len(row.samples)} x {size}, {row.tokens} tokens, two steps in {row.seconds:.1f} s"
    measured = {
        "loss": ", ".join(f"{loss:.4f}" for loss in row.losses),
        "gradient norm": ", ".join(f"{norm:.3g}" for norm in row.grad_norms),
        "parameters with a gradient": f"{row.parameters - len(row.without_gradient)} of {row.parameters}",
        "a save": {
            True: "bitwise identical when read back",
            False: "differs when read back",
            None: "not made",
        }[row.reloaded],
        "highest memory": f"{row.peak_bytes / GIB:.2f} GiB",
    }
    return Table(title=title, rows=[[name, text] for name, text in measured.items()])
