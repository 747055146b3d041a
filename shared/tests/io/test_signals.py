"""Signals that end a process, outside and inside of training."""

import signal
import threading

import pytest

from ditkit_core.commands import cli, stage
from ditkit_core.io.signals import Interrupts, terminated_like_interrupted
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.toy import TOY

ENDING = [
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGBREAK") if name in dir(signal)
]


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_that_ends_a_process_is_an_interrupt_and_is_put_back(
    number: signal.Signals,
) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), terminated_like_interrupted():
            signal.raise_signal(number)
        assert signal.getsignal(number) == signal.SIG_DFL
        with terminated_like_interrupted(), Interrupts() as interrupts:
            signal.raise_signal(number)
            assert interrupts.requested, "inside of training the step is finished first"
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_the_first_interrupt_alone_says_what_follows() -> None:
    said: list[str] = []
    with Interrupts(lambda: said.append("stopping")) as interrupts:
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.requested and not said, "programs send it, which read nothing"
    with pytest.raises(KeyboardInterrupt), Interrupts(lambda: said.append("stopping")):
        signal.raise_signal(signal.SIGINT)
        for thread in threading.enumerate():
            if thread.name == "ditkit-interrupt":
                thread.join()
        assert said == ["stopping"]
        signal.raise_signal(signal.SIGINT)
    assert said == ["stopping"]


@pytest.mark.parametrize("number", ENDING)
def test_an_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with terminated_like_interrupted():
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", ENDING)
@pytest.mark.parametrize(
    ("command", "flags"),
    [("encode", []), ("encode", ["--verify-cache"]), ("sample", []), ("export", [])],
)
def test_every_command_says_that_a_signal_ended_it(
    number: signal.Signals,
    command: str,
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "check_paths", lambda *_, **named: None)
    monkeypatch.setattr(stage, "_stage", lambda *_: lambda *_: signal.raise_signal(number))
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert cli.run(TOY, command, ["--train.steps", "1", *flags]) == 130
    finally:
        signal.signal(number, before)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("interrupted") and err.count("\n") == 1


def test_ctrl_c_while_libraries_are_imported_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def importing() -> ModelSpec:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "check_paths", lambda *_, **named: None)
    family = cli.Family(name="toy", presets=("tiny",), demo=TOY.demo.config, spec=importing)
    assert cli.start(family, "train", ["--train.steps", "1"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")
