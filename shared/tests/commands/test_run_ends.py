"""Whom a run tells when it ends: a command or a webhook, which never changes how it ends and never
gets into what is published."""

import json
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open
from toy_world import World

from ditkit_core.commands import stage
from ditkit_core.commands.options import TrainOptions
from ditkit_core.commands.report import loss_rise
from ditkit_core.config.command_words import command_words
from ditkit_core.config.resolve import resolve
from ditkit_core.errors import UserError
from ditkit_core.run.config import RunConfig
from ditkit_core.training import trainer
from ditkit_core.training.optim.optimizers import OptimConfig

WRITE = "import json, os; open('told.json', 'a').write(json.dumps({k: v for k, v in os.environ.items() if k.startswith('DITKIT_')}) + '\\n')"
HELD_OUT = ("--held_out.clips", "2")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    return World(tmp_path, captions=0)


def command(program: str) -> str:
    """The value of a key that runs a program in Python."""
    return json.dumps([sys.executable, "-c", program])


BOTH = ("--run.on_end", command(WRITE), "--run.on_error", command(WRITE))


def told() -> list[dict[str, str]]:
    path = Path("told.json")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_complete_run_calls_its_command_once(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("run", 2, *BOTH, *HELD_OUT) == 0
    (about,) = told()
    assert (
        about["DITKIT_RUN"] == str((world.folder / "run").resolve())
        and about["DITKIT_NAME"] == "run"
    )
    assert (about["DITKIT_STATUS"], about["DITKIT_STEP"], about["DITKIT_REASON"]) == (
        "complete",
        "2",
        "",
    )
    assert (
        about["DITKIT_VERDICT"].startswith("validation loss")
        and Path(about["DITKIT_REPORT"]).is_file()
    )
    assert "run.on_end: " in capsys.readouterr().out
    assert world.train("run", 2, *BOTH, *HELD_OUT) == 0 and len(told()) == 1, (
        "it was complete already"
    )
    assert world.train("run", 3, *BOTH, *HELD_OUT) == 0 and len(told()) == 2


def test_a_run_that_fails_or_is_stopped_says_why(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (world.folder / "clips" / "extra.png").write_bytes(b"no image")
    assert world.train("run", 1, *BOTH) == 1
    (about,) = told()
    assert (
        about["DITKIT_STATUS"] == "failed"
        and "extra.png" in about["DITKIT_REASON"]
        and about["DITKIT_STEP"] == "0"
    )
    (world.folder / "clips" / "extra.png").unlink()
    original = trainer.training_step

    def step(*arguments: Any, **settings: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return original(*arguments, **settings)

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "training_step", step)
        assert world.train("run", 3, *BOTH) == 130
    assert (
        told()[1]["DITKIT_STATUS"] == "stopped"
        and "stopped at step 1" in told()[1]["DITKIT_REASON"]
    )
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(trainer, "training_step", lambda *given, **named: 1 / 0)
        world.train("run", 3, *BOTH)
    assert (
        told()[2]["DITKIT_STATUS"] == "failed" and "division by zero" in told()[2]["DITKIT_REASON"]
    )
    assert world.train("run", 3, *BOTH) == 0 and told()[3]["DITKIT_STATUS"] == "complete"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (command("raise SystemExit(3)"), "ended with status 3, see "),
        ("no-such-program --now", "failed (No such file or directory"),
        ('"."', "run.on_end failed ("),
        ("http://127.0.0.1:9/secret-token", "run.on_end failed ("),
    ],
)
def test_what_fails_is_a_warning_and_the_run_is_complete(
    world: World, capsys: pytest.CaptureFixture[str], value: str, said: str
) -> None:
    assert world.train("run", 1, "--run.on_end", value) == 0
    error = capsys.readouterr().err
    assert said in error or said.replace("failed (No", "failed ([Errno 2] No") in error
    assert "the run itself is not affected" in error and "secret-token" not in error
    assert (world.folder / "run" / "exports" / "run.safetensors").is_file()


WORKS = """
import pathlib, time
print("working", flush=True)
end = time.monotonic() + 240
while not pathlib.Path("go").exists() and time.monotonic() < end:
    time.sleep(0.02)
pathlib.Path("later").touch()
"""
"""Ends when it may, however long the test takes to look at it."""


def test_a_command_that_takes_long_is_left_alone(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ditkit_core.commands.report._COMMAND_SECONDS", 0.2)
    assert world.train("run", 1, "--run.on_end", command(WORKS)) == 0
    later = world.folder / "later"
    said = capsys.readouterr().out.replace(f"{world.folder}/", "")
    assert "is still working; its output is in run/on_end.log" in said and not later.exists()
    (world.folder / "go").touch()
    end = time.monotonic() + 120
    while not later.exists():
        assert time.monotonic() < end, "it was ended"
        time.sleep(0.02)


class Webhook(BaseHTTPRequestHandler):
    """Keeps what it is sent, and answers with a status."""

    def do_POST(self) -> None:
        server: Any = self.server
        server.sent.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(server.status)
        self.end_headers()

    def log_message(self, *given: Any) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def webhook() -> Iterator[Any]:
    server: Any = HTTPServer(("127.0.0.1", 0), Webhook)
    server.sent, server.status = [], 204
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_webhook_gets_json_that_chats_show(
    world: World, webhook: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"http://127.0.0.1:{webhook.server_port}/secret-token"
    assert world.train("run", 1, "--run.on_end", address) == 0
    (sent,) = webhook.sent
    assert sent["text"] == sent["content"] and sent["text"].startswith("run complete at step 1: ")
    assert (sent["status"], sent["name"]) == ("complete", "run")
    assert "run.on_end: the webhook was called" in capsys.readouterr().out
    webhook.status = 500
    assert world.train("run", 2, "--run.on_end", address) == 0
    assert "run.on_end failed (the webhook answered 500)" in capsys.readouterr().err


def test_what_may_be_a_secret_is_in_nothing_that_is_published(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "http://127.0.0.1:9/secret-token"
    assert world.train("run", 1, "--run.on_end", secret, "--run.on_error", secret) == 0
    assert world.run("export", "--run", "run", "--card", "-") == 0
    assert "secret-token" not in capsys.readouterr().out.replace("secret-token/", "")
    for path in (world.folder / "run").rglob("*"):
        if path.is_file() and path.name != "config.toml":
            assert b"secret-token" not in path.read_bytes(), path
    assert "secret-token" in (world.folder / "run" / "config.toml").read_text(), (
        "the run continues with it"
    )
    with safe_open(world.folder / "run" / "exports" / "run.safetensors", "pt") as file:
        assert "on_end = []" in file.metadata()["ditkit.config"]


def test_only_a_training_of_the_first_rank_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(
        "ditkit_core.commands.report.tell", lambda config, reason="", **named: calls.append(reason)
    )
    config = resolve(RunConfig, flags={"run.on_error": ("true",)})
    for rank, command, options in (
        (1, "train", TrainOptions()),
        (0, "encode", TrainOptions()),
        (0, "train", TrainOptions(plan=True)),
        (0, "train", TrainOptions()),
    ):
        monkeypatch.setattr(stage, "launched", lambda rank=rank: SimpleNamespace(rank=rank))
        with pytest.raises(UserError), stage._told(command, config, options):
            raise UserError("why")
    assert calls == ["why"]


@pytest.mark.parametrize(
    ("losses", "has_risen"),
    [
        ([1.3, 5.3, 6.8, 5.9], True),
        ([1.3, 0.4, 2.9, 1.2], False),  # noise levels differ from step to step
        ([1.3], False),
        ([], False),
        ([0.3, 1.1, 0.8] * 20 + [0.4, 1.2, 0.9] * 20, False),
        ([0.3, 1.1, 0.8] * 20 + [0.6, 1.6, 1.2] * 20, True),
        ([0.6, 1.6, 1.2] * 20 + [0.3, 1.1, 0.8] * 20, False),
    ],
)
def test_a_loss_that_rose_is_told_from_noise(losses: list[float], has_risen: bool) -> None:
    assert bool(loss_rise(losses)) == has_risen


def test_a_learning_rate_that_cannot_learn_is_said_at_the_start_and_at_the_end(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("high", 8, "--optim.lr", "0.2") == 0
    printed = capsys.readouterr().err
    assert "optim.lr = 0.2 is far above the learning rates of adamw" in printed
    assert re.search(
        r"the training loss rose from [\d.]+ to [\d.]+ \(means .*\): a lower optim\.lr", printed
    )
    assert world.train("usual", 8, "--optim.lr", "1e-3") == 0
    printed = capsys.readouterr().err
    assert "far above" not in printed and "the training loss rose" not in printed


@pytest.mark.parametrize(
    ("fields", "is_high"),
    [
        ({"lr": 1e-2}, False),
        ({"lr": 2e-2}, True),
        ({"name": "muon", "lr": 1.0}, True),  # its updates have the size of AdamW's
        ({"name": "prodigy", "lr": 1.0}, False),
        ({"lr_pattern": ("q=0.5",)}, True),
        ({"lr_pattern": ("q=5e-3",)}, False),
    ],
)
def test_a_high_learning_rate_is_advised_against(fields: dict[str, Any], is_high: bool) -> None:
    advice = OptimConfig(**fields).advice
    assert ("is far above the learning rates of" in advice) == is_high and "\n" not in advice
    assert not is_high or ("q = 0.5" in advice) == ("lr_pattern" in fields)


def test_a_command_is_a_text_or_a_list_and_no_shell_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert command_words(('notify "two words" a&b=c $5',), "run.on_end") == [
        "notify",
        "two words",
        "a&b=c",
        "$5",
    ]
    assert command_words(("a b", "c"), "run.on_end") == ["a b", "c"]
    assert (
        command_words(("https://x/y z",), "run.on_end") == ["https://x/y z"]
        and command_words((), "x") == []
    )
    for wrong in (('notify "open',), ("",), (" ",), ("", "a"), ("a\0",)):
        with pytest.raises(UserError, match=r"^run\.on_end"):
            resolve(RunConfig, flags={"run.on_end": wrong})


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("notify; poweroff", ";"),
        ("notify $DITKIT_VERDICT", "$DITKIT_VERDICT"),
        ('notify "it says: ${DITKIT_VERDICT}"', "${DITKIT_VERDICT}"),
        ("cat $(ls) x", "$("),
        ("echo `date`", "`"),
        ("echo done | mail me", "|"),
        ("echo done >> log.txt", ">"),
        ("sync && poweroff", "&&"),
        ("poweroff &", "&"),
        ("sh -c notify; ls", ";"),
        ("~/bin/notify", "~/"),
    ],
)
def test_what_only_a_shell_would_read_is_refused(text: str, mark: str) -> None:
    for key in ("on_end", "on_error"):
        with pytest.raises(
            UserError,
            match=rf"^run\.{key} = .*: no shell reads {re.escape(mark)}[^\n]*\"-c\"[^\n]*$",
        ):
            resolve(RunConfig, flags={f"run.{key}": (text,)})


@pytest.mark.parametrize(
    "text",
    [
        "notify 'a; b | c > $HOME'",
        r"notify a\;b",
        'notify "a; b | c"',
        "curl https://x.y/z?a=b&c=d",
        """sh -c 'notify "$DITKIT_VERDICT"; poweroff'""",
        'bash -lc "notify $DITKIT_VERDICT && poweroff"',
        "notify 5$ a~b",
    ],
)
def test_what_is_quoted_or_for_a_shell_that_is_named_is_no_mistake(text: str) -> None:
    resolve(RunConfig, flags={"run.on_end": (text,)})
    resolve(RunConfig, flags={"run.on_end": ("notify", "a; b", "$HOME")})
