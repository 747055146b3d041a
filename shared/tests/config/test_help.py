"""The help of the real configuration, and what is suggested for a flag that it does not have."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ditkit_core.commands.options import OPTIONS, SampleOptions, TrainOptions
from ditkit_core.config.cli_args import CommonOptions, read_flags
from ditkit_core.config.foreign_words import FOREIGN_VALUES, FOREIGN_WORDS
from ditkit_core.config.help import format_help
from ditkit_core.config.schema import config_fields, field_docs
from ditkit_core.config.toml import read_config_file
from ditkit_core.errors import UserError
from ditkit_core.run.config import KEYS_THAT_MATTER, RunConfig


def help_text(topic: str, keys: tuple[str, ...] = ()) -> str:
    kinds = SampleOptions, CommonOptions
    return format_help("toy-train", "Train.", RunConfig, kinds, topic=topic, keys={"Keys": keys})


def refusal(act: Callable[[], Any]) -> str:
    """The message of the UserError that `act` must raise, which must be one line."""
    with pytest.raises(UserError) as raised:
        act()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_short_help_has_first_sentences_of_the_keys_that_matter_and_no_types() -> None:
    text = help_text("short", ("train.steps", "optim.name", "data.frames"))
    assert [
        line.split()[0]
        for line in text.partition("Keys:")[2].splitlines()
        if line.startswith("  --")
    ] == [
        "--train.steps",
        "--optim.name",
        "--data.frames",
    ]
    words = " ".join(text.split())
    assert (
        "Optimizer steps of the whole run, including those before it was resumed. [1000]" in words
    )
    assert "Frames per clip. --" in words or "Frames per clip. toy-train" in words
    everything = help_text("all")
    assert not re.search(r"\(type: |Literal|Union|tuple\[|\bstr\b|\bint\b|NoneType", everything)


def test_help_explains_a_section_or_a_key_and_names_the_topics() -> None:
    section = help_text("save")
    assert [line.split()[0] for line in section.splitlines() if line.startswith("  --")] == [
        key for key in (f"--{key}" for key in config_fields(RunConfig)) if key.startswith("--save.")
    ]
    key = " ".join(help_text("data.on_bad").split())
    assert key.startswith("--data.on_bad ") and key.endswith(
        '(one of error, skip; default "error")'
    )
    assert "a section: run, model" in refusal(lambda: help_text("xyzzy"))


def test_a_mistyped_topic_is_answered_with_the_one_that_is_meant() -> None:
    for topic, meant in (("train.checkpoint", "train.checkpointing"), ("sav", "save")):
        assert refusal(lambda topic=topic: help_text(topic)).endswith(f"did you mean {meant}?")


@pytest.mark.parametrize("command", list(OPTIONS))
def test_the_keys_that_matter_exist_and_are_few(command: str) -> None:
    named = [key for keys in KEYS_THAT_MATTER[command].values() for key in keys]
    assert set(named) <= config_fields(RunConfig).keys() and len(named) == len(set(named)) <= 25
    text = help_text("short", tuple(named))
    assert len(text.splitlines()) < 110


@pytest.mark.parametrize(
    ("argv", "topic"),
    [(["--help"], "short"), (["run.toml", "-h"], "short"), (["--help", "data"], "data"), (["--help", "--plan"], "short"),
     (["--help", "run.toml"], "short"), (["--help=all"], "all")],
)  # fmt: skip
def test_help_takes_a_topic_and_no_run_file(argv: list[str], topic: str) -> None:
    assert read_flags(argv, RunConfig, TrainOptions).common.help == topic


def test_words_of_other_trainers_mean_a_key_of_ours_or_say_what_there_is() -> None:
    known = config_fields(RunConfig)
    for word, ours in FOREIGN_WORDS.items():
        assert ours in known or " " in ours
        if word not in {key.partition(".")[2] for key in known}:
            message = refusal(
                lambda word=word: read_flags([f"--network.{word}", "1"], RunConfig, TrainOptions)
            )
            assert message.endswith(f"; did you mean --{ours}?" if ours in known else f"; {ours}")


def test_values_of_other_trainers_are_answered_with_keys_and_values_of_ours() -> None:
    for key, hints in FOREIGN_VALUES.items():
        for word, hint in hints.items():
            message = refusal(
                lambda key=key, word=word: read_flags(
                    [f"--{key}", word.upper()], RunConfig, TrainOptions
                )
            )
            assert message.endswith(f'not "{word.upper()}"; {hint}')
            for ours, value in re.findall(r"(\w+\.\w+)(?: = (\w+))?", hint):
                assert ours in config_fields(RunConfig)
                assert not value or read_flags([f"--{ours}", value], RunConfig, TrainOptions).values


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--train.max_epochs", "there are no epochs; set train.steps"),
        ("--save_every_n_epochs", "there are no epochs; set save.every_steps"),
        ("--flow.min_t", "did you mean --flow.min_sigma?"),
        ("--max_t", "did you mean --flow.max_sigma?"),
        ("--min_timestep", "that is flow.min_sigma, a noise level from 0 to 1: a timestep divided by 1000; one expert of two is experts.train"),
        ("--max_timestep", "that is flow.max_sigma, a noise level from 0 to 1: a timestep divided by 1000; one expert of two is experts.train"),
        ("--max_timestep_boundary", "each expert knows its noise levels: choose with experts.train = high_noise or low_noise"),
        ("--min-timestep-boundary", "each expert knows its noise levels: choose with experts.train = high_noise or low_noise"),
        ("--resume", "the same command continues a run from its newest save"),
        ("--is_reg", "regularisation images are a folder of their own: prior.folder"),
    ],
)  # fmt: skip
def test_settings_without_a_key_here_are_answered_too(flag: str, answer: str) -> None:
    message = refusal(lambda: read_flags([flag, "1"], RunConfig, TrainOptions))
    assert message == f"unknown key {flag} on the command line; {answer}"


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ('"dora"', '"dora"; a DoRA is adapter.method = lora with adapter.use_dora = true'),
        (
            '"LoCon"',
            '"LoCon"; a LoCon also adapts convolutions, which the blocks have none of; use adapter.method = lora',
        ),
        (
            '"diag-oft"',
            '"diag-oft"; of LyCORIS\'s methods there are lora, lokr, loha and full, and adapter.use_dora',
        ),
        ("3", "3"),
    ],
)
def test_a_method_of_another_trainer_in_a_run_file_is_answered_with_ours(
    tmp_path: Path, value: str, hint: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[adapter]\nmethod = {value}\n", encoding="utf-8")
    message = refusal(lambda: read_config_file(RunConfig, file))
    assert message == f"adapter.method in {file} must be one of lora, lokr, loha, full, not {hint}"


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--lr", "did you mean --optim.lr?"),
        ("--adapter.network_dim", "did you mean --adapter.rank?"),
        ("--data.bad_files", "did you mean --data.on_bad?"),
        ("--sample.num_frames", "did you mean --sample.frames?"),
        ("--wandb", "did you mean --log.tracker wandb?"),
        ("--learning-rate", "did you mean --optim.lr?"),
        ("--experts.lrs", "did you mean --experts.lr?"),
        ("--zzyx", "--help all explains every key"),
    ],
)
def test_a_guess_is_made_only_where_it_is_close(flag: str, hint: str) -> None:
    message = refusal(lambda: read_flags([flag, "1"], RunConfig, TrainOptions))
    assert message == f"unknown key {flag} on the command line; {hint}"


@pytest.mark.parametrize(
    ("section", "flag", "meant"),
    [
        ("sample", "--steps", "sample.steps"),
        ("sample", "--frames", "sample.frames"),
        ("sample", "--guidance_scale", "sample.guidance"),
        ("sample", "--lr", "optim.lr"),
        ("train", "--steps", "train.steps"),
        ("encode", "--steps", "train.steps"),
    ],
)
def test_a_flag_without_its_section_is_first_one_of_the_command(
    section: str, flag: str, meant: str
) -> None:
    message = refusal(lambda: read_flags([flag, "1"], RunConfig, TrainOptions, section=section))
    assert message == f"unknown key {flag} on the command line; did you mean --{meant}?"


def test_the_text_below_a_field_describes_it_wherever_the_class_stands() -> None:
    @dataclass(frozen=True)
    class Outer:
        """No field."""

        first: int = 1
        """First, on
        two lines."""
        bare: int = 2

        @dataclass(frozen=True)
        class Inner:
            first: int = 3
            """Another one."""

    class Derived(Outer):
        first: int = 4
        """The same key."""

    assert field_docs(Outer) == {"first": "First, on two lines."}
    assert field_docs(Outer.Inner) == {"first": "Another one."}
    assert field_docs(Derived) == {"first": "The same key."}
    without_source = type("Made", (Outer,), {"__module__": "no_such_module"})
    assert field_docs(without_source) == field_docs(Outer)
