"""Which of several processes this one is, and environments that do not say it."""

import pytest

from ditkit_core.distributed.launch import check_launch, launched, local_rank
from ditkit_core.errors import UserError


@pytest.mark.parametrize("rank, size", [("0", "1"), ("x", "2"), ("0", "")])
def test_what_is_no_launch_of_several_is_a_process_alone(monkeypatch, rank, size):
    for name, value in {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": size,
    }.items():
        monkeypatch.setenv(name, value)
    assert launched() is None


def test_the_gpu_of_a_rank_is_that_of_its_number_on_the_machine(monkeypatch):
    for name, value in {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
    }.items():
        monkeypatch.setenv(name, value)
    assert local_rank() == 1


@pytest.mark.parametrize(
    "missing", ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK and LOCAL_RANK and LOCAL_WORLD_SIZE"]
)
def test_one_of_several_processes_without_its_place_is_refused(monkeypatch, missing):
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "" if name in missing.split() else "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_launch()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        UserError,
        match=f"WORLD_SIZE = 2 is set without {missing}; start the processes with torchrun",
    ):
        check_launch()
    for name in missing.split(" and "):
        monkeypatch.setenv(name, "1")
    check_launch()
