"""The server of a run's page: what it sends, and that it sends nothing else."""

import http.client
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from made_runs import HOSTILE, write_run, write_samples
from report_pages import Page, check_numbers

from ditkit_core.diagnostics.report import server as served
from ditkit_core.diagnostics.report.server import ReportServer, last_lines
from ditkit_core.io.console import keep_log, say


@contextmanager
def serving(
    folder: Path, host: str = "127.0.0.1", log: Path | None = None
) -> Iterator[ReportServer]:
    with ReportServer(folder, host=host, port=0, log=log) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def answer(
    server: ReportServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request(
        method, path, headers={name.replace("_", "-"): text for name, text in headers.items()}
    )
    response = connection.getresponse()
    found = response.status, response.read(), {name: text for name, text in response.getheaders()}
    connection.close()
    return found


def test_the_page_is_of_now_and_its_samples_are_served_where_it_links_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "_FRESH_SECONDS", 0.0)
    run = write_run(tmp_path / "run", captions=HOSTILE)
    with serving(run) as server:
        status, text, headers = answer(server, "/")
        page = Page(text.decode())
        check_numbers(page, run)
        assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
        (policy,) = [
            meta["content"]
            for meta in page.all("meta")
            if meta.get("http-equiv") == "Content-Security-Policy"
        ]
        assert policy.startswith(
            "default-src 'none'; img-src data: 'self'; media-src data: 'self'; style-src 'sha256-"
        )
        assert (
            all(caption in page.shown for caption in HOSTILE[:3]) and page.titles[1] == "Last lines"
        )
        assert "reloads itself" in page.shown, "it is not complete, and may begin to train"
        sources = [video["src"] for video in page.all("video")]
        assert len(sources) == 10 and not any(source.startswith("data:") for source in sources)
        for source in sources:
            status, data, headers = answer(server, f"/{source}")
            assert (status, headers["Content-Type"]) == (200, "video/mp4") and data == (
                run / source
            ).read_bytes()
        write_samples(run / "samples", 41, ("new",), suffix=".png")
        (run / "complete.json").write_text('{"step": 40}')
        page = Page(answer(server, "/")[1].decode())
        assert [image["src"] for image in page.all("img")] == ["samples/step-000041-0.png"]
        assert answer(server, "/samples/step-000041-0.png")[2]["Content-Type"] == "image/png"
        assert "reloads itself" not in page.shown
        assert answer(server, "/", "HEAD")[:2] == (200, b"")


def test_nothing_but_the_page_and_samples_is_sent(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(b"secret")
    (run / "samples" / "link.mp4").symlink_to(secret)
    (run / "samples" / ".hidden.mp4").write_bytes(b"secret")
    (tmp_path / "elsewhere" / "samples").mkdir(parents=True)
    (tmp_path / "elsewhere" / "samples" / "a.mp4").write_bytes(b"secret")
    (run / "expert").symlink_to(tmp_path / "elsewhere")
    (run / "samples.mp4").write_bytes(b"secret")
    paths = [
        "/config.toml", "/metrics.jsonl", "/samples", "/samples/", "/samples/step-000000.json",
        "/samples/link.mp4",
        "/samples/.hidden.mp4", "/expert/samples/a.mp4", "/../secret.mp4",
        "/samples/../../secret.mp4",
        "/samples/%2e%2e/%2e%2e/secret.mp4", "/..%2felsewhere/samples/a.mp4",
        "/../elsewhere/samples/a.mp4", "/samples/..%5c..%5csecret.mp4", "/samples/%00.mp4",
        "/samples.mp4",
        f"/{secret}", "/index.html", "/samples/gone.mp4",
    ]  # fmt: skip
    with serving(run) as server:
        for path in paths:
            status, text, _ = answer(server, path)
            assert status == 404 and b"secret" not in text, path
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
            assert answer(server, "/", method)[0] == 405
        status, text, _ = answer(server, "/<script>alert(1)</script>")
        assert status == 404 and b"<script>" not in text


@pytest.mark.parametrize(
    "name", ["a" * 300, "a/" * 3000, "%ff" * 300, "%f0%9f%98%80" * 100], ids=len
)
def test_a_name_that_no_file_system_accepts_is_not_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    run = write_run(tmp_path / "run")
    with serving(run) as server:
        for path in (f"/samples/{name}.mp4", f"/{name}/samples/a.mp4", f"/{name}"):
            assert answer(server, path)[0] == 404
    assert capfd.readouterr().err == ""


def test_another_site_cannot_read_the_page_through_a_name_of_its_own(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with serving(run) as server:
        for host in ("localhost:8400", "127.0.0.1", "[::1]:1"):
            assert answer(server, "/", Host=host)[0] == 200
        for host in ("example.org", "127.0.0.1.example.org", "", "0.0.0.0"):
            assert answer(server, "/", Host=host)[0] == 403
    with serving(run, host="0.0.0.0") as server:
        assert answer(server, "/", Host="pod-7.example.org")[0] == 200, "asked for"


def test_parts_of_a_video_and_what_a_browser_has_already(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    path = "/samples/step-000000-0.mp4"
    data = (run / path[1:]).read_bytes()
    with serving(run) as server:
        tag = answer(server, path)[2]["ETag"]
        assert answer(server, path, If_None_Match=tag)[:2] == (304, b"")
        for asked, wanted in {
            "bytes=0-9": data[:10], "bytes=10-": data[10:], "bytes=-7": data[-7:], f"bytes=5-{len(data) + 9}": data[5:],
        }.items():  # fmt: skip
            status, part, headers = answer(server, path, Range=asked)
            assert (status, part) == (206, wanted) and headers["Content-Range"].endswith(
                f"/{len(data)}"
            )
        for odd in ("bytes=9-5", "bytes=x-", "lines=0-1", "bytes=", "bytes=-", "bytes=0-1,4-5"):
            status, whole, _ = answer(server, path, Range=odd)
            assert (status, whole) == (200, data) or status == 416, odd


def test_a_run_that_has_not_begun_has_a_page_that_loads_itself_again(tmp_path: Path) -> None:
    log = tmp_path / "nohup.out"
    log.write_text("encoding <b>\n", encoding="utf-8")
    with serving(tmp_path / "later", log=log) as server:
        page = Page(answer(server, "/")[1].decode())
        assert "has not begun to train" in page.shown and "encoding <b>" in page.shown
        assert [
            meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "refresh"
        ] == ["20"]


def test_the_last_lines_are_shown_as_a_terminal_shows_them(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    assert last_lines(log) == [] == last_lines(tmp_path)
    log.write_bytes(b"1/3\r2/3\r3/3\r\n\x1b[32mgreen\x1b[0m\n\n\xff\n" + b"w" * 999)
    assert last_lines(log) == ["3/3", "green", "\ufffd", "w" * 999]
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert last_lines(log, 2) == ["line 99998", "line 99999"]
    run = write_run(tmp_path / "run")
    keep_log(run / "train.log")
    say("[4/5] train")
    keep_log(None)
    with serving(run, log=log) as server:
        text = answer(server, "/")[1].decode()
    other, own, numbers = re.findall("<pre[^>]*>(.*?)</pre>", text, re.DOTALL)
    assert other.endswith("line 99999") and own.endswith("  [4/5] train")
    assert re.search(r"step 40  loss [\d.]+  lr 0.0001", numbers)
