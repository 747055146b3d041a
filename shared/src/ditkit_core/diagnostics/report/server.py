"""Serves the page of a run, as of now, with the last lines of its logs, and the samples in its folder. It reads only, and knows no other file."""

import ipaddress
import json
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from ditkit_core.diagnostics.rendering import Html, element, html_page
from ditkit_core.diagnostics.report.data import read_sections
from ditkit_core.diagnostics.report.page import RELOAD_SECONDS, report_page
from ditkit_core.diagnostics.report.words import format_number
from ditkit_core.errors import UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.files import local_path
from ditkit_core.io.run_dir import RunFolder

NUM_LINES = 8
"""Lines of a log that a page shows."""
_TAIL_BYTES, _LONGEST = 65_536, 300
_STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""A terminal's sequence for colours and for the cursor."""


def last_lines(path: Path, count: int = NUM_LINES) -> list[str]:
    """The last lines of a text file as a terminal would show them; none if it is missing, unreadable or no ordinary file.

    Of a line that was written over, as progress bars do, only the last text is shown.
    """
    try:
        if not path.is_file():  # a pipe would wait for its writer
            return []
        with path.open("rb") as file:
            file.seek(-min(_TAIL_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
            text = _STYLE.sub("", file.read(_TAIL_BYTES).decode("utf-8", "replace"))
    except OSError:
        return []
    lines = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n"))
    return [line for line in lines if line][-count:]


def log_part(folder: Path, log: Path | None = None) -> Html:
    """The last lines of the files in a run's folder, and of one that its output was redirected into; empty if there are none.

    Args:
        folder: The run's folder, with or without folders of experts.
        log: The file with the output of the run's command.
    """
    run = RunFolder(folder)
    logs = {} if log is None else {str(log): last_lines(log)}
    logs[run.log.name] = last_lines(run.log)
    for metrics in (run.metrics, *sorted(folder.glob("*/metrics.jsonl"))):
        logs[metrics.relative_to(folder).as_posix()] = [_numbers(line) for line in last_lines(metrics)]
    for path in (run.previews_log, run.verification_log):
        logs[path.name] = last_lines(path)
    parts = [_lines(name, lines) for name, lines in logs.items() if lines]
    return (
        element("details", element("summary", "Last lines"), element("div", *parts, class_="charts"), open="")
        if parts
        else Html()
    )


def _lines(name: str, lines: Sequence[str]) -> Html:
    return element(
        "figure", element("figcaption", name), element("pre", "\n".join(line[:_LONGEST] for line in lines), dir="auto")
    )


def _numbers(line: str) -> str:
    """A line of a metrics file as text, without the numbers of single parts; the line itself if it is none."""
    try:
        row = json.loads(line)
        step = int(row.pop("step"))
        numbers = {name: value for name, value in row.items() if "/" not in name}
        cells = (f"{name} {format_number(value)}" for name, value in numbers.items() if isinstance(value, int | float))
        return "  ".join([f"step {step}", *cells])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return line  # incomplete while the run writes, or cut


_FRESH_SECONDS = 5.0
"""Age up to which a page is sent again: many readers cost a machine that trains no more than one."""
_KINDS = {".mp4": "video/mp4", ".png": "image/png", ".jpg": "image/jpeg", ".webp": "image/webp"}
_CHUNK_BYTES = 1 << 20


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ReportServer(ThreadingHTTPServer):
    """A server of one run's page.

    Args:
        folder: The run's folder. It need not exist yet.
        host: Address to listen at.
        port: Port to listen at; 0 for a free one.
        log: File with the output of the run's command, whose last lines are shown.

    Raises:
        OSError: If the address is not one of this machine, or the port is in use.
    """

    daemon_threads = True  # a reader whose connection hangs does not keep the process

    def __init__(self, folder: Path, *, host: str, port: int, log: Path | None = None):
        self.folder, self.log, self.host = folder, log, host
        self._page, self._written, self._lock = b"", float("-inf"), threading.Lock()
        super().__init__((host, port), _Handler)

    @property
    def address(self) -> str:
        """The URL of the page on this machine."""
        return f"http://{self.host}:{self.server_address[1]}/"

    def page(self) -> bytes:
        """The page as of now, or of a few seconds ago."""
        with self._lock:
            if time.monotonic() - self._written > _FRESH_SECONDS:
                self._page, self._written = self._built().encode("utf-8", "replace"), time.monotonic()
            return self._page

    def _built(self) -> str:
        lines = log_part(self.folder, self.log)
        try:
            return report_page(self.folder, read_sections(self.folder), served=lines)
        except UserError:
            name = self.folder.resolve().name
            notice = element("p", "This run has not begun to train: there are no numbers yet.")
            refresh = element("meta", http_equiv="refresh", content=RELOAD_SECONDS)
            return html_page(f"{name}: report", element("header", element("h1", name)), notice, lines, head=refresh)

    def sample(self, path: str) -> Path | None:
        """The sample at a path of a URL, as the page links it; None for everything else."""
        parts = unquote(path).split("/")[1:]
        if len(parts) not in (2, 3) or parts[-2] != "samples" or Path(parts[-1]).suffix not in _KINDS:
            return None
        # No part may leave the folder, by its name or as a link to elsewhere.
        if any(not part or part.startswith(".") or set(part) & set("\\:\0") for part in parts):
            return None
        file = self.folder.joinpath(*parts)
        if any(path.is_symlink() for path in (file, *list(file.parents)[: len(parts) - 1])) or not file.is_file():
            return None
        return file


def watch(folder: Path, *, bind: str, port: int, log: str = "") -> None:
    """Serve the page of a run until the process is interrupted; this reads the run's files, and changes none.

    Args:
        folder: The run's folder.
        bind: Address to listen at.
        port: Port to listen at; 0 for a free one.
        log: File with the output of the run's command; empty for none.
    """
    try:
        server = ReportServer(folder, host=bind, port=port, log=local_path(log) if log else None)
    except OSError as error:
        raise UserError(
            f"cannot listen at {bind}:{port} ({error.strerror or error}); choose another --port, or --port 0 for a free one"
        ) from error
    with server:
        port = server.server_address[1]
        say(f"watch:    {folder} at {server.address} (Ctrl-C ends it)")
        if is_loopback(bind):
            tunnel = f"ssh -N -L {port}:{bind}:{port} {socket.gethostname()}"
            say(f"          from another computer: {tunnel}, then open this address there")
        else:
            warn(
                f"{bind} is not only this machine: everybody who reaches port {port} can read the run, without a password"
            )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("watch:    ended; the run goes on")


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD; `BaseHTTPRequestHandler` refuses the other methods."""

    server: ReportServer
    server_version, sys_version = "ditkit", ""
    timeout = 60
    """Seconds that a reader may be silent."""

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the terminal is for what a person should read."""

    def do_HEAD(self) -> None:
        """Answer as to GET, without the content."""
        self.do_GET()

    def do_GET(self) -> None:
        """Send the page or a sample."""
        # Another site could give its name this machine's address, and so read the page in the reader's browser.
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        if is_loopback(self.server.host) and not is_loopback(name):
            self.send_error(HTTPStatus.FORBIDDEN, "this page is for the computer itself: open it as localhost")
            return
        path = urlsplit(self.path).path
        if path == "/":
            page = self.server.page()
            self._start(HTTPStatus.OK, "text/html; charset=utf-8", len(page))
            if self.command == "GET":
                self.wfile.write(page)
        elif file := self.server.sample(path):
            try:
                with file.open("rb") as opened:
                    self._send(file, opened)
            except ConnectionError:  # the reader left
                self.close_connection = True
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, path: Path, file: BinaryIO) -> None:
        stat = path.stat()
        tag, size = f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"', stat.st_size
        if self.headers.get("If-None-Match") == tag:
            self._start(HTTPStatus.NOT_MODIFIED, _KINDS[path.suffix], None, ETag=tag)
            return
        first, last = _range(self.headers.get("Range", ""), size)
        headers = {"ETag": tag, "Accept-Ranges": "bytes"}
        status = HTTPStatus.OK if (first, last) == (0, size - 1) else HTTPStatus.PARTIAL_CONTENT
        if status is HTTPStatus.PARTIAL_CONTENT:
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self._start(status, _KINDS[path.suffix], last - first + 1, **headers)
        file.seek(first)
        remaining = last - first + 1 if self.command == "GET" else 0
        while remaining and (chunk := file.read(min(remaining, _CHUNK_BYTES))):
            self.wfile.write(chunk)
            remaining -= len(chunk)

    def _start(self, status: HTTPStatus, kind: str, length: int | None, **headers: str) -> None:
        self.send_response(status)
        headers |= {"Content-Type": kind, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
        if length is not None:
            headers["Content-Length"] = str(length)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _range(header: str, size: int) -> tuple[int, int]:
    """First and last byte of what a header `Range` asks for; all bytes if it is empty, or asks for something else than one range."""
    unit, _, span = header.partition("=")
    first, dash, last = span.strip().partition("-")
    digits = [text for text in (first, last) if text]
    if unit != "bytes" or not dash or not digits or not all(text.isascii() and text.isdecimal() for text in digits):
        return 0, size - 1
    begin = int(first) if first else max(size - int(last), 0)
    end = min(int(last), size - 1) if first and last else size - 1
    return (begin, end) if begin <= end else (0, size - 1)
