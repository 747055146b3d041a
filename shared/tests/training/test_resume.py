"""Resuming continues bitwise: weights, optimizer, average, schedule, data order, noise, dropout."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from saved_states import CLIPS, assert_same_state, numbers
from toy_training import Calls, toy_run

SUPPORT = str(Path(__file__).parents[1] / "support")

from ditkit_core.testing.killed import Killed
from ditkit_core.testing.scripts import output_of, start
from ditkit_core.training.checkpoint import latest, load_state
from ditkit_core.training.config import EMAConfig, SaveConfig
from ditkit_core.training.optim.optimizers import OptimConfig


def silent(message):
    raise AssertionError(message)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_eight_steps_equal_four_and_four(method, tmp_path):
    given = {
        "method": method,
        "dropout": 0.2,
        "ema": EMAConfig(decay=0.95, update_every=3),
        "held_out_clips": CLIPS,
    }
    whole = toy_run(tmp_path / "whole", 8, save=SaveConfig(every_steps=4, keep_last=9), **given)
    toy_run(tmp_path / "halves", 4, **given)
    halves = toy_run(tmp_path / "halves", 8, **given)
    assert_same_state(whole.result.save, halves.result.save)
    index = [(run.result.save / "state.json").read_bytes() for run in (whole, halves)]
    assert index[0] == index[1]
    for name, tensor in whole.parameters.items():
        assert torch.equal(tensor, halves.parameters[name])
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "halves")
    assert [line["step"] for line in numbers(tmp_path / "halves")] == list(range(1, 9))
    assert whole.result.held_out_before == halves.result.held_out_before
    assert whole.result.held_out == halves.result.held_out


@pytest.mark.parametrize("name", ["adafactor", "muon", "prodigy", "schedulefree_adamw"])
def test_every_optimizer_resumes_bitwise(name, tmp_path):
    pytest.importorskip(
        {"prodigy": "prodigyopt", "schedulefree_adamw": "schedulefree"}.get(name, "torch")
    )
    given = {
        "optim": OptimConfig(name=name, lr=1.0 if name == "prodigy" else 0.01, warmup_steps=4),
        "ema": EMAConfig(),
        "held_out_clips": CLIPS,
    }
    whole = toy_run(tmp_path / "whole", 4, save=SaveConfig(every_steps=3), **given)
    toy_run(tmp_path / "halves", 2, **given)
    halves = toy_run(tmp_path / "halves", 4, **given)
    assert_same_state(whole.result.save, halves.result.save)
    assert whole.result.held_out == halves.result.held_out


@pytest.mark.slow
def test_eight_bit_adam_resumes_bitwise(tmp_path):
    given = {"optim": OptimConfig(name="adamw8bit", lr=0.01)}
    whole = toy_run(tmp_path / "whole", 6, **given)
    toy_run(tmp_path / "halves", 3, **given)
    halves = toy_run(tmp_path / "halves", 6, **given)
    assert_same_state(whole.result.save, halves.result.save)


def test_a_torn_newest_save_is_as_if_it_had_not_been(tmp_path):
    given = {"method": "lora", "save": SaveConfig(every_steps=2, keep_last=9)}
    whole = toy_run(tmp_path / "whole", 5, **given)
    toy_run(tmp_path / "torn", 4, **given)
    with open(tmp_path / "torn" / "state" / "step-000004" / "optimizer.safetensors", "rb+") as file:
        file.truncate(100)
    warnings = []
    torn = toy_run(tmp_path / "torn", 5, warn=warnings.append, **given)
    assert len(warnings) == 1 and "step-000004" in warnings[0]
    assert_same_state(whole.result.save, torn.result.save)
    assert_same_state(
        tmp_path / "whole" / "state" / "step-000004", tmp_path / "torn" / "state" / "step-000004"
    )
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "torn")


def test_a_run_that_is_killed_before_its_first_save_measures_step_0_once(tmp_path):
    def kill(step):
        raise Killed

    for _ in range(3):
        with pytest.raises(Killed):
            toy_run(
                tmp_path, 4, held_out_clips=CLIPS, callbacks=[Calls(preview=kill, preview_steps=2)]
            )
    toy_run(tmp_path, 4, held_out_clips=CLIPS)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "held_out" in line] == [0, 4]


def test_a_changed_held_out_loss_is_never_the_loss_before(tmp_path):
    given = {"save": SaveConfig(every_steps=2, keep_last=9), "held_out_clips": CLIPS}
    whole = toy_run(tmp_path / "whole", 5, **given)
    toy_run(tmp_path / "parts", 4, **given)
    index = tmp_path / "parts" / "state" / "step-000004" / "state.json"
    values = json.loads(index.read_text())
    values["values"]["held_out_before"] += 4
    index.write_text(json.dumps(values, indent=1))
    warnings = []
    parts = toy_run(tmp_path / "parts", 5, warn=warnings.append, **given)
    assert len(warnings) == 1 and "step-000004: not a complete save of ours" in warnings[0]
    assert whole.result.held_out_before == parts.result.held_out_before
    assert_same_state(whole.result.save, parts.result.save)


def test_metrics_that_were_changed_since_the_save_are_named(tmp_path):
    toy_run(tmp_path, 3)
    file = tmp_path / "metrics.jsonl"
    toy_run(tmp_path, 4, warn=silent)
    file.write_text(file.read_text().replace('"step": 2', '"step": 1'))
    warnings = []
    toy_run(tmp_path, 5, warn=warnings.append)
    toy_run(tmp_path, 6, warn=silent)
    assert (
        len(warnings) == 1
        and "metrics.jsonl was changed or damaged since step 4 was saved" in warnings[0]
    )


def test_a_run_that_is_continued_for_longer_goes_on_with_what_it_had(tmp_path):
    whole = toy_run(tmp_path / "whole", 6)
    for steps in (1, 3, 6):
        parts = toy_run(tmp_path / "parts", steps)
    assert_same_state(whole.result.save, parts.result.save)


def test_an_average_switched_on_later_starts_from_the_weights_of_then(tmp_path):
    first = toy_run(tmp_path, 3, ema=EMAConfig())
    second = toy_run(tmp_path, 4, ema=EMAConfig(decay=0.9))
    state = load_state(second.result.save)
    keep = min(0.9, 5 / 14)
    expected = first.parameters["head.out.weight"].lerp(
        second.parameters["head.out.weight"], 1 - keep
    )
    assert torch.allclose(state.tensors["ema"]["head.out.weight"], expected, atol=1e-7)


def test_a_lower_learning_rate_is_obeyed_after_resuming(tmp_path):
    toy_run(tmp_path, 4)
    toy_run(tmp_path, 6, optim=OptimConfig(lr=1e-5))
    assert [line["lr"] for line in numbers(tmp_path, first_step=4)] == pytest.approx(
        [3e-3, 1e-5, 1e-5]
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.exhaustive)])
def test_a_run_killed_at_any_moment_resumes_bitwise(method, tmp_path):
    every = {"method": method, "save": SaveConfig(every_steps=1, keep_last=1000)}
    state, kept = tmp_path / "killed" / "state", tmp_path / "kept"
    script = tmp_path / "endless.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {SUPPORT!r})\n"
        "import pathlib, toy_training\n"
        f"toy_training.toy_run(pathlib.Path({str(state.parent)!r}), 300, method={method!r},\n"
        "    save=toy_training.SaveConfig(every_steps=1))"
    )
    reached = [0]
    for wait in (0.0, 0.31, 0.47):
        process = start(script, out=tmp_path / "out", err=tmp_path / "out")
        try:
            while process.exitcode is None and newest_step(state) <= reached[-1]:
                time.sleep(0.01)
            time.sleep(wait)
        finally:
            process.kill()
            process.join()
        assert process.exitcode == -signal.SIGKILL, (tmp_path / "out").read_text()
        found = latest(state, silent)
        reached.append(load_state(found).step)
        shutil.copytree(found, kept / found.name)
    assert reached == sorted(set(reached)) and reached[-1] < 290
    last = toy_run(state.parent, reached[-1] + 5, **every).result.save
    toy_run(tmp_path / "whole", reached[-1] + 5, **every)
    for found in (*kept.iterdir(), last):
        assert_same_state(tmp_path / "whole" / "state" / found.name, found)


# A copy of one process is forked for each moment: a run that kills itself before its n-th change of
# the disk. No backward runs before a fork: autograd's threads would not be in the copy.
KILLED_AT_EVERY_CHANGE = """
import os, pathlib, signal, sys
folder, tests, method, steps = sys.argv[1:]
sys.path.insert(0, tests)
import toy_training
toy_training.toy_model("lora")  # imports peft, and with it what an optimizer imports at its first step

def killing_at(number):
    left = number
    def patched(change):
        def call(*given, **options):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*given, **options)
        return call
    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
        setattr(os, name, patched(getattr(os, name)))

toy_training.toy_run(pathlib.Path(folder) / "first", 1, method=method)  # imports what takes seconds
number, killed = 0, True
while killed:
    number += 1
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        killing_at(number)
        run = pathlib.Path(folder) / f"killed {number:03d}"
        toy_training.toy_run(run, int(steps), method=method, save=toy_training.SaveConfig(every_steps=1, keep_last=1))
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    killed = status != 0
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="forks, and kills with SIGKILL")
@pytest.mark.parametrize("method", [pytest.param("lora", marks=pytest.mark.exhaustive), "full"])
def test_a_run_killed_at_any_change_that_a_save_makes_to_the_disk_resumes_bitwise(method, tmp_path):
    steps = 3
    every = {"method": method, "save": SaveConfig(every_steps=1, keep_last=9)}
    whole = toy_run(tmp_path / "whole", steps + 1, **every).result.save
    script = tmp_path / "at_every_change.py"
    script.write_text(KILLED_AT_EVERY_CHANGE)
    output_of(script, str(tmp_path), SUPPORT, method, str(steps))
    torn, reached = 0, set()
    for run in tmp_path.glob("killed *"):
        torn += any((run / "state").glob(".step-*.tmp"))
        found = latest(run / "state", silent)
        reached.add(found and found.name)
        if found is not None:
            assert_same_state(tmp_path / "whole" / "state" / found.name, found)
        last = toy_run(
            run, steps + 1, method=method, save=SaveConfig(every_steps=1, keep_last=1)
        ).result.save
        assert_same_state(whole, last)
        assert numbers(run) == numbers(tmp_path / "whole")
        assert [path.name for path in (run / "state").iterdir()] == [last.name], (
            "nothing is left of the killed save"
        )
    assert reached == {None, "step-000001", "step-000002", "step-000003"}
    assert torn >= steps * 5, (
        "a save flushes three files of tensors, its index and its folder before it is renamed"
    )


def newest_step(state: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in state.glob("step-*")), default=0)
