"""The command ditkit-ui: serves the page on this machine and opens a browser."""

import argparse
import secrets
import socket
import webbrowser
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from nicegui import app, ui

from ditkit_core.diagnostics.report.server import is_loopback
from ditkit_core.errors import UserError, keys_shown
from ditkit_core.io.console import prepare_streams, say, warn
from ditkit_ui import __version__, texts
from ditkit_ui.app import add_pages
from ditkit_ui.captions import CaptionEdits
from ditkit_ui.families import installed_families
from ditkit_ui.folders import OpenedFolders
from ditkit_ui.job import Job
from ditkit_ui.workbench import Workbench
from ditkit_ui.worker import Worker


class _Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one line, as those of the other commands."""

    def error(self, message: str) -> NoReturn:
        warn(f"error: {message}; --help names the options")
        self.exit(2)


def page_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = _Parser(
        prog="ditkit-ui",
        description="A page in the browser for runs: begin, data, settings, run, queue, compare.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folders", nargs="*", help="folders to open besides the one that it is started in"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at; by default only this machine can open the page",
    )
    parser.add_argument("--port", type=int, default=8401, help="port; 0 for a free one")
    parser.add_argument("--no-browser", action="store_true", help="open no browser")
    parser.add_argument("--version", action="version", version=f"ditkit-ui {__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the page until the process is interrupted; returns the exit status."""
    prepare_streams()
    options = page_parser().parse_args(argv)
    opened = OpenedFolders([Path.cwd()])
    try:
        with keys_shown(), TemporaryDirectory(prefix="ditkit-ui-") as logs:
            for folder in options.folders:
                opened.open(folder)
            installed_families()
            port = _free_port(options.host, options.port)
            _serve(opened, options.host, port, Path(logs), browser=not options.no_browser)
    except UserError as error:
        warn(f"error: {error}")
        return 1
    except KeyboardInterrupt:  # uvicorn has closed, and passes the signal on
        warn("interrupted")
        return 130
    return 0


def _free_port(host: str, port: int) -> int:
    """The port to listen at.

    Raises:
        UserError: If the address is not of this machine, or the port is in use.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", "") or error
        raise UserError(texts.PORT_TAKEN.format(host=host, port=port, reason=reason)) from error


def _serve(opened: OpenedFolders, host: str, port: int, logs: Path, *, browser: bool) -> None:
    token, undos = secrets.token_urlsafe(24), list[Callable[[], bool]]()
    captions = CaptionEdits(opened, undos)
    bench = Workbench(
        opened=opened,
        token=token,
        worker=Worker(),
        planner=Worker(),
        captions=captions,
        undos=undos,
        captioner=Job(logs / "captions", on_end=partial(captions.watch, ())),
        fetcher=Job(logs / "fetched"),
    )
    add_pages(bench, host=host, port=port)
    name = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):
        name = socket.gethostname()
    address = f"http://{name}:{port}/?token={token}"
    say(texts.STARTED.format(address=address))
    if is_loopback(host):
        say(texts.TUNNEL.format(command=f"ssh -N -L {port}:{host}:{port} {socket.gethostname()}"))
    else:
        warn(texts.PUBLIC.format(host=host))
    if browser:
        app.on_startup(lambda: webbrowser.open(address))
    ui.run(
        host=host,
        port=port,
        title=texts.TITLE,
        language="en-US",
        dark=None,
        reload=False,
        show=False,
        tailwind=False,
        show_welcome_message=False,
        favicon="🎞️",
    )


if __name__ == "__main__":
    raise SystemExit(main())
