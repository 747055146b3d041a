"""How many processes train a run, and the words that start them."""

import sys

import pytest

from ditkit_core.commands.launch import launch_words, num_processes, train_line
from ditkit_core.distributed.ranks import RanksConfig


@pytest.mark.parametrize(
    ("shard", "context", "gpus", "expected"),
    [(1, 1, 0, 1), (1, 1, 8, 1), (4, 1, 8, 8), (2, 4, 0, 4), (2, 1, 3, 2), (2, 1, 1, 2)],
)
def test_a_process_for_each_gpu_where_several_divide_the_run(shard, context, gpus, expected):
    ranks = RanksConfig(shard=shard, context=context)
    assert num_processes(ranks.group_size, gpus) == expected


def test_the_words_of_one_process_are_the_program_and_of_several_torchrun(monkeypatch):
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    program = ("/bin/toy-train", "run.toml")
    assert launch_words(program, 1) == list(program)
    words = launch_words(program, 2)
    assert words[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert words[-5:] == ["--nproc-per-node", "2", "--no-python", *program]
    assert train_line("toy", "run.toml", 1) == "toy-train run.toml"
    several = "torchrun --nproc-per-node 2 -m ditkit_toy.train run.toml"
    assert train_line("toy", "run.toml", 2) == several
