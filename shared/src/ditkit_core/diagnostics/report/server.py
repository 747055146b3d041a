"""Serves the page of a run, as of now, with the last lines of its logs, and the samples in its
folder. It reads only, and knows no other file."""

import ipaddress
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from werkzeug.exceptions import Forbidden, HTTPException, MethodNotAllowed, NotFound
from werkzeug.utils import send_file
from werkzeug.wrappers import Request, Response

from ditkit_core.diagnostics.report.data import read_sections
from ditkit_core.diagnostics.report.page import RELOAD_SECONDS, report_page
from ditkit_core.diagnostics.report.words import format_number
from ditkit_core.documents.html import html_page
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
    """The last lines of a text file as a terminal would show them; none if it is missing,
    unreadable or no ordinary file.

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


def last_lines_of_logs(folder: Path, log: Path | None = None) -> dict[str, list[str]]:
    """The last lines of the files in a run's folder, and of one that its output was redirected
    into, by name; without empty ones.

    Args:
        folder: The run's folder, with or without folders of experts.
        log: The file with the output of the run's command.
    """
    run = RunFolder(folder)
    logs = {} if log is None else {str(log): last_lines(log)}
    logs[run.log.name] = last_lines(run.log)
    for metrics in (run.metrics, *sorted(folder.glob("*/metrics.jsonl"))):
        logs[metrics.relative_to(folder).as_posix()] = [
            _numbers(line) for line in last_lines(metrics)
        ]
    for path in (run.previews_log, run.verification_log):
        logs[path.name] = last_lines(path)
    return {name: [line[:_LONGEST] for line in lines] for name, lines in logs.items() if lines}


def _numbers(line: str) -> str:
    """A line of a metrics file as text, without the numbers of single parts; the line itself if it
    is none."""
    try:
        row = json.loads(line)
        step = int(row.pop("step"))
        numbers = {name: value for name, value in row.items() if "/" not in name}
        cells = (
            f"{name} {format_number(value)}"
            for name, value in numbers.items()
            if isinstance(value, int | float)
        )
        return "  ".join([f"step {step}", *cells])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return line  # incomplete while the run writes, or cut


_FRESH_SECONDS = 5.0
"""Age up to which a page is sent again: many readers cost a machine that trains no more than
one."""
_KINDS = (".mp4", ".png", ".jpg", ".webp")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def sample_file(folder: Path, url_path: str) -> Path:
    """The sample of a run at a path of a URL, as the page links it; NotFound for everything
    else."""
    parts = url_path.split("/")[1:]
    # No part may leave the folder, by its name or as a link to elsewhere.
    if len(parts) in (2, 3) and parts[-2] == "samples" and not any(map(_is_odd, parts)):
        file = folder.joinpath(*parts)
        is_linked = any(path.is_symlink() for path in (file, *list(file.parents)[: len(parts) - 1]))
        if file.suffix in _KINDS and not is_linked and file.is_file():
            return file
    raise NotFound


class ReportServer(ThreadingMixIn, WSGIServer):
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
        self.set_app(self._answer)

    @property
    def address(self) -> str:
        """The URL of the page on this machine."""
        return f"http://{self.host}:{self.server_address[1]}/"

    def page(self) -> bytes:
        """The page as of now, or of a few seconds ago."""
        with self._lock:
            if time.monotonic() - self._written > _FRESH_SECONDS:
                self._page, self._written = (
                    self._built().encode("utf-8", "replace"),
                    time.monotonic(),
                )
            return self._page

    def _built(self) -> str:
        logs = last_lines_of_logs(self.folder, self.log)
        try:
            return report_page(self.folder, read_sections(self.folder), logs)
        except UserError:
            name = self.folder.resolve().name
            return html_page(
                "diagnostics/report/later.html",
                title=f"{name}: report",
                name=name,
                reload=RELOAD_SECONDS,
                logs=logs,
            )

    def _answer(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        """Answer GET and HEAD, as WSGI wants it."""
        try:
            response = self._response(Request(environ))
        except HTTPException as error:
            response = error.get_response(environ)
        response.headers |= {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
        return response(environ, start)

    def _response(self, request: Request) -> Response:
        # Another site could give its name this machine's address, and so read the page in the
        # reader's browser.
        if is_loopback(self.host) and not is_loopback(
            urlsplit(f"//{request.environ.get('HTTP_HOST', '')}").hostname or ""
        ):
            raise Forbidden("this page is for the computer itself: open it as localhost")
        if request.method not in ("GET", "HEAD"):
            raise MethodNotAllowed(["GET", "HEAD"])
        if request.path == "/":
            return Response(self.page(), content_type="text/html; charset=utf-8")
        try:
            return send_file(sample_file(self.folder, request.path), request.environ)
        except (OSError, ValueError) as error:
            # a name that no file system accepts, or a sample that may not be read
            raise NotFound from error


def _is_odd(part: str) -> bool:
    return not part or part.startswith(".") or bool(set(part) & set("\\:\0"))


class _Handler(WSGIRequestHandler):
    timeout = 60
    """Seconds that a reader may be silent."""

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the terminal is for what a person should read."""


def watch(folder: Path, *, bind: str, port: int, log: str = "") -> None:
    """Serve the page of a run until the process is interrupted; this reads the run's files, and
    changes none.

    Args:
        bind: Address to listen at.
        port: Port to listen at; 0 for a free one.
        log: File with the output of the run's command; empty for none.
    """
    try:
        server = ReportServer(folder, host=bind, port=port, log=local_path(log) if log else None)
    except OSError as error:
        raise UserError(
            f"cannot listen at {bind}:{port} ({error.strerror or error}); choose another --port, "
            f"or --port 0 for a free one"
        ) from error
    with server:
        port = server.server_address[1]
        say(f"watch:    {folder} at {server.address} (Ctrl-C ends it)")
        if is_loopback(bind):
            tunnel = f"ssh -N -L {port}:{bind}:{port} {socket.gethostname()}"
            say(f"          from another computer: {tunnel}, then open this address there")
        else:
            warn(
                f"{bind} is not only this machine: everybody who reaches port {port} can read the "
                f"run, without a password"
            )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("watch:    ended; the run goes on")
