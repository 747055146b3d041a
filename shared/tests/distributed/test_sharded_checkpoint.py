"""Saves of divided weights: written while training goes on, complete or not there."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from ditkit_core.distributed.ranks import WITHOUT_LIMIT
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.testing.ranks import once
from ditkit_core.testing.scripts import run_script
from ditkit_core.training.checkpoint import latest, load_state

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

SCRIPT = Path(__file__).parents[1] / "support" / "sharded_saves_of_toy.py"


def make(folder: Path) -> Any:
    return {"folder": str(folder), **json.loads(run_script(SCRIPT, folder).splitlines()[-1])}


@pytest.fixture
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = once(tmp_path_factory.getbasetemp(), SCRIPT.stem, make)
    return found


def state_of(made: dict[str, Any], name: str) -> Path:
    return Path(made["folder"]) / name / "run" / "state"


def test_training_goes_on_while_a_save_is_written(made: dict[str, Any]) -> None:
    """And the save is bitwise that of a run whose saves nobody delays."""
    assert made["slow"] == [True, True]
    saves = [
        load_state(state_of(made, name) / "step-000003").tensors for name in ("slow", "full disk")
    ]
    assert saves[0].keys() == saves[1].keys() == {"trainable", "ema", "optimizer"}
    for group, tensors in saves[0].items():
        assert tensors and all(
            torch.equal(tensor, saves[1][group][key]) for key, tensor in tensors.items()
        )


@pytest.mark.parametrize("name", ["plain", "adapter"])
def test_as_many_ranks_go_on_bitwise(made: dict[str, Any], name: str) -> None:
    """From the middle, with a full fine-tune and an adapter: weights, average and optimizer state
    of the last save, and validation losses."""
    whole, halves = (
        load_state(state_of(made, each) / "step-000006") for each in (name, f"{name} in halves")
    )
    assert whole.held_out == halves.held_out is not None and whole.values == halves.values
    for group, tensors in whole.tensors.items():
        assert all(
            torch.equal(tensor, halves.tensors[group][key]) for key, tensor in tensors.items()
        ), group


def test_every_row_is_written_once(made: dict[str, Any]) -> None:
    """Four ranks that divide the weights by two share the work, and none has a second copy."""
    save = state_of(made, "plain") / "step-000006"
    parts = [SafetensorsSource.open(path) for path in sorted(save.glob("shard-*.safetensors"))]
    written = [sum(each.num_bytes for each in part.tensors.values()) for part in parts]
    whole = sum(
        tensor.nbytes
        for tensors in load_state(save).tensors.values()
        for tensor in tensors.values()
    )
    assert len(parts) == 4 and sum(written) == whole
    assert max(written) < 0.5 * whole


@pytest.mark.parametrize("rank", range(4))
def test_a_save_is_complete_with_the_digest_of_every_part(
    made: dict[str, Any], tmp_path: Path, rank: int
) -> None:
    """One that lacks a part, or has another number in it, is not used; its index knows all four."""
    saves = Path(copytree(state_of(made, "plain"), tmp_path / "state"))
    newest, warned = saves / "step-000006", list[str]()
    part = sorted(newest.glob("shard-*.safetensors"))[rank]
    known = json.loads((newest / "state.json").read_text())["files"]
    assert set(known) == {path.name for path in newest.glob("*.safetensors")} and len(known) == 4
    content = part.read_bytes()
    for damaged in (content[:-1] + bytes([content[-1] ^ 1]), None):
        part.unlink() if damaged is None else part.write_bytes(damaged)
        found = latest(saves, warned.append)
        assert found is not None and found.name == "step-000003"
        assert f"{part.name} is missing or damaged" in warned.pop() and not warned


def test_a_save_that_one_rank_cannot_write_ends_all_and_leaves_the_one_before(
    made: dict[str, Any],
) -> None:
    for message in made["full disk"]:
        assert message.startswith("rank 1 cannot write its part of")
        assert message.endswith(
            ": No space left on device; free some space or choose another folder"
        )
    left = [path.name for path in state_of(made, "full disk").iterdir()]
    assert left == ["step-000003"] and latest(state_of(made, "full disk"), pytest.fail) is not None


def test_a_rank_killed_inside_a_save_leaves_the_one_before(made: dict[str, Any]) -> None:
    assert -9 in made["codes"]
    newest = latest(state_of(made, "killed"), pytest.fail)
    assert newest is not None and newest.name == "step-000003"
    expected, found = (
        load_state(state_of(made, name) / "step-000003").tensors for name in ("slow", "killed")
    )
    assert all(
        torch.equal(tensor, found[group][key])
        for group in expected
        for key, tensor in expected[group].items()
    )


def test_every_group_of_ranks_waits_however_long(made: dict[str, Any]) -> None:
    """Those of replicas, of parts of the weights and of tokens, to which torch gives 30 minutes,
    and that of what writes saves."""
    limit = WITHOUT_LIMIT.total_seconds()
    assert made["plain"] == [[[2, limit], [2, limit], [2, limit], [4, limit]]] * 4
