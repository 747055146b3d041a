"""What a user asks of a run while it trains: samples, a save, its end."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy_training import Calls, ToyData, toy_model, toy_run
from toy_world import World, equal

from ditkit_core.commands.cli import Family, start
from ditkit_core.distributed.ranks import Ranks
from ditkit_core.distributed.shared_folders import open_run
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.io.run_dir import RunFolder, is_locked, locked
from ditkit_core.io.run_requests import ask, pending, remove_fulfilled
from ditkit_core.loading.model import Model
from ditkit_core.testing.replicas import forked
from ditkit_core.testing.toy import TOY
from ditkit_core.training.config import SaveConfig, TrainConfig
from ditkit_core.training.metrics import LogConfig
from ditkit_core.training.trainer import Callback, ProgressBar, Trainer, TrainerConfig


class Asking(Callback):
    """Asks for something after some steps, as another process would in the middle of the next
    one."""

    def __init__(self, folder: Path, **at: int):
        self.folder, self.at = RunFolder(folder), at
        self.sampled: list[int] = []

    def after_step(self, step: int, metrics: Any) -> None:
        for name in (name for name, its_step in self.at.items() if its_step == step):
            ask(self.folder, name)
            ask(self.folder, name)  # twice is once

    def previews_when_asked(self) -> bool:
        return True

    def generate_preview(self, step: int, is_stopping: Callable[[], bool]) -> None:
        self.sampled.append(step)


def saves(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "state").glob("step-*"))


def test_samples_and_saves_come_once_and_change_no_weight(tmp_path: Path) -> None:
    plain, told = tmp_path / "plain", tmp_path / "told"
    expected, exported = toy_run(plain, 6), []
    asking = Asking(told, sample=2, save=3)
    with locked(told):
        callbacks = [asking, Calls(save=exported.append)]
        done = toy_run(told, 6, callbacks=callbacks, save=SaveConfig(keep_last=10))
    assert (asking.sampled, exported, saves(told)) == ([2], [3, 6], ["step-000003", "step-000006"])
    assert saves(plain) == ["step-000006"] and not (told / "requests").exists()
    assert all(
        torch.equal(expected.parameters[name], done.parameters[name]) for name in done.parameters
    )


def test_a_stop_saves_and_the_next_start_goes_on_bitwise_and_generates_what_waits(
    tmp_path: Path,
) -> None:
    plain, told = tmp_path / "plain", tmp_path / "told"
    expected = toy_run(plain, 6)
    asking = Asking(told, stop=3, sample=3, save=3)
    with locked(told):
        stopped = toy_run(told, 6, callbacks=[asking]).result
    assert (stopped.step, stopped.finished, saves(told), asking.sampled) == (
        3,
        False,
        ["step-000003"],
        [],
    )
    assert pending(RunFolder(told)) == {"sample"}
    with locked(told):
        remove_fulfilled(RunFolder(told))
        done = toy_run(told, 6, callbacks=[asking])
    assert done.result.finished and asking.sampled == [4] and not (told / "requests").exists()
    assert all(
        torch.equal(expected.parameters[name], done.parameters[name]) for name in done.parameters
    )


def test_a_run_without_samples_says_so(tmp_path: Path) -> None:
    class Saying(Asking):
        def previews_when_asked(self) -> bool:
            return False

    warned: list[str] = []
    with locked(tmp_path):
        toy_run(tmp_path, 3, callbacks=[Saying(tmp_path, sample=1)], warn=warned.append)
    assert warned == ["no samples, as asked for by --tell: this run generates none while it trains"]
    assert not pending(RunFolder(tmp_path))


def test_what_an_earlier_start_left_is_not_obeyed_by_the_next(tmp_path: Path) -> None:
    """A kill came after the request. A stop would end the run that somebody has just started."""
    folder = RunFolder(tmp_path)
    with locked(tmp_path):
        for name in ("sample", "save", "stop"):
            ask(folder, name)
    remove_fulfilled(folder)
    assert pending(folder) == {"sample"}, "nobody has seen samples"
    folder.samples.mkdir()
    (folder.samples / "step-000004.json").write_text("{}")  # the kill came after them
    os.utime(folder.samples / "step-000004.json", ns=(2**62, 2**62))
    remove_fulfilled(folder)
    assert not folder.requests.exists()


def test_a_request_comes_in_however_often_the_folder_of_requests_goes(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """The run removes the empty folder between the two calls that write into it."""
    folder, touch, gone = RunFolder(tmp_path), Path.touch, [3]

    def touch_late(path: Path) -> None:
        if gone[0]:
            gone[0] -= 1
            path.parent.rmdir()
        touch(path)

    with locked(tmp_path):
        monkeypatch.setattr(Path, "touch", touch_late)
        ask(folder, "save")
    assert pending(folder) == {"save"}


def test_a_killed_run_is_not_told(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from ditkit_core.io.run_dir import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        assert is_locked(tmp_path)
        other.kill()
        other.wait()
    assert (tmp_path / ".owner").exists(), "nobody could remove it"
    with pytest.raises(UserError, match="is not running, so there is nobody to tell"):
        ask(RunFolder(tmp_path), "stop")
    with locked(tmp_path):
        pass


def test_the_command_tells_a_run_and_an_experts_run_as_a_whole(tmp_path: Path, capsys: Any) -> None:
    def tell(folder: Path, word: str) -> int:
        family = Family(
            name="toy",
            presets=(),
            demo=Path("demo.toml"),
            spec=lambda: pytest.fail("needs no spec"),
        )
        return start(family, "train", ["--run.folder", str(folder), "--tell", word])

    run, expert = tmp_path / "run", tmp_path / "run" / "high_noise"
    assert (
        tell(run, "save") == 1 and "is not running" in capsys.readouterr().err and not run.exists()
    )
    with locked(run), locked(expert):
        assert tell(run, "save") == tell(expert, "sample") == 0
        assert "the state is saved, and exported, after the step" in capsys.readouterr().out
        assert pending(RunFolder(run)) == {"save", "sample"} and not (expert / "requests").exists()
        assert tell(run, "smaple") == 2
        assert capsys.readouterr().err.count("did you mean sample?") == 1


def test_a_start_begins_without_an_earlier_stop(tmp_path: Path) -> None:
    from ditkit_core.run.config import RunConfig

    with locked(tmp_path):
        ask(RunFolder(tmp_path), "stop")
    with open_run(tmp_path, RunConfig()) as (folder, _):
        assert not pending(folder)


def test_several_ranks_do_it_at_the_same_step(tmp_path: Path) -> None:
    """The request comes while the first rank is in a step; the other has no look at the folder of
    its own."""
    run = tmp_path / "run"

    def work(ranks: Ranks) -> list[Any]:
        model, trainable = toy_model()
        asking = Asking(run, stop=2) if ranks.is_first else Callback()
        saved: list[int] = []
        config = TrainerConfig(
            train=TrainConfig(steps=5, batch_size=2, accumulation=2),
            log=LogConfig(tensorboard=False),
        )
        trainer = Trainer(
            Model(model, BlockEngine(), TOY, trainable),
            ToyData(),
            config,
            folder=run if ranks.is_first else tmp_path / "unseen",
            requests=RunFolder(run if ranks.is_first else tmp_path / "unseen"),
            callbacks=[asking, Calls(save=saved.append)],
            ranks=ranks,
        )
        with locked(run) if ranks.is_first else nullcontext():
            return [trainer.fit().step, saved]

    assert forked(2, work, tmp_path / "ranks") == [[2, [2]], [2, []]]


def test_a_run_without_previews_samples_when_asked_and_exports_what_it_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    world, run, after_step = World(tmp_path), tmp_path / "run", ProgressBar.after_step

    def asking(bar: ProgressBar, step: int, metrics: Any) -> None:
        after_step(bar, step, metrics)
        if step in (2, 3):
            ask(RunFolder(run), {2: "sample", 3: "save"}[step])

    assert world.train("plain", 4) == 0
    monkeypatch.setattr(ProgressBar, "after_step", asking)
    assert world.train("run", 4) == 0
    lists = sorted(path.name for path in (run / "samples").glob("step-*.json"))
    assert lists == ["step-000002.json", "step-000004.json"]
    exports = sorted(path.name for path in (run / "exports").glob("*.safetensors"))
    assert exports == [
        "run-step-000003.safetensors",
        "run-step-000004.safetensors",
        "run.safetensors",
    ]
    plain = load_file(tmp_path / "plain/exports/plain.safetensors")
    assert equal(plain, load_file(run / "exports/run.safetensors"))
    assert not (run / "requests").exists()
