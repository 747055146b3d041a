"""The report in a real browser without a window: it renders, its script runs, nothing complains,
and it loads nothing."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from made_runs import HOSTILE, write_run
from media_files import picture
from playwright.sync_api import Browser, Page, sync_playwright

from ditkit_core.diagnostics.report.page import write_report
from ditkit_core.diagnostics.sheet import Sheet

NAMES = ("google-chrome", "chromium", "chromium-browser")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = [
    pytest.mark.skipif(
        BROWSER is None, reason=f"no browser is installed (looked for {', '.join(NAMES)})"
    ),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all pages: its start takes longer than any of them."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser, path: Path, *, has_clock: bool = False, **options: Any
) -> Iterator[tuple[Page, list[str]]]:
    """A page that is loaded, in a session of its own, and what was said on its console so far.

    Args:
        has_clock: Whether the page's time goes as the test says (`page.clock`).
        options: Of the session: the window's size, what the reader prefers.
    """
    console: list[str] = []
    # Clips that play take a core's time on end.
    with browser.new_context(**{"reduced_motion": "reduce", **options}) as context:
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: console.append(message.text))
        page.on("pageerror", lambda error: console.append(str(error)))
        if has_clock:
            page.clock.install()
        page.goto(path.as_uri())
        yield page, console


def test_the_page_renders_runs_its_script_says_nothing_on_the_console_and_fits_a_telephone(
    browser: Browser, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", captions=(*HOSTILE, "w" * 400))
    write_run(tmp_path / "run" / "low_noise", 10)
    path = write_report(run)
    with opened(browser, path) as (page, console):
        document = page.content()
        page.set_viewport_size({"width": 360, "height": 800})
        page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
        needed = page.evaluate("document.documentElement.scrollWidth")
    assert needed <= 360, "the page itself never scrolls sideways; wide tables do"
    assert console == []
    assert 'data-script="ran"' in document, "the script that the policy names ran to its end"
    assert "<title>run: report</title>" in document, "no caption ran"
    written = path.read_text(encoding="utf-8")
    assert document.count("<svg ") == written.count("<svg ") >= 18
    assert document.count("<path ") == written.count("<path ") and document.count(
        "<figure>"
    ) == written.count("<figure>")


KEYS = """() => {
  function say(name, event) {
    const svg = document.querySelector(`svg[data-name="${name}"]`);
    svg.dispatchEvent(event(svg.getBoundingClientRect()));
    const output = svg.parentElement.querySelector("output");
    return output.textContent + " " + (output.querySelector("data") || {}).value;
  }
  const key = (name) => () => new KeyboardEvent("keydown", { key: name });
  const corner = (box) => new PointerEvent("pointermove", { clientX: box.right, clientY: box.top });
  return [
    say("loss", key("Home")), say("loss", key("ArrowRight")),
    say("held_out", key("End")), say("held_out", key("ArrowRight")),
    say("tokens_per_second", corner),
  ];
}"""


def test_the_numbers_shown_and_those_that_keys_and_the_pointer_read_are_those_of_the_metrics_file(
    browser: Browser, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run")
    with opened(browser, write_report(run)) as (page, console):
        document = page.content()
        texts = page.evaluate(KEYS)
    assert console == []
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    truth = {(name, row["step"]): value for row in rows for name, value in row.items()}
    shown = re.findall(
        r'<data value="([^"]+)" data-key="([^"]+)" data-step="(\d+)">([^<]+)</data>', document
    )
    assert len(shown) > 50
    for value, key, step, text in shown:
        assert float(value) == truth[unescape(key), int(step)]
        assert float(text) == pytest.approx(
            float(value) / (2**30 if key.endswith("_bytes") else 1), rel=5e-3
        )
    (numbers,) = re.findall(
        r'<script type="application/json" id="numbers">(.*?)</script>', document, re.DOTALL
    )
    for name, series in json.loads(numbers)["sections"][0]["series"].items():
        assert [truth[name, step] for step in series["steps"]] == series["values"]
    wanted = [
        ("loss", 1),
        ("loss", 2),
        ("held_out", 40),
        ("held_out", 40),
        ("tokens_per_second", 40),
    ]
    for text, (name, step) in zip(texts, wanted, strict=True):
        shown, rounded, value = re.fullmatch(r"step (\d+): (\S+) (\S+)", text).groups()  # type: ignore[union-attr]
        assert int(shown) == step and float(value) == truth[name, step]
        assert float(rounded) == pytest.approx(truth[name, step], rel=5e-3), (
            "three digits; the element's value has all"
        )


def test_the_console_is_heard_and_the_policy_holds(browser: Browser, tmp_path: Path) -> None:
    """What the tests above rest on: an error is seen, and what was smuggled into the page neither
    runs nor loads."""
    path = write_report(write_run(tmp_path / "run"))
    broken = path.read_text(encoding="utf-8")
    smuggled = (
        "<script>document.title = 'owned'</script><img src='https://example.invalid/x.png'></body>"
    )
    path.write_text(broken.replace("</body>", smuggled), encoding="utf-8")
    with opened(browser, path) as (page, console):
        document = page.content()
    assert "<title>run: report</title>" in document and 'data-script="ran"' in document
    assert len(console) >= 2 and all("Content Security Policy" in line for line in console)


VIDEOS = "Array.from(document.querySelectorAll('video'))"
PAUSED = f"{VIDEOS}.map((video) => video.paused)"
TWO_FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""After these the page was told which strips are seen."""


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_videos_play_at_once_unless_the_reader_asked_for_less_motion_and_a_button_rules_a_strip(
    browser: Browser, tmp_path: Path, motion: str
) -> None:
    path = write_report(write_run(tmp_path / "run"))
    assert "autoplay" not in path.read_text(encoding="utf-8"), (
        "the script asks for the reader's setting; without it there are controls"
    )
    wide, paused = {"width": 1280, "height": 1500}, motion == "reduce"
    # A condition that is waited for is a script that the page's policy forbids.
    options = {"viewport": wide, "reduced_motion": motion, "bypass_csp": True}
    with opened(browser, path, **options) as (page, console):
        page.wait_for_function(f"{VIDEOS}.every((video) => video.readyState >= 2)")
        page.evaluate(TWO_FRAMES)
        if not paused:
            page.wait_for_function(f"!{PAUSED}.includes(true)")
        assert page.evaluate(PAUSED) == [paused] * 4, "all strips are in the window"
        size_and_controls = "[video.videoWidth, video.videoHeight, video.controls]"
        shown = page.evaluate(f"{VIDEOS}.map((video) => {size_and_controls})")
        assert shown == [[32, 16, False]] * 4
        page.locator(".strips button").first.click()
        after = page.evaluate(PAUSED)
        assert after == [not paused] * 2 + [paused] * 2, "the button of the first strip"
    assert console == []


def test_a_page_of_a_run_that_trains_loads_itself_again_also_from_disk(
    browser: Browser, tmp_path: Path
) -> None:
    """It keeps what the reader opened. The page of a complete run stays as it is."""
    run = write_run(tmp_path / "run")
    is_open = "document.querySelector('details').open"

    def look(*, is_new: bool) -> None:
        """At the page after two minutes of its clock, which pass at once."""
        # A condition that is waited for is a script that the page's policy forbids.
        options = {"has_clock": True, "bypass_csp": True}
        with opened(browser, write_report(run), **options) as (page, console):
            page.evaluate(f"{is_open} = window.isFirst = true")
            page.clock.run_for("02:00")
            if is_new:
                page.wait_for_function(f"window.isFirst !== true && {is_open}")
            else:
                page.wait_for_timeout(500)
                assert page.evaluate("window.isFirst === true")
        assert console == []

    look(is_new=False)  # nothing trains in the folder
    (run / ".owner").write_text("process 1 on host since 2026-01-01")
    look(is_new=True)
    (run / "complete.json").write_text('{"step": 40}')
    look(is_new=False)


def test_a_video_that_the_policy_allows_is_loaded_without_a_complaint(
    browser: Browser, tmp_path: Path
) -> None:
    """And one from a file is not: the page loads nothing from the disk."""
    path = write_report(write_run(tmp_path / "run"))
    text = path.read_text(encoding="utf-8")
    (tmp_path / "run" / "samples" / "step-000000-0.mp4").rename(tmp_path / "run" / "near.mp4")
    path.write_text(
        text.replace("</body>", '<video src="near.mp4"></video></body>'), encoding="utf-8"
    )
    with opened(browser, path) as (_, console):
        pass
    assert len(console) == 1 and "near.mp4" in console[0] and "media-src" in console[0]


WALKED = """async () => {
  const said = [];
  const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  const shown = () => document.querySelector("dialog").innerText.trim();
  document.querySelector(".sheet a").focus();
  for (const key of ["ArrowRight", "ArrowDown"]) press(key);
  said.push(document.activeElement.closest(".tile").innerText.trim());
  press("Enter");
  said.push(shown());
  for (const key of ["ArrowUp", "ArrowRight", "ArrowRight"]) {
    document.querySelector("dialog").dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    said.push(shown());
  }
  const large = document.querySelector("dialog img");
  await large.decode();  // its source was changed three times: it is loaded again later
  said.push(large.naturalWidth);
  document.querySelector("dialog").click();
  said.push(document.querySelector("dialog").open);
  said.push(document.documentElement.scrollWidth <= innerWidth);
  return said;
}"""


def test_a_sheet_is_walked_and_enlarged_by_the_keyboard(browser: Browser, tmp_path: Path) -> None:
    columns = [f"step {number}" for number in range(20)]
    sheet = Sheet(tmp_path, HOSTILE[0], [("a cat", 0), (HOSTILE[1], 7)], columns)
    for row in range(2):
        for column in range(20):
            sheet.put(row, column, picture(tmp_path / f"{row}-{column}.png", (32, 16), "teal"))
    answers = []
    with opened(browser, sheet.write_page()) as (page, console):
        for width in (1280, 500):
            page.set_viewport_size({"width": width, "height": 900})
            page.reload()
            assert page.evaluate("document.documentElement.dataset.script") == "ran"
            answers.append(page.evaluate(WALKED))
    assert console == [] and answers[0] == answers[1]
    assert answers[0] == [
        "step 1", f"step 1: {HOSTILE[1]} (seed 7)",
        "step 1: a cat (seed 0)", "step 2: a cat (seed 0)", "step 3: a cat (seed 0)",
        16, False, True,
    ]  # fmt: skip
