"""Runs with previews, compared with runs without."""

import json
from pathlib import Path
from typing import Any

import torch
from toy_world import World

from ditkit_core.config.resolve import resolve
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.previews.queue import queued
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run
from ditkit_core.training.checkpoint import load_state
from ditkit_core.training.metrics import is_of_the_machine

FLAGS = (
    "--held_out.clips", "2", "--held_out.every_steps", "2", "--train.caption_dropout", "0.5",
    "--ema.decay", "0.9",
    "--train.accumulation", "2", "--save.every_steps", "3", "--save.keep_last", "9",
)  # fmt: skip


def numbers(run: Path) -> list[dict[str, float]]:
    """All lines of the metrics file but for what the machine's load decides."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if not is_of_the_machine(name)} for row in rows
    ]


def check_equal(one: Path, other: Path) -> None:
    """Assert that weights, averages, optimizer state and every number of every step are the same
    bits."""
    saves = sorted(path.name for path in (one / "state").iterdir())
    assert saves == sorted(path.name for path in (other / "state").iterdir()) and saves
    for name in saves:
        first, second = load_state(one / "state" / name), load_state(other / "state" / name)
        assert first.tensors.keys() == second.tensors.keys() == {"trainable", "ema", "optimizer"}
        for group, tensors in first.tensors.items():
            assert tensors.keys() == second.tensors[group].keys() and tensors
            assert all(
                torch.equal(tensor, second.tensors[group][key]) for key, tensor in tensors.items()
            ), (
                name,
                group,
            )
        assert (first.values, first.held_out) == (second.values, second.held_out)
    assert numbers(one) == numbers(other)


def samples(run: Path) -> dict[str, bytes]:
    """The files of all samples."""
    return {path.name: path.read_bytes() for path in (run / "samples").iterdir() if path.is_file()}


def pending(run: Path) -> list[str]:
    return [path.name for path in queued(run / "samples" / "pending")]


def bare(world: World, **flags: Any) -> tuple[RunContext, RunFolder]:
    """A run that draws elsewhere, of which there is the configuration alone."""
    given = {
        "run.folder": "run",
        "sample.device": "cpu",
        "sample.every_steps": 2,
        "sample.prompts": ("a",),
    }
    config = resolve(
        RunConfig,
        flags={"model.preset": next(iter(world.spec.architecture.presets)), **given, **flags},
    )
    folder = RunFolder(world.folder / "run")
    folder.pending.mkdir(parents=True)
    folder.store(config)
    return create_run(world.spec, config), folder
