"""The command line as a person meets it, and what is printed."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import TestCase

import pytest
from rich.console import Console

import ditkit_core
from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.commands import cli, stage
from ditkit_core.commands.options import (
    OPTIONS,
    STAGES,
    ExportOptions,
    SampleOptions,
    TrainOptions,
    command_line,
)
from ditkit_core.errors import UserError
from ditkit_core.io import console, hushed
from ditkit_core.io.run_dir import RunFolderConfig
from ditkit_core.run.config import RunConfig
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY
from ditkit_core.training.config import TrainConfig


class Stages(SimpleNamespace):
    """Stand-ins that remember what they were called with, or raise."""

    def __init__(self, error: BaseException | None = None) -> None:
        def stage(name: str) -> Any:
            def call(spec: Any, config: RunConfig, options: Any) -> None:
                self.called = (name, config, options)
                if error is not None:
                    raise error

            return call

        super().__init__(
            called=None, **{name: stage(name) for name in ("train", "encode", "sample", "export")}
        )


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    return install(monkeypatch, Stages())


def install(monkeypatch: pytest.MonkeyPatch, stages: Stages) -> Stages:
    monkeypatch.setattr(cli, "check_paths", lambda *given, **named: None)
    monkeypatch.setattr(stage, "_stage", lambda command, options: getattr(stages, command))
    return stages


@pytest.mark.parametrize(("command", "verb"), list(STAGES))
def test_every_stage_of_the_table_is_there(command: str, verb: str) -> None:
    options = SimpleNamespace(
        **{its: its == verb for name, its in STAGES if name == command and its}
    )
    found = stage._stage(command, options)
    assert callable(found) and found.__name__ == STAGES[command, verb][1]
    assert not verb or verb in dir(OPTIONS[command])


@pytest.mark.parametrize("kind", list(OPTIONS.values()), ids=list(OPTIONS))
def test_an_option_needs_and_excludes_options_that_there_are(kind: type) -> None:
    names = {field.name for field in fields(kind)}
    for field in fields(kind):
        for rule in (*field.metadata.get("needs", ()), *field.metadata.get("excludes", ())):
            others, _, message = rule.partition(": ")
            assert message and others and set(others.split()) <= names - {field.name}


@pytest.mark.parametrize(
    ("command", "argv", "message"),
    [
        (
            "train",
            ["--report", "--check"],
            "--check and --report: each does its work and stops; leave one of them out",
        ),
        (
            "train",
            ["--host", "8GiB", "--check"],
            "--host limits host memory in a plan; add --plan or --fit",
        ),
        (
            "export",
            ["--adapter", "x", "--merge", "--strength", "0", "--step", "0"],
            "--step is for a run, and --adapter",
        ),
        (
            "export",
            ["--strength", "0"],
            "--strength scales an adapter file that is merged; add --adapter FILE",
        ),
    ],
)
def test_options_are_given_with_those_that_they_go_with(
    stages: Stages, capsys: pytest.CaptureFixture[str], command: str, argv: list[str], message: str
) -> None:
    assert cli.run(TOY, command, argv) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}") and stages.called is None
    assert cli.run(TOY, command, [*argv, "--help"]) == 0


def test_train_is_called_with_the_resolved_configuration(stages: Stages, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[adapter]\nrank = 4\n[train]\nsteps = 3\n")
    argv = [str(tmp_path / "run.toml"), "--train.steps", "5", "--init-from", "runs/a"]
    assert cli.run(TOY, "train", argv) == 0
    name, config, options = stages.called
    assert (name, config.adapter.rank, config.train.steps) == ("train", 4, 5)
    assert options == TrainOptions(init_from="runs/a")


def test_a_command_computes_fp32_in_fp32(stages: Stages, tmp_path: Path) -> None:
    import torch

    # torch's own default, which rounds what convolutions make
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")  # and what any library may do
    (tmp_path / "run.toml").write_text("[train]\nsteps = 3\n")
    assert cli.run(TOY, "train", [str(tmp_path / "run.toml")]) == 0
    assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
    assert "tf32" not in (
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.cuda.matmul.fp32_precision,
    )
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_demo_combines_with_every_other_flag(stages: Stages, tmp_path: Path) -> None:
    (tmp_path / "demo.toml").write_text(
        '[data]\nfolder = "{run}/inputs/clips"\n[train]\nsteps = 3\n'
    )
    spec = altered(TOY, config=tmp_path / "demo.toml")
    assert cli.run(spec, "train", ["--demo", "--run.folder", "here", "--adapter.rank=2"]) == 0
    _, config, options = stages.called
    assert (config.data.folder, config.train.steps, config.adapter.rank) == (
        "here/inputs/clips",
        3,
        2,
    )
    assert options == TrainOptions(demo=True)


def test_sample_and_export_go_on_with_a_run(stages: Stages, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        '[run]\nfolder = "before/it/moved"\n[adapter]\nrank = 4\n'
    )
    assert (
        cli.run(
            TOY,
            "sample",
            ["--run", str(tmp_path), "--prompt", "a cat", "--adapter", "x.safetensors"],
        )
        == 0
    )
    name, config, options = stages.called
    assert (name, config.run.folder, config.adapter.rank) == ("sample", str(tmp_path), 4)
    assert options == SampleOptions(
        run=(str(tmp_path),), prompt=("a cat",), adapter="x.safetensors"
    )
    argv = [
        "--run",
        str(tmp_path),
        "--to",
        "diffusers",
        "--dtype",
        "fp32",
        "--merge",
        "--out",
        "o",
        "--step",
        "20",
    ]
    assert cli.run(TOY, "export", argv) == 0
    assert stages.called[2] == ExportOptions(
        to="diffusers", dtype="fp32", merge=True, out="o", step=20
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "nothing to work on: give a run file (toy-train run.toml), or try toy-train --demo"),
        (
            ["--adapter.rnak", "3"],
            "unknown key --adapter.rnak on the command line; did you mean --adapter.rank?",
        ),
        (
            ["--adapter.rank", "x"],
            'adapter.rank on the command line must be a whole number, not "x"',
        ),
        (["no.toml"], "cannot read the run file no.toml: No such file or directory"),
        (["--run", "nowhere"], "nowhere is not the folder of a run"),
        (["--train.steps", "-1"], "train."),
        (["--step", "3"], "unknown key --step"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_status_2(
    stages: Stages, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert cli.run(TOY, "train", argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1
    assert stages.called is None


def test_a_mistake_that_a_stage_meets_is_one_line_and_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, Stages(UserError("clip a.mp4 is empty\nreplace it")))
    assert cli.run(TOY, "train", ["--train.steps", "1"]) == 1
    assert capsys.readouterr().err == "error: clip a.mp4 is empty\\nreplace it\n"


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("train", ("--plan",)),
        ("train", ("--check",)),
        ("sample", ()),
        ("encode", ()),
        ("export", ()),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else given,
)
def test_only_training_runs_in_several_processes(
    stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    command: str, flags: tuple[str, ...],
) -> None:  # fmt: skip
    """What else torchrun starts is refused before any work."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    monkeypatch.setattr(cli, "launched", lambda: SimpleNamespace(rank=0, size=2))
    given = (
        ["--run", str(tmp_path)]
        if command in ("sample", "export")
        else ["--data.folder", str(tmp_path)]
    )
    assert cli.run(TOY, command, [*given, *flags]) == 2
    assert capsys.readouterr().err == (
        f"error: only training runs in several processes; start {TOY.name}-{command} with these "
        f"options without torchrun\n"
    )
    assert stages.called is None
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR", (
        "where a connection breaks, the frames of torch would hide the line that says why"
    )


def test_several_processes_without_their_places_do_not_each_train_the_whole_run(
    stages: Stages, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.run(TOY, "train", ["--train.steps", "1"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: WORLD_SIZE = 2 is set without RANK and LOCAL_RANK"
    )
    assert stages.called is None


def test_an_interrupt_is_one_line_and_exit_status_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, Stages(KeyboardInterrupt()))
    assert cli.run(TOY, "train", ["--train.steps", "1"]) == 130
    kept = "interrupted: what was encoded and saved is kept, and the same command continues\n"
    assert capsys.readouterr().err == kept
    assert cli.run(TOY, "train", ["--train.steps", "1", "--plan"]) == 130
    assert capsys.readouterr().err == "interrupted\n"

    def terminated(*given: object) -> None:
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(stage, "_stage", lambda *given: terminated)
    assert cli.run(TOY, "encode", ["--train.steps", "1"]) == 130
    assert capsys.readouterr().err == kept and signal.getsignal(signal.SIGTERM) == before


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Stages(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.run(TOY, "train", ["--train.steps", "1"])


def test_what_print_config_prints_is_a_run_file(
    stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(TOY, "train", ["--print-config", "--adapter.rank", "7"]) == 0
    (tmp_path / "run.toml").write_text(capsys.readouterr().out)
    assert stages.called is None
    assert cli.run(TOY, "train", [str(tmp_path / "run.toml")]) == 0
    written = RunConfig(run=RunFolderConfig(folder="runs/toy"), adapter=AdapterConfig(rank=7))
    assert stages.called[1] == replace(written, train=TrainConfig(kernels="torch")), (
        "what auto is on a CPU"
    )


@pytest.mark.parametrize(
    ("flags", "kernels"),
    [
        ((), "torch"),
        (("--check",), "torch"),
        (("--audit-precision",), "torch"),
        (("--plan",), "torch"),
        (("--plan", "--gpus", "24GiB"), "auto"),  # whose plan says what it would be there
        (("--fit", "--gpus", "24GiB"), "auto"),  # and writes a run file for any machine
    ],
)
def test_commands_that_run_a_model_here_get_the_kernels_that_run_here(
    stages: Stages, flags: tuple[str, ...], kernels: str
) -> None:
    assert cli.run(TOY, "train", ["--adapter.rank", "7", *flags]) == 0
    assert stages.called[1].train.kernels == kernels


def test_a_run_has_the_name_of_its_run_file_unless_one_is_set(
    stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def folder(*argv: str) -> str:
        assert cli.run(TOY, "train", argv) == 0
        return str(stages.called[1].run.folder)

    Path("my_cat.toml").write_text("[train]\nsteps = 3\n")
    Path("named.toml").write_text('[run]\nfolder = "elsewhere/dog"\n')
    assert folder("my_cat.toml") == "runs/my_cat"
    assert folder("named.toml") == "elsewhere/dog"
    assert folder("my_cat.toml", "--run.folder", "other") == "other"
    assert folder("--train.steps", "3") == "runs/toy"
    stored = tmp_path / "runs" / "run"
    stored.mkdir(parents=True)
    (stored / "config.toml").write_text('[run]\nfolder = "runs/run"\n')
    assert folder("--run", "runs/run") == "runs/run"
    assert folder("my_cat.toml", "--run", "runs/run") == "runs/run", (
        "a stored run goes on where it is"
    )


def test_print_config_changed_prints_the_shortest_run_file(
    stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--adapter.rank", "7", "--train.pipelined", "true"]
    assert cli.run(TOY, "train", ["--print-config", "--changed", *flags]) == 0
    text = capsys.readouterr().out
    assert (
        text == '[run]\nfolder = "runs/toy"\n\n[adapter]\nrank = 7\n\n[train]\npipelined = true\n'
        and stages.called is None
    )
    assert cli.run(TOY, "train", ["--changed", *flags]) == 0
    assert capsys.readouterr().out == text
    file = tmp_path / "run.toml"
    file.write_text("[adapter]\nrank = 7\n")
    assert cli.run(TOY, "train", [str(file), "--changed"]) == 0
    assert capsys.readouterr().out == '[run]\nfolder = "runs/run"\n\n[adapter]\nrank = 7\n', (
        "whatever its name will be"
    )


def test_no_default_is_shown_for_a_folder_that_the_run_file_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flags in (["--help"], ["--help", "run"], ["--print-schema"]):
        assert cli.run(TOY, "train", flags) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert (
            "Folder of the run, by default in `runs/` with the name of the run file" in text
            and "runs/run" not in text
        )


@pytest.mark.exhaustive  # of the families' commands, which are installed, it is daily
def test_help_version_and_mistakes_answer_before_slow_libraries_are_imported() -> None:
    program = """
import sys
from ditkit_core.commands import cli
from ditkit_core.testing.toy import TOY
statuses = [cli.run(TOY, "train", argv) for argv in (["--help"], ["--version"], ["--print-config"], ["--x.y", "1"])]
slow = {"diffusers", "transformers", "peft", "torchao", "tensorboard", "av", "accelerate", "huggingface_hub"}
import json
import logging
print(json.dumps([statuses, sorted(slow & sys.modules.keys())]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [[0, 0, 0, 2], []]
    assert (
        done.stdout.startswith("usage: toy-train")
        and f"toy-train {ditkit_core.__version__} (torch" in done.stdout
    )


def test_without_a_terminal_a_bar_prints_a_line_a_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("train", 1000, completed=500) as bar:
        for step in range(500):
            bar.update(
                loss=1 / (step + 1),
                lr=1e-4,
                seconds=0.5,
                tokens_per_second=99.6,
                peak_memory_bytes=3 * 2**29,
            )
            bar.advance()
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0]
        == "train 600/1000  loss 0.0100  lr 1.00e-04  0.50 s/step  100 tokens/s  peak 1.50 GiB"
    )
    assert len(lines) == 5 and lines[-1].startswith("train 1000/1000")


def test_a_short_bar_prints_each_step_once(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("encode", 3) as bar:
        for _ in range(3):
            bar.advance()
    assert capsys.readouterr().out.splitlines() == ["encode 1/3", "encode 2/3", "encode 3/3"]


def test_parts_of_few_items_are_no_lines_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("encode text", 2) as bar:
        for _ in range(40):
            bar.advance(1 / 20)
    assert capsys.readouterr().out.splitlines() == ["encode text 1/2", "encode text 2/2"]


def test_an_option_of_the_wrong_type_is_named_as_it_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(TOY, "export", ["--run", "runs/run", "--to", "kohya"]) == 2
    assert (
        "error: --to on the command line must be one of official, diffusers"
        in capsys.readouterr().err
    )


def test_a_long_bar_says_after_a_minute_how_long_it_will_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with console.progress("encode text", 100) as bar:
        for _ in range(200):
            now[0] += 45.0
            bar.advance(0.5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "encode text 1/100  about 2 h 28 min left", (
        "the first is told before a tenth is done"
    )
    assert lines[1] == "encode text 10/100  about 2 h 15 min left"
    assert (
        lines[-2:] == ["encode text 90/100  about 15 min left", "encode text 100/100"]
        and len(lines) == 11
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3, "10 s"),
        (64, "60 s"),
        (89, "90 s"),
        (100, "2 min"),
        (3569, "59 min"),
        (3571, "1 h 0 min"),
        (9e4, "25 h 0 min"),
    ],
)
def test_a_time_left_is_never_nothing(seconds: float, text: str) -> None:
    assert console._time_text(seconds) == text


def test_on_a_terminal_the_time_left_is_known_where_an_item_takes_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, drawn = [0.0], io.StringIO()
    monkeypatch.setattr(console, "CONSOLE", Console(file=drawn, force_terminal=True, width=200))
    bar = console._LiveBar("encode media", 10, 0)
    monkeypatch.setattr(bar._bar, "get_time", lambda: now[0])
    for _ in range(4):
        now[0] += 120.0
        bar.advance()
    (task,) = bar._bar.tasks
    assert task.time_remaining == 6 * 120


def test_on_a_terminal_a_bar_is_shown_with_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr(console, "CONSOLE", Console(file=drawn, force_terminal=True, width=200))
    with console.progress("train", 4) as bar:
        bar.update(loss=0.25)
        bar.advance(4.0)
        console.say("saved [runs/run]")
    assert (
        "4/4" in drawn.getvalue()
        and "loss 0.2500" in drawn.getvalue()
        and "saved [runs/run]" in drawn.getvalue()
    )


@pytest.mark.parametrize(("width", "last"), [(200, "sent"), (80, "lr"), (60, "peak")])
@pytest.mark.parametrize("stage", ["train", "check class images"])
def test_on_a_terminal_a_bar_and_its_figures_take_a_line_each(
    monkeypatch: pytest.MonkeyPatch, width: int, last: str, stage: str
) -> None:
    """On a narrow one the figures that matter least are left out."""
    drawn = io.StringIO()
    monkeypatch.setattr(
        console, "CONSOLE", Console(file=drawn, force_terminal=True, color_system=None, width=width)
    )
    bar = console._LiveBar(stage, 100_000, 0)
    bar.advance(50_000)
    bar.update(**{name: 2**30 if name.endswith("_bytes") else 0.25 for name in console._FORMATS})
    console.CONSOLE.print(bar.rendered())
    shown, figures = drawn.getvalue().splitlines()
    assert shown.startswith(f"{stage} ━━━━") and " 50000/100000 0:00:00 -:--:--" in shown
    assert (
        figures.startswith("loss 0.2500  validation 0.2500  0.25 s/step") and len(figures) <= width
    )
    assert figures.split("  ")[-1].startswith(last)


def test_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("[bold]path[/bold] " + "long " * 60)
    assert capsys.readouterr().out == "[bold]path[/bold] " + "long " * 60 + "\n"


@pytest.mark.parametrize(
    ("name", "noise"),
    [
        (
            "torch.utils._pytree",
            "<enum X> … Calling register_constant() on Enum subclasses is deprecated and …",
        ),
        (
            "diffusers.models.modeling_utils",
            "There are modules in X that should be kept in float32: []. Casting …",
        ),
    ],
)
def test_known_noise_of_libraries_is_hushed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, name: str, noise: str
) -> None:
    logger = logging.getLogger(name)
    monkeypatch.setattr(logger, "filters", list(logger.filters))
    hushed.hush_libraries()
    with TestCase().assertLogs(logger, logging.WARNING) as logged:
        logger.warning(noise)
        logger.warning("something else")
    assert [record.getMessage() for record in logged.records] == ["something else"]


def test_a_printed_command_can_be_copied_into_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    assert (
        command_line("toy-sample", "--run", "runs/my cat's")
        == """toy-sample --run 'runs/my cat'"'"'s'"""
    )
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    assert command_line("toy-sample", "--run", "runs/a") == "uv run toy-sample --run runs/a"
