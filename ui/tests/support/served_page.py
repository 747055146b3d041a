"""The page as its command serves it, and a browser without a window that looks at it."""

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

NAMES = ("google-chrome", "chromium", "chromium-browser")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser is installed (looked for {', '.join(NAMES)})"
)
SECONDS = 90
"""Longest wait for anything: the worker imports torch, on machines that are busy."""
_COUNT_CLICKS = """addEventListener("click", event => {
    if (event.isTrusted && self === top)
      sessionStorage.clicks = Number(sessionStorage.clicks || 0) + 1
}, true)"""
HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>{{7*7}}"
)


def write_pictures(folder: Path, count: int = 4, *, without_caption: int = -1) -> None:
    """Small pictures of two shapes, the first with a hostile caption."""
    folder.mkdir(parents=True)
    for index in range(count):
        size = (64, 48) if index % 2 else (48, 64)
        Image.new("RGB", size, (60 * index % 256, 90, 160)).save(folder / f"p{index}.png")
        if index != without_caption:
            text = f"a card {index}" if index else f"a card {HOSTILE}"
            (folder / f"p{index}.txt").write_text(text, encoding="utf-8")


@dataclass
class Served:
    """A page that is served, and what a browser said of it."""

    url: str
    """With the token."""
    folder: Path
    """Where the page was started."""
    process: "subprocess.Popen[str]"
    said: list[str] = field(default_factory=list)
    """Messages of the browser's console, and addresses elsewhere that were asked for."""


@contextmanager
def served(folder: Path, *arguments: str, **variables: str) -> Iterator[Served]:
    """Serve the page in a folder, in a process of its own with these environment variables."""
    program = shutil.which("ditkit-ui", path=sysconfig.get_path("scripts"))
    assert program is not None
    process = subprocess.Popen(
        [program, "--no-browser", "--port=0", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env=environment_in(folder, **variables),
    )
    with ended(process) as address:
        yield Served(address, folder, process)


def environment_in(folder: Path, **variables: str) -> dict[str, str]:
    """The variables of a page: its user's home is in its folder."""
    # NiceGUI serves a test of its own where it finds pytest's variable.
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    home, cache = folder / ".home", folder / ".cache"
    return {**environment, "HOME": str(home), "XDG_CACHE_HOME": str(cache), **variables}


@contextmanager
def ended(process: "subprocess.Popen[str]") -> Iterator[str]:
    """The address that the process of a page says first; it is ended after the block."""
    assert process.stdout is not None
    try:
        address = re.search(r"http\S+", process.stdout.readline())
        assert address is not None
        yield address[0]
    finally:
        process.terminate()
        process.wait(SECONDS)
        process.stdout.close()


@contextmanager
def launched() -> Iterator[Browser]:
    """A browser without a window."""
    expect.set_options(timeout=1000 * SECONDS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@contextmanager
def opened(
    page_of: Served, browser: Browser, width: int = 1280, *, path: str = ""
) -> Iterator[Page]:
    """A page, by default the first one, in a browser that remembers nothing of pages before."""
    page_of.said.clear()
    # Clips that play take a core's time on end.
    context = browser.new_context(viewport={"width": width, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(1000 * SECONDS)
    page.add_init_script(_COUNT_CLICKS)
    page.on("console", lambda message: _note_message(page_of, message.text))
    page.on("pageerror", lambda error: page_of.said.append(str(error)))
    page.on("request", lambda request: _note_elsewhere(page_of, request.url))
    for _ in range(5 * SECONDS):  # the address is printed before the socket listens
        try:
            page.goto(page_of.url.replace("/?", f"/{path}{'&' if '?' in path else '?'}"))
            break
        except Exception as error:  # noqa: BLE001 (playwright's own class covers all of it)
            assert "ERR_CONNECTION_REFUSED" in str(error) and page_of.process.poll() is None
            page.wait_for_timeout(200)
    yield page
    context.close()


def clicks(page: Page) -> int:
    """How often the page was clicked."""
    return int(page.evaluate("Number(sessionStorage.clicks || 0)"))


def _note_message(page_of: Served, text: str) -> None:
    # NiceGUI loads a page again whose first message came late, on a machine that is busy.
    if not text.startswith("reloading because implicit handshake failed"):
        page_of.said.append(text)


def _note_elsewhere(page_of: Served, url: str) -> None:
    if not re.match(r"(http://127\.0\.0\.1:|data:|blob:|about:)", url):
        page_of.said.append(url)


def overflows(page: Page, width: int) -> bool:
    """Whether the page stays wider than a window of this width: parts of it are laid out again
    after a moment, on a busy machine a longer one."""
    page.set_viewport_size({"width": width, "height": 800})
    for _ in range(50):
        page.wait_for_timeout(200)
        if int(page.evaluate("document.documentElement.scrollWidth")) <= width:
            return False
    return True
