"""Settings that do nothing in a run are named before it begins; those that do something are not."""

from pathlib import Path

import pytest
from toy_world import World

from ditkit_core.commands.options import TrainOptions
from ditkit_core.config.cli_args import read_flags
from ditkit_core.config.resolve import resolve
from ditkit_core.run.checks import check_training
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.testing.toy import TOY, ToyArch

FULL = "--adapter.method full --model.dtype fp32"


@pytest.mark.parametrize(
    ("flags", "key", "used"),
    [
        ("--optim.final_lr_fraction 0.1", "optim.final_lr_fraction", "--optim.schedule cosine"),
        ("--optim.betas [0.5,0.5] --optim.name adafactor", "optim.betas", "--optim.name adamw"),
        ("--ema.update_every 5", "ema.update_every", "--ema.decay 0.9"),
        ("--held_out.sigmas [0.5]", "held_out.sigmas", "--held_out.clips 2"),
        ("--held_out.every_steps 5", "held_out.every_steps", "--held_out.clips 2"),
        ("--save.keep_best 3", "save.keep_best", "--held_out.clips 2"),
        ("--data.seed 3", "data.seed", "--data.windows random"),
        (f"{FULL} --adapter.rank 8", "adapter.rank", "--adapter.method lora"),
        (f"{FULL} --adapter.targets q", "adapter.targets", "--adapter.method lora"),
        ("--adapter.init x.safetensors --adapter.rank 8", "adapter.rank", "--adapter.init="),
        ("--adapter.init x.safetensors --adapter.alpha 8", "adapter.alpha", "--adapter.init="),
        ("--train.clip_by last_step --train.clip_norm 0", "train.clip_by", "--train.clip_norm 1"),
        ("--flow.stratified true", "flow.stratified", "--train.accumulation 2"),
        ("--log.project cats", "log.project", "--log.tracker trackio"),
        ("--optim.warmup_steps 1000", "optim.warmup_steps", "--train.steps 2000"),
    ],
)
def test_a_setting_without_effect_is_named_with_the_reason(
    flags: str, key: str, used: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(text: str) -> str:
        read = read_flags(["--train.device", "cpu", *text.split()], RunConfig, TrainOptions)
        check_training(create_run(TOY, resolve(RunConfig, flags=read.values), ToyArch()))
        return capsys.readouterr().err

    warned = said(flags)
    assert (
        warned.count("\n") == 1
        and warned.startswith(f"{key} = ")
        and (" has no effect: " in warned or "whole run" in warned)
    )
    assert said(f"{flags} {used}") == "" == said("")


def test_the_first_line_says_what_is_trained_where_a_file_decides_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    assert world.train("cats", 0, "--adapter.rank", "3") == 0
    capsys.readouterr()
    assert (
        world.train(
            "more", 0, "--adapter.init", "cats/exports/cats.safetensors", "--adapter.rank", "8"
        )
        == 0
    )
    said = capsys.readouterr()
    assert "train the adapter in cats.safetensors of " in said.out and "rank 8" not in said.out
    assert "adapter.init: rank 3, " in said.out
    assert "adapter.rank = 8 has no effect: the file of adapter.init has them" in said.err
