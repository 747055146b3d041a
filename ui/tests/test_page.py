"""The page in a real browser without a window."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
import torch
from forked_page import forked_page
from made_runs import write_run
from PIL import Image
from playwright.sync_api import Browser, Page, expect
from served_page import (
    HOSTILE,
    Served,
    clicks,
    launched,
    needs_browser,
    opened,
    overflows,
    served,
    write_pictures,
)
from tiny_captioner import write_captioner, write_photos

from ditkit_core.config.toml import to_toml
from ditkit_core.data.media.clip import write_video
from ditkit_core.diagnostics.embedded import VIDEO_BYTES
from ditkit_core.diagnostics.sheet import Sheet
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.io.run_queue import QueuedRun, RunQueue
from ditkit_ui.run_file import checked
from ditkit_ui.runs import run_state
from ditkit_ui.workbench import folder_key

pytestmark = [needs_browser, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One page for all daily tests, in a folder that `here` empties: a page and its worker take
    seconds to start."""
    folder = tmp_path_factory.mktemp("page") / "here"
    folder.mkdir()
    serve = forked_page if hasattr(os, "fork") else served
    with serve(folder) as page_of:
        yield page_of


@pytest.fixture
def here(page_of: Served) -> Path:
    """The folder of the page, with the home of its user and nothing else."""
    for path in page_of.folder.parent.glob("*/*"):
        if not path.name.startswith("."):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return page_of.folder


def go(page: Page, tab: str) -> None:
    page.get_by_role("link", name=tab, exact=True).click()
    page.wait_for_url(f"**/{tab.lower()}?**")


def looked_at(page: Page, name: str) -> None:
    """Nothing is wider than a phone; with DITKIT_SCREENSHOTS both widths are kept to be looked
    at."""
    folder = os.environ.get("DITKIT_SCREENSHOTS")
    for width in (400, 1280):
        assert not overflows(page, width), f"{name} at {width} px"
        if folder:
            page.screenshot(path=f"{folder}/{name}-{width}.png")


def test_hostile_captions_and_names_are_text_on_every_page_and_nothing_is_loaded_from_elsewhere(
    here: Path, page_of: Served, browser: Browser
) -> None:
    write_pictures(here / "photos", without_caption=3)
    hostile = here / "photos" / f"{HOSTILE.replace('/', '_')[:80]}.txt"
    hostile.with_suffix(".png").write_bytes((here / "photos" / "p1.png").read_bytes())
    hostile.write_text("a card")
    run = write_run(here / "runs" / "cards", captions=HOSTILE)
    text = '[run]\nfolder = "runs/cards"\n[model]\nbase = "Tongyi-MAI/Z-Image"\npreset = "base"\n'
    text += f"[data]\nfolder = \"photos\"\non_bad = \"skip\"\ntrigger = '''{HOSTILE}'''\n"
    (here / "cards.toml").write_text(text, encoding="utf-8")
    (run / "config.toml").write_text(to_toml(checked(text, Path("cards.toml"))), encoding="utf-8")
    (here / "wrong.toml").write_text("[train]\nstep = 5\n")
    with opened(page_of, browser) as page:
        expect(page.get_by_text("Try it without a GPU")).to_be_visible()
        expect(page.get_by_text("wrong.toml: unknown key train.step in")).to_be_visible()
        looked_at(page, "begin")
        page.get_by_role("link", name="cards.toml").click()
        expect(page.get_by_label("data.trigger")).to_have_value(HOSTILE)
        expect(page.get_by_label("Run file")).to_have_value(text)
        expect(page.get_by_label("train.mask_weight")).to_have_count(0)
        page.get_by_label("Search all").fill("loss mask weight")
        expect(page.get_by_label("train.mask_weight")).to_be_visible()
        expect(page.get_by_label("data.trigger")).to_have_count(0)
        go(page, "Data")
        expect(page.get_by_label("Caption of p0.png")).to_have_value(f"a card {HOSTILE}")
        expect(page.get_by_text("5 files, 4 usable, 1 not usable")).to_be_visible()
        expect(page.get_by_text("p3.png has no caption")).to_be_visible()
        page.get_by_label("Show p0.png larger").click()
        expect(page.get_by_role("dialog").locator("img")).to_be_visible()
        page.keyboard.press("Escape")
        page.get_by_label("Find", exact=True).fill("card")
        page.get_by_label("Replace by").fill("<b>")
        page.get_by_role("button", name="Replace in all").click()
        expect(page.get_by_label("Caption of p1.png")).to_have_value("a <b> 1")
        assert (here / "photos" / "p2.txt").read_text() == "a <b> 2"
        page.get_by_role("button", name="Undo").click()
        expect(page.get_by_label("Caption of p1.png")).to_have_value("a card 1")
        assert (here / "photos" / "p2.txt").read_text() == "a card 2"
        page.get_by_role("button", name="Check the data").click()
        expect(page.locator(".row-of-media", has_text="p1.png")).to_contain_text("D07")
        looked_at(page, "data")
        go(page, "Run")
        expect(page.get_by_role("status").first).to_contain_text("topped at step 40")
        frame = page.frame_locator("iframe")
        expect(frame.get_by_text("Validation loss").first).to_be_visible()
        looked_at(page, "run")
        go(page, "Compare")
        expect(page.locator("figure").last).to_contain_text("step 40")
        page.get_by_label("Left: Step").press("ArrowRight")
        looked_at(page, "compare")
        expect(page.get_by_text("the model is loaded")).to_be_hidden()
        expect(page.get_by_text("No saves yet")).to_be_visible()
        assert "owned" not in page.title() and "49" not in page.title()
        assert not page.evaluate("document.querySelectorAll('img[src=x]').length")
    assert page_of.said == []


def test_files_outside_the_opened_folders_and_of_other_kinds_are_not_sent(
    here: Path, page_of: Served, browser: Browser
) -> None:
    outside = here.parent
    write_pictures(here / "photos")
    write_pictures(outside / "elsewhere")
    (here / "photos" / "link.png").symlink_to(outside / "elsewhere" / "p1.png")
    (here / "other.toml").write_text(f'[data]\nfolder = "{outside}/elsewhere"\n')
    (here / "photos" / "s.wav").write_bytes(b"RIFF")
    (outside / "outside.toml").write_text("[train]\nsteps = 5\n")
    run = RunFolder(here / "runs" / "theirs")
    for folder in (run.path, outside / "elsewhere"):
        page_file = RunFolder(folder).sheet_page
        page_file.parent.mkdir(parents=True)
        page_file.write_text("<script>parent.document.title = document.cookie = 'owned'</script>")
        page_file.with_name("other.txt").write_text("a secret")
    refused = [
        *(f"/{route}?path={quote(str(path))}" for route in ("thumbnail", "media", "sample")
          for path in (outside / "elsewhere" / "p1.png", here / "photos" / "link.png",
                       f"{here}/photos/../../elsewhere/p1.png", "/etc/passwd", "\0")),
        *(f"/media?path={quote(str(here / name))}" for name in ("photos/p1.txt", "other.toml")),
        "/report/Li4/", "/report/L2V0Yw==/passwd", "/report/ä/",
        f"/sheet/{folder_key(outside / 'elsewhere')}/-/", f"/sheet/{folder_key(here)}/-/",
        f"/sheet/{folder_key(run.path)}/-/other.txt", f"/sheet/{folder_key(run.path)}/-/%2e%2e/%2e%2e/a.txt",
    ]  # fmt: skip
    with opened(page_of, browser, path="data?file=other.toml&family=zimage") as page:
        expect(page.get_by_role("button", name="Open ")).to_be_visible()
        assert page.locator("textarea").count() == 0
        origin = page_of.url.partition("/?")[0]
        answers = {path: page.request.get(origin + path).status for path in refused}
        assert {path: status for path, status in answers.items() if status != 404} == {}
        own = quote(str(here / "photos" / "p1.png"))
        assert page.request.get(f"{origin}/media?path={own}").status == 200
        assert page.request.get(f"{origin}/thumbnail?path={own}").headers["content-type"] == (
            "image/jpeg"
        )
        sound = page.request.get(f"{origin}/media?path={quote(str(here / 'photos' / 's.wav'))}")
        assert sound.status == 200 and sound.headers["content-type"].startswith("audio/")
        unreadable = page.request.get(f"{origin}/thumbnail?path={quote(str(here / 'other.toml'))}")
        assert (unreadable.status, unreadable.body()) == (204, b"")
        page.goto(f"{origin}/sheet/{folder_key(run.path)}/-/")
        assert page.evaluate("self.origin") == "null", "a page of a folder is of no site"
        assert not page.context.cookies(origin)[1:] and page.title() != "owned"
        foreign = {"origin": "http://evil.example"}
        assert page.request.post(f"{origin}/", headers=foreign).status == 403
        port = urlsplit(origin).port
        assert page.request.get(f"{origin}/", headers={"host": f"evil:{port}"}).status == 403
        settings = f"{origin}/settings?file={quote(str(outside / 'outside.toml'))}"
        assert "is in no folder that was opened" in page.request.get(settings).text()


def test_large_clips_of_a_sheet_play_in_its_frame_and_where_it_is_opened_as_a_file(
    here: Path, page_of: Served, browser: Browser
) -> None:
    run = write_run(here / "runs" / "clips")
    samples = RunFolder(run).samples / "sheet"
    samples.mkdir(parents=True)
    write_video(samples / "a.mp4", torch.rand(3, 9, 64, 64), 9.0)
    with (samples / "a.mp4").open("ab") as file:  # players pass over a free box
        file.write(VIDEO_BYTES.to_bytes(4, "big") + b"free" + bytes(VIDEO_BYTES - 8))
    assert (samples / "a.mp4").stat().st_size > VIDEO_BYTES
    sheet = Sheet(samples, "Sheet", [("a prompt", 1)], ["step 1"])
    sheet.put(0, 0, samples / "a.mp4")
    page_file = sheet.write_page()
    text = '[run]\nfolder = "runs/clips"\n[model]\npreset = "t2v-1.3b"\n'
    (here / "clips.toml").write_text(text)
    is_loaded = "video => new Promise(done => { const look = () => video.readyState > 1 || video.error ? done(video.videoWidth) : setTimeout(look, 100); look() })"
    with opened(page_of, browser, path="compare?file=clips.toml&family=wan") as page:
        video = page.frame_locator("iframe[title=Sheet]").locator("video")
        assert video.evaluate(is_loaded) == 64
        page.goto(page_file.as_uri())
        assert page.locator("video").evaluate(is_loaded) == 64
    assert [line for line in page_of.said if not line.startswith("file:")] == []


def test_the_queue_is_ordered_and_says_why_a_run_failed(
    here: Path, page_of: Served, browser: Browser
) -> None:
    queue = RunQueue(here / ".home" / ".ditkit" / "queue")
    log = queue.folder / "logs" / "b.log"
    for name in "abc":
        run = QueuedRun(run=f"/runs/{name}", command=("x",), cwd="/", steps=9, log=str(log))
        queue.add(run)
    with queue.changing() as runs:
        runs[1] = replace(runs[1], state="failed", error=HOSTILE)
    log.parent.mkdir()
    log.write_text(f"a line before\nerror: {HOSTILE}\n")

    def order() -> str:
        return "".join(run.run[-1] for run in queue.runs())

    with opened(page_of, browser, path="queue") as page:
        expect(page.get_by_text("No worker: the runs wait")).to_be_visible()
        expect(page.get_by_role("button", name="Save and stop")).to_be_disabled()
        failed = page.locator(".queue li", has_text="failed")
        expect(failed).to_contain_text(f"a line before\nerror: {HOSTILE}")
        expect(page.get_by_label("Up: a")).to_be_disabled()
        expect(page.get_by_label("Down: c")).to_be_disabled()
        expect(page.get_by_label("Up: b")).to_have_count(0)
        page.get_by_label("Up: c").click()
        wait_for(lambda: order() == "cab")
        page.get_by_label("Down: c").click()
        wait_for(lambda: order().replace("b", "") == "ac")
        looked_at(page, "queue")
        page.get_by_label("GPU").focus()
        page.keyboard.press("Tab")
        start = page.get_by_role("button", name="Start a worker")
        expect(start).to_be_focused()
        expect(start).to_have_css("box-shadow", re.compile("0px 0px 0px 5px"))  # a ring
        page.get_by_label("Remove: b").click()
        expect(failed).to_have_count(0)
        queue.remove("/runs/a")  # by a command, which the page shows
        expect(page.get_by_label("Remove: a")).to_have_count(0)
        with queue.working("1"):
            expect(page.get_by_text("A worker trains on GPU 1")).to_be_visible()
            entry = queue.take("1")
            assert entry is not None and entry.run == "/runs/c"
            expect(page.locator(".queue li")).to_contain_text("trains")
            expect(page.get_by_label("Remove: c")).to_have_count(0)
            page.get_by_role("button", name="Save and stop").click()
            expect(page.get_by_text("it waits for the next worker")).to_be_visible()
            assert (queue.worker_folder("1") / "stop").exists()
        expect(page.locator(".queue li")).to_contain_text("waits")
    assert page_of.said == []


@pytest.mark.slow
def test_a_run_from_a_folder_of_pictures_to_a_verified_export(
    tmp_path: Path, browser: Browser
) -> None:
    """Begin, a caption, a key until it fits, start, stop, continue, compare, export; a killed page
    leaves the run alive, and the page says so when the run is killed."""
    write_pictures(tmp_path / "photos", 8, without_caption=3)
    folder = RunFolder(tmp_path / "runs" / "photos-demo")
    with served(tmp_path) as page_of, opened(page_of, browser) as page:
        page.get_by_label("Folder of your pictures").fill("photos")
        page.get_by_role("button", name="Try").click()
        page.wait_for_url("**/data?**")
        caption = page.get_by_label("Caption of p3.png")
        caption.fill("a card with words")
        caption.press("Tab")
        expect(page.get_by_text("Caption saved: p3.txt")).to_be_visible()
        assert (tmp_path / "photos" / "p3.txt").read_text() == "a card with words"
        expect(page.get_by_text("8 files, 8 usable")).to_be_visible()
        expect(page.get_by_text("has no caption")).to_have_count(0)
        go(page, "Settings")
        file = tmp_path / "photos-demo.toml"
        shorter(page, file)
        until_it_fits(page, file)
        looked_at(page, "settings")
        go(page, "Run")
        page.get_by_role("button", name="Start").click()
        assert clicks(page) == 3 + 4, "Try, Run, Start; Settings, Fit, Apply, Undo"
        expect(page.get_by_text("Training", exact=True)).to_be_visible()
        wait_for(lambda: run_state(folder).step >= 2)
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_text("it can be continued")).to_be_visible()
        stopped = run_state(folder).step
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_text("Training", exact=True)).to_be_visible()
        wait_for(lambda: run_state(folder).step > stopped)
        page_of.process.kill()  # the run goes on
    last = run_state(folder).step
    wait_for(lambda: run_state(folder).step > last)
    with served(tmp_path, HF_HUB_OFFLINE="1") as page_of, opened(page_of, browser) as page:
        page.get_by_role("link", name="photos-demo.toml").click()
        go(page, "Run")
        expect(page.get_by_text("Training", exact=True)).to_be_visible()
        kill_run(folder)
        expect(page.get_by_text("Killed at step")).to_be_visible()
        go(page, "Settings")
        steps = run_state(folder).step + 2
        page.get_by_label("train.steps", exact=True).fill(str(steps))
        expect(page.get_by_text("Saved.")).to_be_visible()
        queued(page, folder)
        go(page, "Run")
        expect(page.get_by_text(f"Complete at step {steps}")).to_be_visible()
        page.get_by_label("Steps of a longer run").fill(str(steps + 1))
        page.get_by_role("button", name="Train on").click()
        expect(page.get_by_text(f"Complete at step {steps + 1}")).to_be_visible()
        looked_at(page, "complete")
        go(page, "Compare")
        expect(page.locator("figure").first).to_contain_text("step 0")
        on_a_sheet(page, folder)
        page.get_by_role("button", name="Export").click()
        expect(page.get_by_text(": verified").first).to_be_visible()
        expect(page.locator(".log").last).to_contain_text("exports")
        page.get_by_role("button", name="Upload to the hub").click()
        expect(page.get_by_text("Type the repository to upload to")).to_be_visible()
        page.get_by_label("Repository on the hub").fill("somebody/cards")
        page.get_by_role("button", name="Upload to the hub").click()
        expect(page.locator(".log").last).to_contain_text("the hub is set to offline")
        looked_at(page, "export")
    assert page_of.said == []
    assert list(folder.exports.glob("*export*.safetensors"))


@pytest.mark.slow
def test_data_is_put_right_with_buttons_and_a_model_writes_captions(
    tmp_path: Path, browser: Browser
) -> None:
    """Remedies in the run file, captions in a list, masks and sound next to their sample; captions
    by a model are planned, started, stopped, and continued."""
    world = write_world(tmp_path)
    # Without a hub, so that it is the same everywhere.
    with (
        served(tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path)) as page_of,
        opened(page_of, browser) as page,
    ):
        page.get_by_label("Model files zimage_character_8gb").click()
        files = page.get_by_role("dialog")
        expect(files.get_by_text("vae, from Tongyi-MAI/Z-Image: the hub cannot")).to_be_visible()
        files.get_by_role("button", name="Fetch").click()
        expect(files.get_by_text("Not all could be fetched")).to_be_visible()
        expect(files.locator(".log")).to_contain_text("error: ")
        looked_at(page, "files")
        files.get_by_role("button", name="Close").click()
        expect(files).to_have_count(0)
        page.get_by_role("link", name="photos.toml").click()
        page.get_by_role("button", name="Model files").click()
        expect(files.get_by_text("vae, from Tongyi-MAI/Z-Image: the hub cannot")).to_be_visible()
        expect(files.get_by_role("button", name="Use these")).to_be_disabled()
        page.keyboard.press("Escape")
        expect(files).to_have_count(0)
        go(page, "Data")
        expect(page.get_by_label("Caption of 0wide.png")).to_have_value(f"wide {HOSTILE}")
        expect(page.get_by_label("Show mask: 0wide-mask.png larger").locator("img")).to_be_visible()
        page.get_by_role("button", name="Check the data").click()
        crop_by_hand(page, world)
        wide = page.locator(".row-of-media", has_text="0wide.png")
        wide.get_by_role("button", name="Crop otherwise: data.max_aspect").click()
        expect(page.get_by_text("In the run file now: Crop otherwise")).to_be_visible()
        assert "max_aspect = " in world.read_text()
        expect(wide.get_by_text("D32")).to_have_count(0)
        broken = page.locator(".row-of-media", has_text="0broken.png")
        looked_at(page, "remedies")
        broken.get_by_role("button", name='Leave out: data.on_bad = "skip"').click()
        expect(broken.locator(".badge button")).to_have_count(0)
        assert 'on_bad = "skip"' in world.read_text()
        page.get_by_label("Leave out: p00.png").click()
        expect(page.get_by_text("left out by data.exclude")).to_be_visible()
        assert 'exclude = ["p00.png"]' in world.read_text()
        page.get_by_label("Use: p00.png").click()
        expect(page.get_by_text("left out by data.exclude")).to_have_count(0)
        assert "exclude" not in world.read_text()
        for _ in range(5):  # faster than one is undone
            page.get_by_role("button", name="Undo").click()
        wait_for(lambda: world.read_text() == WORLD)
        expect(wide.get_by_text("D32")).to_be_visible()
        captions_by_a_model(page, tmp_path / "photos")
        page.goto(page.url.replace("photos.toml", "listed.toml"))
        caption = page.get_by_label("Caption of a.png")
        expect(caption).to_have_value(HOSTILE)
        expect(page.get_by_text("data.exclude has 'gone.png'")).to_be_visible()
        page.get_by_role("button", name="Remove the names that no file has").click()
        expect(page.get_by_text("data.exclude has 'gone.png'")).to_have_count(0)
        assert "exclude" not in (tmp_path / "listed.toml").read_text()
        caption.fill('a "dog"')
        caption.press("Tab")
        expect(page.get_by_text("Caption saved: metadata.jsonl")).to_be_visible()
        listed = tmp_path / "listed" / "metadata.jsonl"
        assert [json.loads(line)["text"] for line in listed.read_text().splitlines()] == [
            'a "dog"',
            "b",
        ]
        page.get_by_role("button", name="Undo").click()
        expect(caption).to_have_value(HOSTILE)
        looked_at(page, "list")
        shorten_a_caption(page)
        assert "owned" not in page.title()
        assert not page.evaluate("document.querySelectorAll('img[src=x]').length")
    assert page_of.said == []


MODEL = '[model]\nbase = "Tongyi-MAI/Z-Image"\npreset = "base"\n[data]\nheight = 64\nwidth = 64\n'
WORLD = f'{MODEL}folder = "photos"\n'


def write_world(folder: Path) -> Path:
    """Pictures with all that has a remedy, pictures with a list, and a model that captions; returns
    the run file."""
    write_photos(folder / "photos", [f"p{index:02}.png" for index in range(24)])
    for name in ("0wide.png", "0wide-mask.png"):
        Image.new("RGB", (260, 80), "navy").save(folder / "photos" / name)
    (folder / "photos" / "0wide.txt").write_text(f"wide {HOSTILE}")
    (folder / "photos" / "0broken.png").write_bytes(b"no picture")
    (folder / "photos" / "0broken.txt").write_text("broken")
    write_photos(folder / "listed", ["a.png", "b.png"])
    rows = [{"file_name": "a.png", "text": HOSTILE}, {"file_name": "b.png", "text": "b"}]
    (folder / "listed" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "listed.toml").write_text(f'{MODEL}folder = "listed"\nexclude = ["gone.png"]\n')
    write_captioner(folder / "captioner", "A red cat sits on the mat.")
    (folder / "photos.toml").write_text(WORLD)
    return folder / "photos.toml"


def crop_by_hand(page: Page, world: Path) -> None:
    """The frame of a wide picture is moved to its left end."""
    page.get_by_label("Show 0wide.png larger").click()
    dialog = page.get_by_role("dialog")
    frame = dialog.locator(".crop")
    expect(frame).to_be_visible()
    before = frame.bounding_box()
    slider = dialog.get_by_label("Crop from left to right")
    slider.locator("[tabindex]").click(position={"x": 0, "y": 5})
    wait_for(lambda: 'crops = ["0wide.png=0,0.5"]' in world.read_text())
    after, picture = frame.bounding_box(), dialog.locator("img").bounding_box()
    assert before and after and picture and after["x"] < before["x"]
    assert abs(after["x"] - picture["x"]) < 2, "at the left end"
    looked_at(page, "crop")
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_have_count(0)


def shorten_a_caption(page: Page) -> None:
    """A caption that the demo's encoder does not read to its end, in a list."""
    page.get_by_role("link", name="Begin").click()
    page.get_by_label("Folder of your pictures").fill("listed")
    page.get_by_role("button", name="Try").click()
    caption, long = page.get_by_label("Caption of b.png"), "A red card lies here. " * 400
    caption.fill(long)
    caption.press("Tab")
    expect(page.get_by_text("Caption saved: metadata.jsonl")).to_be_visible()
    page.get_by_role("button", name="Check the data").click()
    page.get_by_role("button", name="Shorten the caption").click()
    expect(caption).to_have_value(re.compile(r"^(A red card lies here\. ?){2,300}$"))
    expect(page.get_by_text("D14")).to_have_count(0)


def captions_by_a_model(page: Page, folder: Path) -> None:
    page.get_by_text("Captions by a model").click()
    page.get_by_label("Model: a hub id, or a folder").fill("captioner")
    page.get_by_label("Trigger word").fill("ohwx")
    start = page.get_by_role("button", name="Write captions")
    expect(start).to_be_disabled()
    page.get_by_role("button", name="does it fit?").click()
    expect(page.locator(".log")).to_contain_text("24 to be written")
    expect(page.locator(".log")).to_contain_text("captioner: to be loaded into memory")
    looked_at(page, "captions")
    assert len(list(folder.glob("*.txt"))) == 2, "a plan writes nothing"
    start.click()
    page.get_by_role("button", name="Stop", exact=True).click()  # while the process still begins
    expect(page.get_by_text("Stopped. What is written stays")).to_be_visible()
    (folder / "p00.txt").write_text("a person's words")
    start.click()
    expect(page.get_by_text("Captions are written.")).to_be_visible()
    assert len(list(folder.glob("*.txt"))) == 26
    assert (folder / "p00.txt").read_text() == "a person's words"
    expect(page.get_by_label("Caption of p00.png")).to_have_value("a person's words")
    expect(page.get_by_label("Caption of p01.png")).to_have_value(
        "ohwx, A red cat sits on the mat.\n"
    )
    expect(page.locator(".row-of-media", has_text="p01.png")).not_to_contain_text("has no caption")
    replaced_by_a_model(page, folder)


def replaced_by_a_model(page: Page, folder: Path) -> None:
    """Captions of a person are replaced after a question that says how many, and brought back."""
    before = {file.name: file.read_text() for file in folder.glob("*.txt")}
    page.get_by_role("combobox", name="Captions that are there").click()
    page.get_by_role("option", name="replace all").click()
    page.get_by_label("Trigger word").fill("xyz")
    page.get_by_role("button", name="does it fit?").click()
    start = page.get_by_role("button", name="Write captions")
    asked, count = page.get_by_role("dialog"), "replacing 26 that are there (3 not by this command)"
    for answer in ("Cancel", "Replace"):
        start.click()
        expect(asked).to_contain_text(count)
        looked_at(page, "replace")
        asked.get_by_role("button", name=answer).click()
        expect(asked).to_have_count(0)
        if answer == "Cancel":
            expect(start).to_be_enabled()
            assert before == {file.name: file.read_text() for file in folder.glob("*.txt")}
    caption = page.get_by_label("Caption of p00.png")
    expect(caption).to_have_value("xyz, A red cat sits on the mat.\n")
    expect(page.get_by_text("Some captions are not written")).to_be_visible()  # the broken one's
    page.get_by_role("button", name="Undo").click()
    expect(caption).to_have_value("a person's words")
    assert before == {file.name: file.read_text() for file in folder.glob("*.txt")}


def shorter(page: Page, file: Path) -> None:
    """Make the demo shorter in the text of the run file."""
    text = file.read_text(encoding="utf-8")
    text = re.sub(r"(?m)^prompts = .*$", 'prompts = ["a red square"]', text)
    text = re.sub(r"(?m)^every_steps = 250$", "every_steps = 1000", text)
    text = text.replace("clips = 9", "clips = 2").replace("steps = 20", "steps = 2")
    text = text.replace("steps = 250", "steps = 2000").replace("num_control_prompts = 2\n", "")
    page.get_by_label("Run file").fill(text)
    expect(page.get_by_text("Saved.")).to_be_visible()
    assert file.read_text(encoding="utf-8") == text


def until_it_fits(page: Page, file: Path) -> None:
    """A size that does not fit a small GPU is seen to, and one that fits."""
    page.get_by_label("Plan for GPU").fill("2GiB")
    for size, verdict in (("2048", "Does not fit as set"), ("64", "Fits")):
        for key in ("data.height", "data.width"):
            page.get_by_label(key, exact=True).fill(size)
            wait_for(lambda key=key, size=size: f"{key[5:]} = {size}\n" in file.read_text("utf-8"))
        expect(page.locator(".verdict")).to_have_text(verdict)
    expect(page.locator(".plan")).to_contain_text(re.compile(r"s a step, .*[1-9]"))
    expect(page.locator(".plan")).not_to_contain_text(", 0 min")
    page.get_by_role("button", name="Fit", exact=True).click()
    expect(page.get_by_text("Would change")).to_be_visible()
    before = file.read_text(encoding="utf-8")
    page.get_by_role("button", name="Apply").click()
    wait_for(lambda: file.read_text("utf-8") != before)
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_label("Run file")).to_have_value(before)
    page.get_by_label("Plan for GPU").fill("")


def queued(page: Page, folder: RunFolder) -> None:
    """A run is trained by the queue's worker."""
    go(page, "Queue")
    page.get_by_role("button", name="Add photos-demo.toml").click()
    run = page.locator(".queue li", has_text=folder.name)
    expect(run).to_contain_text("waits")
    page.get_by_role("button", name="Start a worker").click()
    expect(page.get_by_text("A worker trains on GPU 0")).to_be_visible()
    expect(run).to_contain_text("trains")
    expect(run).to_contain_text("complete")
    page.get_by_role("button", name="End after this run").click()
    expect(page.get_by_text("No worker", exact=True)).to_be_visible()
    page.get_by_role("button", name="Remove complete").click()
    expect(run).to_have_count(0)


def on_a_sheet(page: Page, folder: RunFolder) -> None:
    """A sheet of two saves at two strengths, with a larger view of one of its samples."""
    page.get_by_label("Strengths").fill("0.5, 1")
    page.get_by_role("button", name="Make the sheet").click()
    sheet = page.frame_locator("iframe[title=Sheet]")
    expect(sheet.get_by_text(re.compile(r"\b(\d+) of \1 samples"))).to_be_visible()
    wait_for((folder.samples / "sheet" / "sheet.png").exists)
    sheet.locator("img").last.click()
    expect(sheet.locator("dialog img")).to_be_visible()
    looked_at(page, "sheet")


def kill_run(folder: RunFolder) -> None:
    process = int(folder.owner().split()[1])
    subprocess.run(["kill", f"-{signal.SIGKILL.value}", str(process)], check=True)


def wait_for(condition: object, seconds: float = 120) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
