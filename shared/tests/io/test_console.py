"""What reaches stdout and stderr, and what happens when they can no longer be written."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from ditkit_core.documents.tables import Table
from ditkit_core.io import console
from ditkit_core.training.trainer import ProgressBar

HOSTILE = "\x1b]0;title\x07\x1b[2J\rforged \x9b31m \u202egpj"
"""Sets the title, clears the screen, overwrites the line, colours it, and reverses the order of
what follows."""
ESCAPED = "\\x1b]0;title\\x07\\x1b[2J\\rforged \\x9b31m \\u202egpj"


@contextmanager
def unread(what: str) -> Iterator[int]:
    """A file descriptor that cannot be written: a pipe without a reader, or a full disk."""
    if what == "full disk":
        writer = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, writer = os.pipe()
        os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is the full disk of Linux")
@pytest.mark.parametrize(
    ("terminal", "name", "what"),
    [
        ("TTY_COMPATIBLE", "stdout", "full disk"),
        ("TTY_COMPATIBLE", "stderr", "closed pipe"),
        ("", "stdout", "closed pipe"),
        ("", "stderr", "full disk"),
    ],
)
def test_a_stream_that_cannot_be_written_ends_the_printing_and_not_the_run(
    tmp_path: Path, terminal: str, name: str, what: str
) -> None:
    """Every pair of a bar or lines, a stream, and why it cannot be written."""
    program = """
import sys
from pathlib import Path
from ditkit_core.io.console import prepare_streams, progress, say, warn
prepare_streams()
with progress("train", 3) as bar:
    for number in range(3):
        say("x" * 100000)
        warn("y" * 100000)
        bar.update(loss=0.5)
        bar.advance()
Path(sys.argv[1]).write_text("done")
"""
    environment = os.environ | ({terminal: "1"} if terminal else {})
    with unread(what) as writer:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, name: writer}
        command = [sys.executable, "-c", program, str(tmp_path / "end")]
        done = subprocess.run(command, **streams, text=True, check=False, env=environment)
    assert done.returncode == 0 and (tmp_path / "end").read_text() == "done"
    warned = [line for line in (done.stderr or "").splitlines() if not line.startswith("yyy")]
    if name == "stdout" and what == "full disk":
        assert warned == [
            "stdout cannot be written (No space left on device); nothing more is printed there"
        ]
    else:
        assert warned == []
    if name == "stderr":
        assert done.stdout.count("x" * 100000) == 3


def test_control_characters_never_reach_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(head=["name", "frames"], rows=[[HOSTILE, "1"], ["two\nlines", "2"]])
    console.say(f"first\n{HOSTILE}")
    console.warn(f"first\n{HOSTILE}")
    table.show()
    out, err = capsys.readouterr()
    assert err == f"first {ESCAPED}\n"
    assert (
        out.splitlines()[:2] == ["first", ESCAPED]
        and "two\\nlines" in out
        and len(out.splitlines()) == 5
    )

    shown = io.StringIO()
    monkeypatch.setattr(
        console, "CONSOLE", Console(file=shown, force_terminal=True, color_system=None, width=200)
    )
    console.say(HOSTILE)
    table.show()
    assert shown.getvalue().count(ESCAPED) == 2 and not set("\x07\x9b\r\u202e") & set(
        shown.getvalue()
    )
    assert "\x1b]" not in shown.getvalue() and "\x1b[2J" not in shown.getvalue()


def test_a_process_without_streams_runs_to_its_end(tmp_path: Path) -> None:
    program = "import sys; sys.stdout = sys.stderr = None\nfrom ditkit_core.io.console import say, warn\nsay('a'); warn('b')"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_colons_in_a_path_stay_as_they_are() -> None:
    """By default rich replaces `:cat:` by an image of a cat."""
    program = """
from ditkit_core.io.console import say
from ditkit_core.documents.tables import Table
say("runs/:cat:/a")
Table(head=["name"], rows=[["b:cat:"]]).show()
"""
    environment = os.environ | {"TTY_COMPATIBLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert "runs/:cat:/a" in done.stdout and "b:cat:" in done.stdout


@pytest.mark.parametrize(("terminal", "left"), [(False, "about 16 min left"), (True, "0:16:00")])
def test_the_remaining_time_counts_neither_what_precedes_training_nor_earlier_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool, left: str
) -> None:
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        console, "CONSOLE", Console(force_terminal=terminal, width=80, get_time=lambda: now[0])
    )
    # a new run, and one that continues; both have 16 steps of a minute left at the end
    for start in (0, 20):
        with console.progress("train", start + 20) as bar:
            shown = ProgressBar(bar)
            shown.started(start)
            now[0] += 0.0 if start else 3600.0  # validation and samples before training
            for step in range(1, 5):
                now[0] += 60.0
                shown.after_step(start + step, {"loss": 0.5})
        assert (
            left in [line for line in capsys.readouterr().out.splitlines() if "train" in line][-1]
        )


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    console.keep_log(tmp_path / "train.log")
    yield tmp_path / "train.log"
    console.keep_log(None)


def logged(log: Path) -> list[str]:
    """The lines of a log without their times."""
    return [
        re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d  ", "", line)
        for line in log.read_text().splitlines()
    ]


def test_a_log_gets_each_printed_line_and_goes_on_where_it_ended(log: Path) -> None:
    console.say("one\ntwo")
    console.warn(HOSTILE)
    console.keep_log(None)
    console.say("between")
    console.keep_log(log)
    console.complain("error: three")
    assert logged(log) == ["one", "two", ESCAPED, "error: three"]
    assert log.read_text().startswith("20")


def test_a_log_has_plain_progress_where_a_terminal_has_a_bar(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        console, "CONSOLE", Console(file=io.StringIO(), force_terminal=True, width=200)
    )
    with console.progress("train", 20) as bar:
        for _ in range(20):
            bar.update(loss=0.25)
            bar.advance()
    assert logged(log) == [f"train {step}/20  loss 0.2500" for step in range(2, 21, 2)]


def test_a_log_is_begun_again_before_it_grows_large(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "LOG_BYTES", 1000)
    for number in range(100):
        console.say(f"line {number}")
    older = log.with_name("train.log.1")
    assert {path.name for path in log.parent.iterdir()} == {"train.log", "train.log.1"}
    kept = logged(older) + logged(log)
    assert kept == [f"line {number}" for number in range(100 - len(kept), 100)] and len(kept) > 30
    assert older.stat().st_size < 1100


def test_a_log_that_cannot_be_written_is_one_warning(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.mkdir()
    console.say("one")
    console.say("two")
    said = capsys.readouterr()
    assert said.out == "one\ntwo\n"
    assert said.err == f"{log} cannot be written (it is no file); the run goes on without it\n"


PROSE = "the text encoder does not read the last 2515 tokens of 提示語の一部 its caption; shorten the caption"


@pytest.mark.parametrize("indent", ["", "  "])
def test_prose_is_wrapped_by_words_at_the_width_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, indent: str
) -> None:
    shown = terminal(monkeypatch, 40)
    console.say(indent + PROSE)
    lines = shown.getvalue().splitlines()
    assert len(lines) > 2 and all(cell_len(line) <= 40 for line in lines)
    assert " ".join(line.strip() for line in lines) == PROSE
    assert all(line.startswith(f"{indent}  ") for line in lines[1:])


@pytest.mark.parametrize(
    "text",
    [
        f"[data]\nfolder = 'a b c d e f g h i j k l m n o p q r s'\ncaption = '{PROSE}'",
        f"next:     uv run wan-sample --run runs/a --prompt '{PROSE}'",
        f"does not fit; try: uv run wan-train run.toml --fit --data.folder '{PROSE}'",
        f"runs/{'x' * 50}/a.safetensors",
    ],
    ids=["several lines", "columns", "command", "path"],
)
def test_what_is_copied_or_aligned_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    shown = terminal(monkeypatch, 40)
    console.say(text)
    assert shown.getvalue() == f"{text}\n"


def test_nothing_is_wrapped_in_a_file_or_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    console.keep_log(tmp_path / "run.log")
    console.say(PROSE)
    console.warn(PROSE)
    console.keep_log(None)
    assert capsys.readouterr() == (f"{PROSE}\n", f"{PROSE}\n")
    logged = (tmp_path / "run.log").read_text(encoding="utf-8").splitlines()
    assert [line.partition("  ")[2] for line in logged] == [PROSE, PROSE]


def test_a_warning_is_wrapped_where_stderr_is_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(monkeypatch, 40)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    console.warn(PROSE)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 2 and all(cell_len(line) <= 40 for line in lines)


def terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> io.StringIO:
    """What is printed on a terminal of this width."""
    shown = io.StringIO()
    monkeypatch.setattr(
        console, "CONSOLE", Console(file=shown, force_terminal=True, color_system=None, width=width)
    )
    return shown
