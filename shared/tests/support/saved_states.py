"""What two runs saved and measured, compared."""

import json
from pathlib import Path

import torch
from toy_training import ToyBatch

from ditkit_core.testing.toy import toy_items
from ditkit_core.training.checkpoint import load_state
from ditkit_core.training.metrics import is_of_the_machine

CLIPS = ToyBatch(["held 0"], toy_items(1, seed=9))


def assert_same_state(first: Path, second: Path) -> None:
    one, other = load_state(first), load_state(second)
    assert (one.step, one.values) == (other.step, other.values)
    assert one.tensors.keys() == other.tensors.keys()
    for group, tensors in one.tensors.items():
        assert tensors.keys() == other.tensors[group].keys() and tensors
        for name, tensor in tensors.items():
            assert torch.equal(tensor, other.tensors[group][name]), (group, name)


def numbers(folder, *, first_step=1):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if not is_of_the_machine(k)}
        for line in found
        if "loss" in line and line["step"] >= first_step
    ]
