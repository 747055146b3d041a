"""Saves that are whole or recognised as not."""

import builtins
import json
import os
import shutil
import sys

import pytest
import torch
from ordinary_user import ordinary_user

from ditkit_core.errors import UserError
from ditkit_core.testing.killed import Killed
from ditkit_core.training import checkpoint
from ditkit_core.training.checkpoint import State, best, check_save, latest, load_state, save_state
from ditkit_core.training.config import SaveConfig


def state(step, *, held_out=None, size=64):
    torch.manual_seed(step)
    tensors = {
        "trainable": {"a": torch.randn(size), "b": torch.randn(3, 5).bfloat16().T},
        "ema": {},
        "optimizer": {
            "a|step": torch.tensor(float(step)),
            "a|codes": torch.arange(5, dtype=torch.uint8),
        },
    }
    return State(
        step=step, tensors=tensors, values={"optimizer": {"lr": 0.1 + 0.2}}, held_out=held_out
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def silent(message):
    raise AssertionError(message)


def test_a_save_is_read_back_bitwise(tmp_path):
    written = state(20, held_out=0.25)
    path = save_state(tmp_path, written, SaveConfig())
    assert path == tmp_path / "step-000020" == latest(tmp_path, silent)
    assert names(path) == ["optimizer.safetensors", "state.json", "trainable.safetensors"]
    read = load_state(path)
    assert (read.step, read.held_out, read.values) == (20, 0.25, written.values)
    for group in ("trainable", "optimizer"):
        assert read.tensors[group].keys() == written.tensors[group].keys()
        for name, tensor in written.tensors[group].items():
            assert read.tensors[group][name].dtype is tensor.dtype
            assert torch.equal(read.tensors[group][name], tensor)


def test_the_newest_save_is_the_highest_step(tmp_path):
    for step in (999_999, 1_000_000, 20):
        save_state(tmp_path, state(step), SaveConfig())
        shutil.copytree(tmp_path, tmp_path.with_name("all"), dirs_exist_ok=True)
    assert latest(tmp_path.with_name("all"), silent).name == "step-1000000"
    assert latest(tmp_path / "nothing", silent) is None


def test_a_loaded_save_can_be_removed(tmp_path):
    path = save_state(tmp_path, state(1), SaveConfig())
    read = load_state(path)
    shutil.rmtree(path)
    assert torch.equal(read.tensors["trainable"]["a"], state(1).tensors["trainable"]["a"])


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "truncated": lambda save: cut(save / "trainable.safetensors"),
    "one bit": lambda save: flip(save / "optimizer.safetensors"),
    "file gone": lambda save: (save / "optimizer.safetensors").unlink(),
    "index gone": lambda save: (save / "state.json").unlink(),
    "index torn": lambda save: cut(save / "state.json"),
    "index empty": lambda save: (save / "state.json").write_bytes(b"\0" * 100),
    "foreign": lambda save: (save / "state.json").write_text(
        json.dumps({"format": "other", "step": 2})
    ),
    "renamed": lambda save: save.rename(save.with_name("step-000009")),
}


def edited(**fields):
    """Change the index of a save as an editor does, without its digest: with or without one, the
    types are checked."""

    def edit(save):
        index = json.loads((save / "state.json").read_text())
        index = {key: value for key, value in {**index, **fields}.items() if value is not Ellipsis}
        (save / "state.json").write_text(json.dumps(index))

    return edit


ODD_VALUES = {
    "step as text": {"step": "2"},
    "step gone": {"step": ...},
    "files as a list": {"files": []},
    "no files": {"files": {}},
    "sizes as text": {"files": {"trainable.safetensors": "x"}},
    "values gone": {"values": ...},
    "no values": {"values": {}},
    "values as a list": {"values": []},
    "loss as text": {"held_out": "x"},
    "loss before as text": {"values": {"optimizer": {}, "held_out_before": "x"}},
    "clips as numbers": {"values": {"optimizer": {}, "held_out_before_clips": {"0.5": 3}}},
}
DAMAGE |= {name: edited(**fields) for name, fields in ODD_VALUES.items()}
DAMAGE |= {
    f"{name}, of an earlier version": edited(blake2b=..., **fields)
    for name, fields in ODD_VALUES.items()
}
DAMAGE |= {
    "null": lambda save: (save / "state.json").write_text("null"),
    "deep": lambda save: (save / "state.json").write_text("[" * 100_000),
    "a loss changed": edited(held_out=6.7),
    "a value changed": edited(values={"optimizer": {"lr": 0.3}}),
    "digest changed": edited(blake2b="0" * 32),
    "index a folder": lambda save: [(save / "state.json").unlink(), (save / "state.json").mkdir()],
    "a file a folder": lambda save: [f := save / "trainable.safetensors", f.unlink(), f.mkdir()],
}


def test_a_save_of_an_earlier_version_has_no_digest_and_is_used(tmp_path):
    path = save_state(tmp_path, state(1, held_out=0.5), SaveConfig())
    edited(blake2b=..., metrics=...)(path)
    assert latest(tmp_path, silent) == path
    read = load_state(path)
    assert (read.step, read.held_out, read.metrics) == (1, 0.5, "")
    assert best(tmp_path).path == path


@pytest.mark.parametrize("name", ["state.json", "optimizer.safetensors", "."])
def test_a_save_that_may_not_be_read_is_no_damage(name):
    with ordinary_user() as folder:
        save_state(folder, state(1, held_out=0.5), SaveConfig())
        last = save_state(folder, state(2, held_out=0.25), SaveConfig())
        (last / name).chmod(0)
        try:
            with pytest.raises(
                UserError,
                match=r"step-000002.* cannot be read \(Permission denied\); correct its perm",
            ):
                latest(folder, silent)
            with pytest.raises(UserError, match="Permission denied"):
                check_save(last)
            best(folder)
            save_state(folder, state(3), SaveConfig(keep_last=1, keep_best=0))
            assert latest(folder, silent).name == "step-000003", "pruning is no reason to fail"
        finally:
            if last.exists():
                last.chmod(0o700)


def test_a_save_chosen_by_name_is_verified(tmp_path):
    path = save_state(tmp_path, state(1), SaveConfig())
    check_save(path)
    flip(path / "optimizer.safetensors")
    with pytest.raises(
        UserError,
        match=r"step-000001: optimizer\.safetensors is missing or damaged; choose another save",
    ):
        check_save(path)
    cut(path / "state.json")
    for read in (check_save, load_state):
        with pytest.raises(UserError, match="not a complete save of ours"):
            read(path)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_torn_or_foreign_save_is_recognised_and_the_previous_used(damage, tmp_path):
    first = save_state(tmp_path, state(1), SaveConfig())
    DAMAGE[damage](save_state(tmp_path, state(2), SaveConfig()))
    warnings = []
    assert latest(tmp_path, warnings.append) == first
    assert (
        len(warnings) == 1
        and "\n" not in warnings[0]
        and "looking for the save before it" in warnings[0]
    )


def test_with_no_whole_save_left_the_run_does_not_start_anew(tmp_path):
    cut(save_state(tmp_path, state(1), SaveConfig()) / "trainable.safetensors")
    warnings = []
    with pytest.raises(
        UserError, match="restore one, or remove the folder to start from the beginning"
    ):
        latest(tmp_path, warnings.append)
    assert len(warnings) == 1


def test_the_last_and_the_best_are_kept(tmp_path):
    losses = {1: 0.9, 2: 0.3, 3: 0.5, 4: None, 5: 0.4, 6: 0.6, 7: None}
    for step, loss in losses.items():
        save_state(tmp_path, state(step, held_out=loss), SaveConfig(keep_last=2, keep_best=2))
    assert names(tmp_path) == ["step-000002", "step-000005", "step-000006", "step-000007"]
    save_state(tmp_path, state(8), SaveConfig(keep_last=1, keep_best=0))
    assert names(tmp_path) == ["step-000008"]


def test_the_best_save_is_the_earliest_with_the_lowest_loss(tmp_path):
    assert best(tmp_path) is None and best(tmp_path / "nowhere") is None
    save_state(tmp_path, state(1), SaveConfig())
    assert best(tmp_path) is None, "it was not measured"
    for step, loss in {2: 0.5, 3: 0.3, 4: 0.3, 1000000: 0.4}.items():
        save_state(tmp_path, state(step, held_out=loss), SaveConfig(keep_last=9))
    found = best(tmp_path)
    assert (found.step, found.held_out, found.path) == (3, 0.3, tmp_path / "step-000003")
    assert found.values["optimizer"] == {"lr": 0.1 + 0.2}
    (tmp_path / "step-000003" / "state.json").write_text("{")
    assert best(tmp_path).step == 4


def test_saves_of_an_abandoned_future_do_not_crowd_out_the_present(tmp_path):
    for step in (10, 20, 30):
        save_state(tmp_path, state(step), SaveConfig(keep_last=3))
    flip(tmp_path / "step-000030" / "trainable.safetensors")
    flip(tmp_path / "step-000020" / "trainable.safetensors")
    save_state(tmp_path, state(11), SaveConfig(keep_last=1))
    assert names(tmp_path) == ["step-000011"]
    assert latest(tmp_path, silent).name == "step-000011"


def test_the_best_of_an_abandoned_future_does_not_take_the_place_of_the_best(tmp_path):
    for step, loss in {10: 0.5, 20: 0.4, 30: 0.1}.items():
        save_state(tmp_path, state(step, held_out=loss), SaveConfig(keep_last=3))
    save_state(tmp_path, state(11, held_out=0.6), SaveConfig(keep_last=1, keep_best=1))
    assert names(tmp_path) == ["step-000010", "step-000011"]


def test_what_is_not_ours_is_left_alone(tmp_path):
    foreign = tmp_path / "step-000001"
    foreign.mkdir()
    (foreign / "state.json").write_text(
        json.dumps({"format": "ditkit-state", "version": 99, "step": 1})
    )
    (tmp_path / "notes.txt").write_text("mine")
    for step in (2, 3, 4):
        save_state(tmp_path, state(step), SaveConfig(keep_last=1, keep_best=0))
    assert names(tmp_path) == ["notes.txt", "step-000001", "step-000004"]


def test_a_save_replaces_a_damaged_one_of_its_step(tmp_path):
    save_state(tmp_path, state(1), SaveConfig())
    flip(save_state(tmp_path, state(2), SaveConfig()) / "trainable.safetensors")
    save_state(tmp_path, state(2), SaveConfig())
    assert names(tmp_path) == ["step-000001", "step-000002"]
    assert latest(tmp_path, silent).name == "step-000002"


CALLS = [
    (checkpoint, "save_file"),
    (os, "fsync"),
    (os, "rename"),
    (builtins, "open"),
    (shutil, "rmtree"),
]


def interrupt_at(monkeypatch, count, error):
    """Raise `error` at the `count`-th call, over all calls that a save reaches the disk by."""
    seen = 0

    def interrupted(call):
        def wrapper(*args, **kwargs):
            nonlocal seen
            seen += 1
            if seen == count:
                raise error
            return call(*args, **kwargs)

        return wrapper

    for module, name in CALLS:
        monkeypatch.setattr(module, name, interrupted(getattr(module, name)))
    return lambda: seen


def test_killed_at_any_write_a_good_save_remains(tmp_path, monkeypatch):
    newer = 0
    for count in range(1, 100):
        folder = tmp_path / str(count)
        config = SaveConfig(keep_last=1)
        save_state(folder, state(1), config)
        with monkeypatch.context() as patch:
            seen = interrupt_at(patch, count, Killed())
            # a killed process tidies nothing up
            patch.setattr(checkpoint, "_remove", lambda folders: None)
            try:
                save_state(folder, state(2), config)
            except Killed:
                pass
            if seen() < count:
                break
        found = latest(folder, silent)
        assert found is not None
        assert torch.equal(
            load_state(found).tensors["trainable"]["a"],
            state(load_state(found).step).tensors["trainable"]["a"],
        )
        newer += found.name == "step-000002"
        save_state(folder, state(3), config)  # the next run tidies up
        assert names(folder) == ["step-000003"]
    assert count > 12 and 0 < newer < count - 1


def test_a_full_disk_at_any_write_leaves_the_old_save_and_nothing_else(tmp_path, monkeypatch):
    refused, remove = 0, shutil.rmtree
    for count in range(1, 100):
        folder = tmp_path / str(count)
        save_state(folder, state(1), SaveConfig())
        with monkeypatch.context() as patch:
            seen = interrupt_at(patch, count, OSError(28, "No space left on device"))
            patch.setattr(shutil, "rmtree", remove)  # removing needs no space
            try:
                save_state(folder, state(2), SaveConfig())
            except UserError as error:
                refused += 1
                assert str(error).count(
                    "No space left on device; free some space"
                ) == 1 and "\n" not in str(error)
            if seen() < count:
                break
        assert names(folder) in (["step-000001"], ["step-000001", "step-000002"])
        latest(folder, silent)
    assert refused == count - 1 > 8


@pytest.mark.skipif(os.name == "nt", reason="limits of a process are of POSIX")
def test_a_file_that_really_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    import resource
    import signal

    save_state(tmp_path, state(1), SaveConfig())
    before, limit = (
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )
    # else what is imported meanwhile is stored cut off at the limit
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        with pytest.raises(
            UserError, match=r"cannot write .*step-000002.*File too large.*free some space"
        ):
            save_state(tmp_path, state(2, size=1_000_000), SaveConfig())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert names(tmp_path) == ["step-000001"]


@pytest.mark.parametrize(
    "fields", [{"keep_last": 0}, {"keep_best": -1}, {"every_steps": -1}, {"every_minutes": -1.0}]
)
def test_settings_out_of_range_are_refused(fields):
    with pytest.raises(UserError, match="save"):
        SaveConfig(**fields)
