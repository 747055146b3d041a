"""The report in a real browser without a window: it renders, its script runs, nothing complains,
and it loads nothing."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from made_runs import HOSTILE, write_run
from media_files import picture

from ditkit_core.diagnostics.report import page
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


def opened(path: Path, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """The document after its script ran, and what was said on the console."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={profile}", "--enable-logging=stderr", "--v=0", *flags, "--dump-dom",
        path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(
        command, check=False, capture_output=True, encoding="utf-8", errors="replace", timeout=150
    )
    assert done.returncode == 0 and "</html>" in done.stdout, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def test_the_page_renders_runs_its_script_and_says_nothing_on_the_console(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", captions=HOSTILE)
    write_run(tmp_path / "run" / "low_noise", 10)
    path = write_report(run)
    document, console = opened(path, tmp_path / "profile")
    assert console == []
    assert 'data-script="ran"' in document, "the script that the policy names ran to its end"
    assert "<title>run: report</title>" in document, "no caption ran"
    written = path.read_text(encoding="utf-8")
    assert document.count("<svg ") == written.count("<svg ") >= 18
    assert document.count("<path ") == written.count("<path ") and document.count(
        "<figure>"
    ) == written.count("<figure>")


def test_the_numbers_shown_are_those_of_the_metrics_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    document, _ = opened(write_report(run), tmp_path / "profile")
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


def test_the_console_is_heard_and_the_policy_holds(tmp_path: Path) -> None:
    """What the tests above rest on: an error is seen, and what was smuggled into the page neither
    runs nor loads."""
    path = write_report(write_run(tmp_path / "run"))
    broken = path.read_text(encoding="utf-8")
    smuggled = (
        "<script>document.title = 'owned'</script><img src='https://example.invalid/x.png'></body>"
    )
    path.write_text(broken.replace("</body>", smuggled), encoding="utf-8")
    document, console = opened(path, tmp_path / "profile")
    assert "<title>run: report</title>" in document and 'data-script="ran"' in document
    assert len(console) >= 2 and all("Content Security Policy" in line for line in console)


def test_keys_and_the_pointer_read_numbers_off_a_chart(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    path = write_report(run)
    text = re.sub(
        '<meta http-equiv="Content-Security-Policy"[^>]*>', "", path.read_text(encoding="utf-8")
    )
    played = """<script>
      function say(name, event) {
        const svg = document.querySelector(`svg[data-name="${name}"]`);
        svg.dispatchEvent(event(svg.getBoundingClientRect()));
        document.body.append(Object.assign(document.createElement("pre"), {
          textContent: svg.parentElement.querySelector("output").textContent + " "
            + (svg.parentElement.querySelector("output data") || {}).value }));
      }
      const key = (name) => () => new KeyboardEvent("keydown", { key: name });
      say("loss", key("Home")); say("loss", key("ArrowRight")); say("held_out", key("End")); say("held_out", key("ArrowRight"));
      say("tokens_per_second", (box) => new PointerEvent("pointermove", { clientX: box.right, clientY: box.top }));
    </script></body>"""
    path.write_text(text.replace("</body>", played), encoding="utf-8")
    document, console = opened(path, tmp_path / "profile")
    assert console == []
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    truth = {(name, row["step"]): value for row in rows for name, value in row.items()}
    wanted = [
        ("loss", 1),
        ("loss", 2),
        ("held_out", 40),
        ("held_out", 40),
        ("tokens_per_second", 40),
    ]
    for text, (name, step) in zip(re.findall("<pre>(.*?)</pre>", document), wanted, strict=True):
        shown, rounded, value = re.fullmatch(r"step (\d+): (\S+) (\S+)", text).groups()  # type: ignore[union-attr]
        assert int(shown) == step and float(value) == truth[name, step]
        assert float(rounded) == pytest.approx(truth[name, step], rel=5e-3), (
            "three digits; the element's value has all"
        )


PLAYED = """<script>
  const videos = [...document.querySelectorAll("video")];
  const buttons = [...document.querySelectorAll(".strips button")];
  const loaded = (video) => new Promise((done) => {
    if (video.readyState >= 2) done();
    video.addEventListener("loadeddata", done);
    video.addEventListener("error", done);
  });
  const found = () => videos.map((video) => `${video.videoWidth}x${video.videoHeight} ${video.controls} ${video.paused}`);
  const said = (text) => document.body.append(Object.assign(document.createElement("pre"), { textContent: text }));
  Promise.all(videos.map(loaded)).then(() => setTimeout(() => {
    said(found().join(", "));
    buttons[0].click();
    said(found().join(", "));
  }, 1000));
</script></body>"""


@pytest.mark.parametrize("reduced", [False, True])
def test_videos_play_at_once_unless_the_reader_asked_for_less_motion_and_a_button_rules_a_strip(
    tmp_path: Path, reduced: bool
) -> None:
    path = write_report(write_run(tmp_path / "run"))
    text = re.sub(
        '<meta http-equiv="Content-Security-Policy"[^>]*>', "", path.read_text(encoding="utf-8")
    )
    assert "autoplay" not in text, (
        "the script asks for the reader's setting; without it there are controls"
    )
    path.write_text(text.replace("</body>", PLAYED), encoding="utf-8")
    flags = ["--force-prefers-reduced-motion"] if reduced else []
    document, console = opened(
        path, tmp_path / "profile", "--virtual-time-budget=10000", "--window-size=1280,1500", *flags
    )
    assert console == []
    before, after = re.findall("<pre>(.*?)</pre>", document)
    playing, paused = "32x16 false false", "32x16 false true"
    first, others = (paused, playing) if reduced else (playing, paused)
    assert before.split(", ") == [first] * 4, "all strips are in the window"
    assert after.split(", ") == [others, others, first, first], "the button of the first strip"


def test_a_page_of_a_run_that_trains_loads_itself_again_also_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps what the reader opened. The page of a complete run stays as it is."""
    monkeypatch.setattr(page, "RELOAD_SECONDS", 1)
    run = write_run(tmp_path / "run")
    counted = """<script>
      sessionStorage.loads = Number(sessionStorage.loads ?? 0) + 1;
      const details = document.querySelector("details");
      document.body.append(Object.assign(document.createElement("pre"), { textContent: `${sessionStorage.loads} ${details.open}` }));
      details.open = true;
    </script></body>"""

    def loads() -> str:
        path = write_report(run)
        text = re.sub(
            '<meta http-equiv="Content-Security-Policy"[^>]*>', "", path.read_text(encoding="utf-8")
        )
        path.write_text(text.replace("</body>", counted), encoding="utf-8")
        document, console = opened(path, tmp_path / "profile", "--virtual-time-budget=8000")
        assert console == []
        return re.findall("<pre>(.*?)</pre>", document)[0]

    assert loads() == "1 false", "nothing trains in the folder"
    (run / ".owner").write_text("process 1 on host since 2026-01-01")
    times, is_open = loads().split()
    assert int(times) >= 2 and is_open == "true"
    (run / "complete.json").write_text('{"step": 40}')
    assert loads() == "1 false"


def test_a_video_that_the_policy_allows_is_loaded_without_a_complaint(tmp_path: Path) -> None:
    """And one from a file is not: the page loads nothing from the disk."""
    path = write_report(write_run(tmp_path / "run"))
    text = path.read_text(encoding="utf-8")
    (tmp_path / "run" / "samples" / "step-000000-0.mp4").rename(tmp_path / "run" / "near.mp4")
    path.write_text(
        text.replace("</body>", '<video src="near.mp4"></video></body>'), encoding="utf-8"
    )
    _, console = opened(path, tmp_path / "profile")
    assert len(console) == 1 and "near.mp4" in console[0] and "media-src" in console[0]


def test_it_fits_a_telephone_with_everything_open(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", captions=(*HOSTILE, "w" * 400))
    path = write_report(run)
    text = re.sub(
        '<meta http-equiv="Content-Security-Policy"[^>]*>', "", path.read_text(encoding="utf-8")
    )
    measured = """<script>
      document.querySelectorAll("details").forEach((each) => { each.open = true; });
      const widths = [document.documentElement.scrollWidth, window.innerWidth];
      document.body.append(Object.assign(document.createElement("pre"), { textContent: widths.join(" ") }));
    </script></body>"""
    path.write_text(text.replace("</body>", measured), encoding="utf-8")
    document, _ = opened(path, tmp_path / "profile", "--window-size=360,800")
    (found,) = re.findall("<pre>(.*?)</pre>", document)
    needed, given = map(int, found.split())
    assert needed <= given <= 520, "the page itself never scrolls sideways; wide tables do"


WALKED = """<script>
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
  said.push(String(document.querySelector("dialog img").naturalWidth));
  document.querySelector("dialog").click();
  said.push(String(document.querySelector("dialog").open));
  said.push(String(document.documentElement.scrollWidth <= innerWidth));
  document.body.append(Object.assign(document.createElement("pre"), { textContent: said.join("|") }));
</script></body>"""


@pytest.mark.parametrize("width", [1280, 500])
def test_a_sheet_is_walked_and_enlarged_by_the_keyboard(tmp_path: Path, width: int) -> None:
    columns = [f"step {number}" for number in range(20)]
    sheet = Sheet(tmp_path, HOSTILE[0], [("a cat", 0), (HOSTILE[1], 7)], columns)
    for row in range(2):
        for column in range(20):
            sheet.put(row, column, picture(tmp_path / f"{row}-{column}.png", (32, 16), "teal"))
    path = sheet.write_page()
    document, console = opened(path, tmp_path / "profile")
    assert console == [] and 'data-script="ran"' in document
    text = re.sub(
        '<meta http-equiv="Content-Security-Policy"[^>]*>', "", path.read_text(encoding="utf-8")
    )
    path.write_text(text.replace("</body>", WALKED), encoding="utf-8")
    document, console = opened(path, tmp_path / "profile", f"--window-size={width},900")
    assert console == []
    (said,) = re.findall("<pre>(.*?)</pre>", document, re.DOTALL)
    assert unescape(said).split("|") == [
        "step 1", f"step 1: {HOSTILE[1]} (seed 7)",
        "step 1: a cat (seed 0)", "step 2: a cat (seed 0)", "step 3: a cat (seed 0)",
        "16", "false", "true",
    ]  # fmt: skip
