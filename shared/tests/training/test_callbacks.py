"""What a callback is told, and when."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_training
from saved_states import CLIPS
from toy_training import ToyData, toy_run

from ditkit_core.training.callbacks import Callback
from ditkit_core.training.checkpoint import SaveConfig, load_state
from ditkit_core.training.trainer import TrainConfig


class Log(Callback):
    """Writes down everything that it is told."""

    def __init__(self, previews: tuple[int, ...] = (), *, stopping_too: bool = False):
        self.previews, self.stopping_too = previews, stopping_too
        self.told: list[tuple[str, int]] = []

    def started(self, step: int) -> None:
        self.told.append(("started", step))

    def after_step(self, step: int, metrics: Any) -> None:
        assert {"loss", "lr", "grad_norm"} <= metrics.keys()
        self.told.append(("step", step))

    def after_validation(self, step: int, loss: Any) -> None:
        self.told.append(("validation", step))

    def on_save(self, step: int) -> None:
        self.told.append(("save", step))

    def wants_preview(self, step: int, *, stopping: bool) -> bool:
        return step in self.previews and (self.stopping_too or not stopping)

    def on_preview(self, step: int) -> None:
        self.told.append(("preview", step))

    def finished(self, step: int) -> None:
        self.told.append(("finished", step))


def test_a_step_is_measured_then_saved_then_previewed(tmp_path: Path) -> None:
    log = Log((0, 2, 3))
    toy_run(tmp_path, 3, save=SaveConfig(every_steps=2), held_out_clips=CLIPS, callbacks=[log])
    steps = [
        [("started", 0), ("validation", 0), ("preview", 0)],
        [("step", 1)],
        [("step", 2), ("validation", 2), ("save", 2), ("preview", 2)],
        [("step", 3), ("validation", 3), ("save", 3), ("finished", 3)],
    ]
    assert log.told == [each for told in steps for each in told]
    log.told.clear()
    toy_run(tmp_path, 3, held_out_clips=CLIPS, callbacks=[log])
    assert log.told == [("started", 3), ("finished", 3)]


def test_several_are_told_in_their_order(tmp_path: Path) -> None:
    told: list[str] = []

    class Named(Callback):
        def __init__(self, name: str):
            self.name = name

        def on_save(self, step: int) -> None:
            told.append(self.name)

    toy_run(tmp_path, 1, callbacks=[Named("first"), Named("second")])
    assert told == ["first", "second"]


@pytest.mark.parametrize("stopping_too", [False, True])
def test_whoever_needs_no_time_previews_after_a_signal_too(stopping_too: bool, tmp_path: Path) -> None:
    """After the save, which must not wait for it."""

    class Signalling(ToyData):
        def micro_batch(self, index: int) -> Any:
            if index == 2:
                signal.raise_signal(signal.SIGTERM)
            return super().micro_batch(index)

    log = Log((0, 1, 2), stopping_too=stopping_too)
    toy_run(tmp_path, 4, data=Signalling(), callbacks=[log])
    assert log.told[-2:] == ([("save", 2), ("preview", 2)] if stopping_too else [("step", 2), ("save", 2)])


def test_weights_are_averaged_wherever_they_are_handed_out(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []

    class Looking(Callback):
        def on_save(self, step: int) -> None:
            self.look("save")

        def wants_preview(self, step: int, *, stopping: bool) -> bool:
            return step > 0

        def on_preview(self, step: int) -> None:
            self.look("preview")

        def finished(self, step: int) -> None:
            self.look("finished")

        def look(self, what: str) -> None:
            average = load_state(max((tmp_path / "state").iterdir())).tensors["ema"]
            seen.append((what, all(torch.equal(trainable[name], average[name]) for name in average)))

    trainable: dict[str, Any] = {}
    original = toy_training.toy_model

    def made(*arguments: Any, **given: Any) -> Any:
        model, parameters = original(*arguments, **given)
        trainable.update(parameters)
        return model, parameters

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy_training, "toy_model", made)
        config = TrainConfig(steps=2, batch_size=2, accumulation=2, seed=5)
        toy_run(tmp_path, 2, config=config, save=SaveConfig(every_steps=1), callbacks=[Looking()])
    assert seen == [("save", True), ("preview", True), ("save", True), ("finished", True)]
