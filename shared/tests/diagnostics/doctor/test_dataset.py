"""The doctor's findings as values: codes that stay, JSON that stays, a page that holds whatever
files are called."""

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console

from ditkit_core.data.buckets import cut_share, resolutions_of, size_of
from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Sample
from ditkit_core.data.media.clip import MediaInfo
from ditkit_core.diagnostics.doctor.captions import check_captions, count_captions
from ditkit_core.diagnostics.doctor.findings import (
    CODES,
    BucketRow,
    CaptionRow,
    CheckReport,
    CutCaption,
    DeviceRow,
    Excluded,
    FileRow,
    Finding,
    MemoryPlan,
    Severity,
    StepRow,
    check_json,
)
from ditkit_core.diagnostics.doctor.media import WindowLook
from ditkit_core.diagnostics.doctor.render import check_document, check_verdict
from ditkit_core.diagnostics.doctor.rules import (
    MOSTLY_KEPT,
    UPSCALED,
    check_buckets,
    check_coverage,
    check_crops,
    check_duplicates,
    check_excluded,
    check_file,
    check_frames,
    file_row,
    less_enlarged,
    same_content,
)
from ditkit_core.io import console
from ditkit_core.io.run_dir import CHECKS
from ditkit_core.run.config import RunConfig

DOCS = Path(__file__).parents[4] / "docs" / "doctor.md"
HOSTILE = '<script>alert("x")</script>&\'[bold]{0}'


def sample(
    id: str = "a", captions: tuple[str, ...] = ("a clip",), frames: int = 9, start: float = 0.0
) -> Sample:
    return Sample(
        id=id,
        media=Path(f"{id}.mp4"),
        captions=captions,
        frames=frames,
        height=64,
        width=64,
        start_seconds=start,
    )


def info(seconds: float = 2.0, fps: float = 24.0, height: int = 64, width: int = 64) -> MediaInfo:
    return MediaInfo(kind="video", width=width, height=height, seconds=seconds, fps=fps)


def a_look(**changes: object) -> WindowLook:
    plain = {
        "frames": 9,
        "cuts": (),
        "blank": 0,
        "is_black": False,
        "is_still": False,
        "frozen_seconds": 0.0,
    }
    return WindowLook(**{**plain, "fingerprint": None, **changes})  # type: ignore[arg-type]


def codes(findings: object) -> list[str]:
    return [finding.code for finding in findings]  # type: ignore[attr-defined]


def a_checkup() -> CheckReport:
    return CheckReport(
        model="toy", samples=3, fps=16.0, seconds=2.5,
        buckets=(
            BucketRow(frames=9, height=64, width=64, references=0, samples=3, held_out=1, tokens=48,
            batch_size=2, micro_batches=1),
            BucketRow(frames=1, height=64, width=32, references=1, samples=1, held_out=0,
            tokens=None, batch_size=None, micro_batches=None),
        ),
        files=(
            FileRow(
                file=HOSTILE, samples=2, seconds=2.0, fps=23.976, trained_fps=16.0, frames=32,
                kept=9, dropped=23, height=64, width=64,
                enlarged=1.5,
            ),
        ),
        excluded=(Excluded(name=HOSTILE, reason=f"{HOSTILE} is empty; remove it", stops=True),),
        captions=CaptionRow(count=3, distinct=2, empty=0, cut=(CutCaption(sample=HOSTILE, tokens=7,
        kept=HOSTILE),)),
        same=(("a", HOSTILE),), alike=(("a", "c"),),
        memory=MemoryPlan(
            batch="2 x 64x64", fits=False,
            devices=(DeviceRow(device=HOSTILE, peak=3 * 2**30, reserve=2**30, total=2**31,
            fits=False),),
        ),
        steps=(StepRow(
            expert="", frames=9, height=64, width=64, samples=("a", HOSTILE), tokens=96,
            losses=(1.0, 0.5), grad_norms=(2.0, 3.0), parameters=4,
            without_gradient=("x",), reloaded=True, peak_bytes=2.0**30, seconds=1.0,
        ),),
        findings=(
            Finding(code="D02", severity="error", where=HOSTILE, observation="it is empty",
            remedy="remove it"),
            Finding(code="D06", severity="warning", where=HOSTILE, observation="a cut",
            remedy="cut it"),
            Finding(code="D20", severity="note", where="", observation="not tried", remedy=""),
        ),
    )  # fmt: skip


def show(checkup: CheckReport) -> None:
    check_document(checkup, Path()).show()


def page_of(checkup: CheckReport) -> str:
    return check_document(checkup, Path()).page()


def test_the_tables_show_every_word_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(
        console, "CONSOLE", Console(file=shown, force_terminal=True, color_system=None, width=80)
    )
    plain, edited = a_checkup().buckets
    prior = replace(edited, dataset="prior", frames=81, height=480, width=832)
    for buckets in ((plain,), (plain, edited), (plain, prior)):
        shown.truncate(0)
        show(replace(a_checkup(), buckets=buckets))
        text = shown.getvalue()
        assert "…" not in text.split("not trained on")[0]
        assert all(
            word in text for word in ("frames", "height", "width", "samples", "micro-batches")
        )
        assert ("references" in text) is (len(buckets) > 1) and ("dataset" in text) is (
            prior in buckets
        )


def test_every_code_is_in_the_docs_with_its_meaning_and_no_other() -> None:
    listed = dict(
        re.findall(r"^\| (D\d\d) \| ([^|]+?) \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert listed == dict(CODES)


def test_json_has_these_keys() -> None:
    checkup = replace(a_checkup(), class_images=1)
    found = json.loads(json.dumps(check_json(checkup), allow_nan=False))
    assert set(found) == {
        "schema", "trainable", "model", "samples", "class_images", "fps", "buckets", "files",
        "excluded", "captions", "same", "alike", "memory", "steps", "findings",
        "seconds", "frames", "masks", "class_pictures",
    }  # fmt: skip
    assert (
        found["schema"] == 1
        and found["trainable"] is False
        and found["frames"] == {"kept": 9, "dropped": 23}
    )
    assert found["class_images"] == found["class_pictures"] == 1
    assert set(found["findings"][0]) == {
        "code",
        "severity",
        "where",
        "what",
        "remedy",
        "settings",
    }
    assert set(found["excluded"][0]) == {"name", "reason", "stops"}
    assert set(found["captions"]) == {"count", "distinct", "empty", "cut"}
    listed = DOCS.read_text(encoding="utf-8")
    assert all(f"`{key}`" in listed for key in found), "docs/doctor.md says what each key is"


class Page(HTMLParser):
    """Collects tags, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_holds_any_name_and_needs_nothing_else(tmp_path: Path) -> None:
    document = check_document(a_checkup(), tmp_path)
    files = document.write(tmp_path / CHECKS[0])
    assert [file.name for file in files] == ["check.json", "check.html"]
    made = files[1].read_text(encoding="utf-8")
    assert made == document.page()
    found = Page()
    found.feed(made)
    assert (
        not found.open
        and "script" not in found.tags
        and all(link.startswith("#row-") for link in found.links)
        and "http:" not in made
    )
    assert found.text.count(HOSTILE) >= 4
    assert check_verdict(a_checkup()) in "".join(found.text)


def test_a_phone_shows_a_finding_below_its_code_and_not_outside_of_the_screen() -> None:
    """The sentences say what to do; a table of five columns had them right of a phone's screen."""
    (style,) = re.findall("<style>(.*?)</style>", page_of(a_checkup()), re.DOTALL)
    (narrow,) = re.findall(r"@media \(max-width: 40rem\) \{(.*?)\n\}", style, re.DOTALL)
    rows = re.findall(r"tr:is\(([^)]*)\) td \{ display: block;", narrow)
    assert rows == [", ".join(f".{severity}" for severity in get_args(Severity))]


def test_a_page_of_nothing_is_a_page() -> None:
    found = Page()
    found.feed(page_of(CheckReport(model="toy", samples=0, fps=8.0)))
    assert not found.open and "toy: can be trained; checked in 0 s" in "".join(found.text)


def test_what_is_printed_lists_tables_and_findings(capsys: pytest.CaptureFixture[str]) -> None:
    show(a_checkup())
    said = capsys.readouterr().out
    assert (
        "toy: 3 samples of 1 file, 1 micro-batch in an epoch; 9 frames are used, 23 are not" in said
    )
    row = next(line for line in said.splitlines() if line.strip().startswith("9  "))
    assert row.split() == ["9", "64", "64", "0", "3", "1", "48", "2", "1"]
    assert f"warning: D06 {HOSTILE}: a cut; cut it" in said and "not tried" in said
    row = next(line for line in said.splitlines() if line.startswith(HOSTILE) and "lacks" in line)
    assert row.removeprefix(HOSTILE).split() == ["3.00", "1.00", "2.00", "0.00", "lacks", "2.00"]
    assert "captions: 3, 2 different, 0 empty, 1 too long for the text encoder" in said
    assert (
        said.splitlines()[-1]
        == "cannot be trained as it is (1 error, 1 warning, 1 note); checked in 2 s"
    )


def test_many_findings_are_counted_and_not_all_printed(capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        Finding(
            code="D07",
            severity="warning",
            where=f"clip {i}",
            observation=f"black {chr(65 + i)}",
            remedy="",
        )
        for i in range(50)
    ]
    last = Finding(code="D14", severity="warning", where="z", observation="too long", remedy="")
    show(CheckReport(model="toy", samples=50, fps=8.0, findings=(*found, last)))
    said = capsys.readouterr().out
    assert said.count("black") == 8 and "warning: D07 and 42 more, which are in the files" in said
    assert "warning: D14 z: too long" in said, "one thing of every file does not hide another"


def test_findings_that_repeat_are_one_line_with_the_smallest_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = [
        Excluded(
            name=f"{i}.mp4",
            reason=f"/x/{i}.mp4 has {i + 8} frames, but data.frames asks for 81; set data.frames = {i}",
            stops=True,
        )
        for i in (3, 1, 2)
    ]
    blank = [
        Finding("D08", f"clip {i}", "nothing moves in its 9 frames", "remove it") for i in range(9)
    ]
    findings = (*check_excluded(short), *blank, Finding("D08", "z", "another text", "remove it"))
    show(CheckReport(model="toy", samples=1, fps=8.0, excluded=tuple(short), findings=findings))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "toy: 1 sample of 0 files" and "not trained on: 3" in said
    asked = "but data.frames asks for 81; set data.frames = 1"
    assert said[-4:] == [
        f'error: D02 /x/1.mp4 has 9 frames, {asked}, or leave it out: data.on_bad = "skip" (and 2 more: 2.mp4, 3.mp4)',
        (
            "warning: D08 clip 0: nothing moves in its 9 frames; remove it (and 8 more: clip 1, clip "
            "2, clip 3, clip 4, clip 5 and 3 more)"
        ),
        "warning: D08 z: another text; remove it",
        "cannot be trained as it is (3 errors, 10 warnings); checked in 0 s",
    ]


def test_the_page_does_not_break_words_in_tables() -> None:
    rules = re.findall(
        r"(?m)^([^{}@]+) \{([^}]*)\}", page_of(CheckReport(model="toy", samples=0, fps=8.0))
    )
    of_cells = [style for names, style in rules if "td" in re.split(r"[ ,]+", names)]
    assert any("overflow-wrap: normal" in style for style in of_cells)
    numbers = [style for names, style in rules if names == "td.n"]
    assert "white-space: nowrap" in "".join(numbers), "1.5e-03 breaks behind its minus"
    assert not any(
        "overflow-wrap: anywhere" in style or "word-break" in style for style in of_cells
    )


def test_frames_of_windows_that_overlap_are_counted_once() -> None:
    row = file_row(
        "a",
        info(seconds=2.0),
        [sample(), sample("a #1", start=0.25), sample("a #2", start=1.0)],
        16.0,
    )
    assert (row.frames, row.kept, row.dropped) == (32, 22, 10)
    still = MediaInfo(kind="image", width=32, height=64, seconds=0.0, fps=0.0)
    row = file_row("a.png", still, [sample(frames=1)], 16.0)
    assert (row.frames, row.kept, row.dropped, row.enlarged) == (1, 1, 0, 2.0)


def test_what_a_file_says() -> None:
    assert codes(check_file(file_row("a", info(0.6), [sample()], 16.0))) == []
    long, whole = (file_row("a", info(seconds), [sample()], 16.0) for seconds in (9.0, 0.6))
    (unused,) = check_coverage([long, whole, long])
    assert (
        unused.code == "D13"
        and unused.where == "2 of 3 files"
        and "18 of their 288 frames" in unused.observation
    )
    assert codes(check_coverage([whole])) == []
    (slow,) = check_file(file_row("a", info(0.6, fps=12.0), [sample()], 16.0))
    assert slow.code == "D12" and "set data.fps to 12 or less" in slow.remedy
    assert codes(check_file(file_row("a", info(0.6, fps=15.98), [sample()], 16.0))) == []
    assert codes(check_file(file_row("a", info(0.6, height=40), [sample()], 16.0))) == ["D11"]
    assert codes(check_file(file_row("a", info(0.6), [sample()], 16.0), is_hdr=True)) == ["D10"]


def test_what_is_cropped_by_more_than_a_quarter_is_named_once_a_file() -> None:
    portrait = replace(sample("portrait"), file_size=(1920, 1080), height=480, width=832)
    samples = [
        replace(portrait, id="portrait#1"),
        portrait,
        sample("unknown"),
        replace(sample("wide"), file_size=(64, 80)),
    ]
    (found,) = check_crops(samples, DataConfig(buckets=False, height=480, width=832), 16)
    assert (found.code, found.severity, found.where) == ("D32", "warning", "portrait.mp4")
    assert (
        found.observation
        == "68% of it is cut away: of 1080 x 1920 pixels the middle 1080 x 623 are trained, as 832 x 480"
    )
    assert 'data.buckets = "auto"' in found.remedy
    (found,) = check_crops(
        [replace(sample("long"), file_size=(100, 300))], DataConfig(height=512, width=512), 16
    )
    assert "67% of it is cut away: of 300 x 100 pixels the middle 100 x 100" in found.observation


@pytest.mark.parametrize(
    ("size", "settings", "keys"),
    [
        ((1920, 1080), {"buckets": False}, {"buckets": "auto"}),
        ((512, 1536), {}, {"max_aspect": 3.0}),
        ((80, 112), {"height": 64, "width": 64}, {"bucket_step": 16}),
        ((60, 180), {"height": 64, "width": 64}, {"max_aspect": 3.0, "bucket_step": 16}),
        ((100, 300), {"height": 64, "width": 64, "buckets": False}, {"buckets": "auto", "max_aspect": 3.0, "bucket_step": 16}),
        ((8000, 500), {}, {}),
        ((15, 50), {"height": 16, "width": 16}, {}),
    ],
)  # fmt: skip
def test_the_remedy_for_a_crop_names_the_fewest_keys_that_work(
    size: Any, settings: Any, keys: Any
) -> None:
    data = DataConfig(**{"height": 512, "width": 512, **settings})
    trained = size_of(*size, resolutions_of(data, 16))
    (found,) = check_crops(
        [replace(sample("a"), file_size=size, height=trained[0], width=trained[1])], data, 16
    )
    named = [
        f"data.{key} = {json.dumps(value) if isinstance(value, str) else f'{value:g}'}"
        for key, value in keys.items()
    ]
    assert found.remedy == (
        f"set {' and '.join(named)}, or crop it yourself" if named else "crop it yourself"
    )
    assert found.settings == (
        ({f"data.{key}": value for key, value in keys.items()},) if keys else ()
    )
    if keys:
        kept = size_of(*size, resolutions_of(replace(data, **keys), 16))
        assert cut_share(*size, kept) <= MOSTLY_KEPT


@pytest.mark.parametrize("size", [(60, 60), (48, 100), (200, 90), (500, 380), (40, 3000)])
@pytest.mark.parametrize(
    "settings",
    [
        {"height": 512, "width": 512},
        {"height": 512, "width": 512, "buckets": False},
        {"height": 480, "width": 832},
        {"height": 480, "width": 832, "buckets": False},
        {"height": 1024, "width": 1024, "resolutions": (512, 1024), "bucket_step": 16},
    ],
)
def test_the_remedy_for_an_upscaled_file_is_a_resolution_at_which_it_hardly_is(
    size: tuple[int, int], settings: Any
) -> None:
    data = DataConfig(frames=9, **settings)
    trained = size_of(*size, resolutions_of(data, 16))
    info = MediaInfo(kind="image", height=size[0], width=size[1], seconds=0.0, fps=0.0)
    samples = [replace(sample("a", frames=1), height=trained[0], width=trained[1])]
    row = file_row("a.png", info, samples, 16.0)
    lower = less_enlarged(row, data, 16)
    if row.enlarged <= UPSCALED:
        assert not lower
        return
    (finding,) = check_file(row, lower=lower)
    assert finding.settings == (lower,)
    changed = replace(data, **{key.removeprefix("data."): value for key, value in lower.items()})
    changed.check_steps(4, 16)
    now = size_of(*size, resolutions_of(changed, 16))
    assert max(now[0] / size[0], now[1] / size[1]) <= UPSCALED
    if "data.resolutions" in lower:  # others stay as they are
        assert size_of(2000, 2000, resolutions_of(changed, 16)) == size_of(
            2000, 2000, resolutions_of(data, 16)
        )


def test_no_resolution_is_named_for_a_file_that_is_smaller_than_any() -> None:
    info = MediaInfo(kind="image", height=8, width=8, seconds=0.0, fps=0.0)
    row = file_row("a.png", info, [sample(frames=1)], 16.0)
    for data in (
        DataConfig(height=64, width=64),
        DataConfig(height=64, width=64, buckets=True, bucket_step=64),
    ):
        assert less_enlarged(row, data, 16) == {}
    (finding,) = check_file(row)
    assert finding.settings == ()
    assert finding.remedy.endswith("or lower data.height and data.width")


def test_what_a_look_says() -> None:
    assert codes(check_frames("a", a_look(), 16.0)) == []
    (cut,) = check_frames("a", a_look(cuts=(0.5, 1.25)), 16.0)
    assert cut.code == "D06" and "0.50 s, 1.25 s" in cut.observation
    assert codes(check_frames("a", a_look(blank=9, is_still=True), 16.0)) == ["D07"]
    assert codes(check_frames("a", a_look(frames=81, blank=3), 16.0)) == [], "films begin black"
    assert codes(check_frames("a", a_look(is_still=True), 16.0)) == ["D08"]
    assert codes(check_frames("a", a_look(frozen_seconds=1.5), 16.0)) == ["D09"]


def test_what_is_left_out_keeps_its_remedy_and_its_name_once() -> None:
    reason = "x/a.mp4 is empty (0 bytes); copy it again or remove it"
    short = 'x/a.mp4 has 9 frames, but data.frames asks for 17; set data.frames = 9, or set data.short_clips = "skip"'
    warned, stopped, other, too_short = check_excluded([
        Excluded(name="a.mp4", reason=reason, stops=False), Excluded(name="a.mp4", reason=reason,
        stops=True),
        Excluded(name="b.png", reason="no sample has this name", stops=False),
        Excluded(name="a.mp4", reason=short, stops=True),
    ])  # fmt: skip
    assert str(warned) == f"D02 {reason}" and warned.severity == "warning"
    assert (
        str(stopped) == f'D02 {reason}, or leave it out: data.on_bad = "skip"'
        and stopped.severity == "error"
    )
    assert str(other) == "D02 b.png: no sample has this name; fix it or remove it"
    assert str(too_short) == f"D02 {short}", (
        "data.on_bad does not skip clips that are only too short"
    )
    assert (warned.settings, stopped.settings) == ((), ({"data.on_bad": "skip"},))
    assert {"data.short_clips": "skip"} in too_short.settings


def test_captions_and_duplicates() -> None:
    samples = [
        sample("a", ("one",)),
        sample("b", ("one", " ")),
        sample("c", ("one",)),
        sample("d", ("two",)),
    ]
    row = count_captions(samples, [CutCaption(sample="d", tokens=9, kept="what is read of it")])
    assert (row.count, row.distinct, row.empty) == (5, 3, 1)
    found = list(check_captions(samples, row, RunConfig()))
    assert codes(found) == ["D14", "D16", "D15"]
    assert (
        "last 9 tokens" in found[0].observation and "'what is read of it'" in found[0].observation
    )
    assert found[1].where == "b" and "3 of 4 files" in found[2].where
    windows = [replace(sample("a", ("one",)), id=f"a#{i}") for i in range(3)]
    assert codes(check_captions(windows, count_captions(windows, None), RunConfig())) == [], (
        "windows of a file share its caption"
    )
    same = same_content(
        {
            "a": ("1", Path("a")),
            "b": ("1", Path("b")),
            "a #1": ("1", Path("a")),
            "c": ("2", Path("c")),
        }
    )
    assert same == [("a", "b")]
    assert codes(check_duplicates(same, [("c", "d")])) == ["D04", "D05"]


def test_a_shape_of_few_samples_is_noted_where_there_are_others() -> None:
    rows = a_checkup().buckets
    few = BucketRow(frames=1, height=8, width=8, references=0, samples=1, held_out=0, tokens=4,
        batch_size=4, micro_batches=1)  # fmt: skip
    assert codes(check_buckets([*rows, few])) == ["D17"] and codes(check_buckets([few])) == []
