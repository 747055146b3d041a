"""The loop: what it measures, saves, reports, and how it ends."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_training
from saved_states import CLIPS as ONE_CLIP
from toy_training import Calls, ToyBatch, ToyData, toy_model, toy_run

from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.io import console
from ditkit_core.io.signals import Interrupts
from ditkit_core.io.step_clock import PARTS
from ditkit_core.loading.model import Model
from ditkit_core.nn.parameters import copy_values
from ditkit_core.testing.recorded_graph import recorded_graphs
from ditkit_core.testing.toy import TOY, toy_items
from ditkit_core.training import trainer as train_module
from ditkit_core.training.checkpoint import load_state
from ditkit_core.training.config import (
    EMAConfig,
    FlowConfig,
    HeldOutConfig,
    SaveConfig,
    TrainConfig,
)
from ditkit_core.training.metrics import LogConfig
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.trainer import Callback, ProgressBar
from ditkit_core.training.validation import validation_loss

CLIPS = ToyBatch(["held 0", "held 1"], toy_items(2, seed=9))


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_of(folder, key):
    return [line["step"] for line in lines(folder) if key in line]


class Recorder:
    """A progress display that remembers."""

    def __init__(self):
        self.steps, self.fields = 0, {}

    def advance(self, amount=1):
        self.steps += amount

    def begin(self, completed):
        self.steps = completed

    def update(self, **fields):
        self.fields.update(fields)


def test_training_lowers_the_held_out_loss_and_reports_it(tmp_path):
    progress = Recorder()
    done = toy_run(tmp_path, 20, held_out_clips=CLIPS, callbacks=[ProgressBar(progress)]).result
    assert done.finished and done.step == 20 and done.save == tmp_path / "state" / "step-000020"
    assert done.held_out < 0.95 * done.held_out_before
    assert steps_of(tmp_path, "held_out") == [0, 20]
    assert [line["held_out"] for line in lines(tmp_path) if "held_out" in line] == [
        done.held_out_before,
        done.held_out,
    ]
    assert load_state(done.save).held_out == done.held_out
    assert progress.steps == 20 and progress.fields["held_out"] == done.held_out
    last = next(line for line in lines(tmp_path) if line["step"] == 20)
    # positions of four samples
    assert last["tokens_per_second"] * last["seconds"] == pytest.approx(4 * 32)
    assert (
        last["lr"] == pytest.approx(3e-3)
        and last["grad_norm"] > 0
        and last["peak_memory_bytes"] > 10_000_000
    )
    assert steps_of(tmp_path, "loss") == list(range(1, 21))


def test_a_line_counts_the_micro_batches_that_were_replayed(tmp_path: Path) -> None:
    with recorded_graphs():
        toy_run(
            tmp_path,
            3,
            config=TrainConfig(steps=3, batch_size=2, accumulation=2, seed=5, cuda_graphs="on"),
        )
    toy_run(tmp_path / "without a graph", 1)
    counts = [line["replays"] for line in lines(tmp_path) if "loss" in line]
    assert counts == [0, 2, 2], "in the first step Python sees all operations"
    assert steps_of(tmp_path / "without a graph", "replays") == []


def test_on_a_gpu_the_peak_with_gaps_is_measured_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "ditkit_core.training.trainer.peak_reserved_bytes", lambda devices: 3 * 2**29
    )
    toy_run(tmp_path, 2, callbacks=[ProgressBar(console._PlainBar("train", 2, 0))])
    assert [line["peak_reserved_bytes"] for line in lines(tmp_path) if "loss" in line] == [
        3 * 2**29
    ] * 2
    assert "with gaps 1.50 GiB" in capsys.readouterr().out


def test_a_printed_step_has_its_own_figures(tmp_path, capsys):
    with console.progress("train", 5) as bar:
        toy_run(tmp_path, 5, callbacks=[ProgressBar(bar)])
    losses = [f"loss {line['loss']:.4f}" for line in lines(tmp_path) if "loss" in line]
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train ")]
    assert len(printed) == 5 and all(
        loss in line for loss, line in zip(losses, printed, strict=True)
    )


def test_saves_measurements_and_lines_come_on_schedule(tmp_path):
    exported = []
    toy_run(
        tmp_path,
        7,
        save=SaveConfig(every_steps=2, keep_last=10),
        held_out=HeldOutConfig(every_steps=3, sigmas=(0.5,)),
        held_out_clips=CLIPS,
        log=LogConfig(every_steps=2),
        callbacks=[Calls(save=exported.append)],
    )
    assert exported == [2, 4, 6, 7]
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == [
        f"step-{n:06d}" for n in exported
    ]
    assert steps_of(tmp_path, "held_out") == [0, 3, 6, 7]
    assert steps_of(tmp_path, "loss") == [2, 4, 6]


def test_previews_come_before_training_and_on_schedule_but_not_at_the_end(tmp_path):
    drawn = []
    toy_run(tmp_path, 6, callbacks=[Calls(preview=drawn.append, preview_steps=2)])
    assert drawn == [0, 2, 4]
    toy_run(tmp_path, 9, callbacks=[Calls(preview=drawn.append, preview_steps=3)])  # continued at 6
    assert drawn == [0, 2, 4]
    toy_run(tmp_path, 12, callbacks=[Calls(preview=drawn.append, preview_steps=4)])
    assert drawn == [0, 2, 4]


def test_without_a_schedule_of_its_own_the_loss_is_measured_at_each_save(tmp_path):
    toy_run(tmp_path, 5, save=SaveConfig(every_steps=2, keep_last=10), held_out_clips=CLIPS)
    assert steps_of(tmp_path, "held_out") == [0, 2, 4, 5]
    measured = [load_state(path).held_out for path in sorted((tmp_path / "state").iterdir())]
    assert measured == [line["held_out"] for line in lines(tmp_path) if "held_out" in line][1:]


def test_a_held_out_loss_that_is_not_finite_ends_the_run_in_words(tmp_path):
    """The training loss of a step is from before its update: what an update broke is first seen
    here."""
    with pytest.raises(
        UserError,
        match=r"^before training, the loss is not finite at held-out clip b, noise level ",
    ):
        broken = [{**item} for item in CLIPS.items]
        broken[1]["latents"] = torch.full_like(broken[1]["latents"], torch.inf)
        toy_run(tmp_path / "clip", 2, held_out_clips=CLIPS._replace(ids=["a", "b"], items=broken))
    toy_run(tmp_path / "run", 2, held_out_clips=CLIPS)
    with pytest.raises(
        UserError, match=r"after step 3 .*; the last save is .*step-000002: lower optim\.lr"
    ):
        toy_run(tmp_path / "run", 3, held_out_clips=CLIPS, optim=OptimConfig(lr=1e37))
    assert [path.name for path in (tmp_path / "run" / "state").iterdir()] == ["step-000002"]


def test_saves_come_by_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(
        train_module.time, "monotonic", lambda: now.__setitem__(0, now[0] + 20.0) or now[0]
    )
    exported = []
    toy_run(
        tmp_path, 9, save=SaveConfig(every_minutes=1.0), callbacks=[Calls(save=exported.append)]
    )
    assert exported[-1] == 9 and len(exported) > 2 and exported != list(range(1, 10))


def test_the_average_is_what_is_measured(tmp_path):
    done = toy_run(tmp_path, 6, held_out=HeldOutConfig(sigmas=(0.3, 0.8)), held_out_clips=CLIPS)
    model, trainable = toy_model(dropout=0.1)
    copy_values(trainable, load_state(done.result.save).tensors["ema"])
    assert (
        validation_loss(Model(model, BlockEngine(), TOY), CLIPS.ids, CLIPS.items, (0.3, 0.8)).mean
        == done.result.held_out
    )
    copy_values(trainable, done.parameters)
    assert (
        validation_loss(Model(model, BlockEngine(), TOY), CLIPS.ids, CLIPS.items, (0.3, 0.8)).mean
        != done.result.held_out
    )


def test_exports_see_the_average_and_saves_the_trained_weights(tmp_path):
    model_weights, seen = {}, []

    def look(step):
        state = load_state(tmp_path / "state" / f"step-{step:06d}")
        seen.append(
            all(
                torch.equal(model_weights[name], state.tensors["ema"][name])
                for name in model_weights
            )
        )
        assert not torch.equal(
            state.tensors["ema"]["head.out.weight"], state.tensors["trainable"]["head.out.weight"]
        )

    original = train_module.TrainState

    class Spy(original):
        def __init__(self, model, parameters, *others, **named):
            model_weights.update(parameters)
            super().__init__(model, parameters, *others, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "TrainState", Spy)
        done = toy_run(tmp_path, 4, callbacks=[Calls(save=look)])
    assert seen == [True]
    trained = load_state(done.result.save).tensors["trainable"]
    assert all(torch.equal(done.parameters[name], trained[name]) for name in trained)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_run_after_the_step_with_a_save(name, tmp_path):
    class Signalling(Callback):
        def after_step(self, step, metrics):
            if step == 3:
                signal.raise_signal(getattr(signal, name))

    exported, finished = [], []
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    callbacks = [Signalling(), Calls(save=exported.append, finish=finished.append)]
    done = toy_run(tmp_path, 10, held_out_clips=CLIPS, callbacks=callbacks).result
    assert (done.step, done.finished, finished) == (3, False, [])
    assert exported == [3] and done.save.name == "step-000003"
    # a person who ends a run does not want to wait for it
    assert steps_of(tmp_path, "held_out") == [0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("at", [0, 2])
def test_a_signal_in_a_preview_ends_the_run_at_its_step(at, tmp_path):
    calls = Calls(
        preview=lambda step: step == at and signal.raise_signal(signal.SIGTERM), preview_steps=2
    )
    done = toy_run(tmp_path, 10, callbacks=[calls]).result
    assert (done.step, done.finished) == (at, False)
    assert done.save == (tmp_path / "state" / "step-000002" if at else None), (
        "before the first step nothing is trained"
    )


def test_a_second_ctrl_c_interrupts_at_once_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # what starts and ends jobs may send it again
        assert interrupts.requested
        signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
def test_a_run_that_nohup_started_outlives_its_terminal():
    number = signal.SIGHUP
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(number)
            assert not interrupts.requested
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_outside_the_main_thread_no_handler_is_set():
    before, seen = signal.getsignal(signal.SIGINT), []

    def enter():
        with Interrupts() as interrupts:
            seen.append((signal.getsignal(signal.SIGINT), interrupts.requested))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


def test_a_loss_that_is_not_finite_ends_the_run_with_its_evidence(tmp_path):
    data = ToyData()
    toy_run(tmp_path, 3, data=data)
    poisoned = int(data.micro_batch(8).ids[0].split()[1])
    data.items[poisoned]["latents"][0] = float("nan")
    with pytest.raises(UserError) as error:
        toy_run(tmp_path, 10, data=data)
    message = str(error.value)
    assert "\n" not in message and "step-000003" in message and "optim.lr" in message
    (file,) = tmp_path.glob("failure-step-*.json")
    assert str(file) in message
    evidence = json.loads(file.read_text())
    assert {s["id"] for s in evidence["samples"] if s["loss"] == "nan"} == {f"clip {poisoned}"}
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step-000003"]


def test_a_complete_run_is_left_as_it_is(tmp_path):
    first = toy_run(tmp_path, 4, held_out_clips=CLIPS)
    written = (tmp_path / "metrics.jsonl").read_bytes()
    times = {path: os.stat(path).st_mtime_ns for path in (tmp_path / "state").rglob("*")}
    exported, finished = [], []
    again = toy_run(
        tmp_path,
        4,
        held_out_clips=CLIPS,
        callbacks=[Calls(save=exported.append, finish=finished.append)],
    )
    assert again.result == first.result and exported == [] and finished == [4]
    assert (tmp_path / "metrics.jsonl").read_bytes() == written
    assert {path: os.stat(path).st_mtime_ns for path in (tmp_path / "state").rglob("*")} == times
    assert all(
        torch.equal(again.parameters[name], first.parameters[name]) for name in first.parameters
    )


def test_a_run_of_other_parameters_is_refused_with_the_remedy(tmp_path):
    toy_run(tmp_path, 1, method="lora")
    with pytest.raises(UserError, match="other trained parameters; use"):
        toy_run(tmp_path, 2, method="full")


def test_a_full_disk_is_one_line_and_the_old_save_stays(tmp_path, monkeypatch):
    from ditkit_core.training import checkpoint

    toy_run(tmp_path, 2)
    monkeypatch.setattr(
        checkpoint,
        "save_file",
        lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    with pytest.raises(
        UserError, match=r"cannot write .*step-000004: No space left on device; free some space"
    ):
        toy_run(tmp_path, 4)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step-000002"]


def test_muon_trains_whole_blocks_and_refuses_adapters(tmp_path):
    done = toy_run(tmp_path / "full", 2, optim=OptimConfig(name="muon"))
    values = load_state(done.result.save).tensors["optimizer"]
    assert "layers.0.qkv.weight|momentum_buffer" in values and "head.out.weight|exp_avg" in values
    assert "layers.0.qkv.bias|exp_avg" in values
    with pytest.raises(UserError, match="muon is for a full fine-tune"):
        toy_run(tmp_path / "lora", 2, method="lora", optim=OptimConfig(name="muon"))


def test_two_averages_at_once_are_refused(tmp_path):
    pytest.importorskip("schedulefree")
    with pytest.raises(UserError, match=r"averages weights itself; set ema\.decay = 0"):
        toy_run(tmp_path, 1, optim=OptimConfig(name="schedulefree_adamw"), ema=EMAConfig(decay=0.9))


@pytest.mark.parametrize(
    "fields",
    [
        {"steps": -1},
        {"batch_size": 0},
        {"accumulation": 0},
        {"clip_norm": -1.0},
        {"caption_dropout": 1.5},
    ],
)
def test_settings_out_of_range_are_refused(fields):
    with pytest.raises(UserError, match=r"train\."):
        TrainConfig(**fields)


class Log(Callback):
    """Writes down every call."""

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

    def generate_preview(self, step: int, is_stopping: Any) -> None:
        self.told.append(("preview", step))

    def finished(self, step: int) -> None:
        self.told.append(("finished", step))


def test_a_step_is_measured_then_saved_then_previewed(tmp_path: Path) -> None:
    log = Log((0, 2, 3))
    toy_run(tmp_path, 3, save=SaveConfig(every_steps=2), held_out_clips=ONE_CLIP, callbacks=[log])
    steps = [
        [("started", 0), ("validation", 0), ("preview", 0)],
        [("step", 1)],
        [("step", 2), ("validation", 2), ("save", 2), ("preview", 2)],
        [("step", 3), ("validation", 3), ("save", 3), ("finished", 3)],
    ]
    assert log.told == [each for told in steps for each in told]
    log.told.clear()
    toy_run(tmp_path, 3, held_out_clips=ONE_CLIP, callbacks=[log])
    assert log.told == [("started", 3), ("finished", 3)]


def test_several_are_called_in_their_order(tmp_path: Path) -> None:
    told: list[str] = []

    class Named(Callback):
        def __init__(self, name: str):
            self.name = name

        def on_save(self, step: int) -> None:
            told.append(self.name)

    toy_run(tmp_path, 1, callbacks=[Named("first"), Named("second")])
    assert told == ["first", "second"]


@pytest.mark.parametrize("stopping_too", [False, True])
def test_whoever_needs_no_time_previews_after_a_signal_too(
    stopping_too: bool, tmp_path: Path
) -> None:
    """After the save, which must not wait for it."""

    class Signalling(Callback):
        def after_step(self, step: int, metrics: Any) -> None:
            if step == 2:
                signal.raise_signal(signal.SIGTERM)

    log = Log((0, 1, 2), stopping_too=stopping_too)
    toy_run(tmp_path, 4, callbacks=[Signalling(), log])
    assert log.told[-2:] == (
        [("save", 2), ("preview", 2)] if stopping_too else [("step", 2), ("save", 2)]
    )


def test_weights_are_averaged_wherever_they_are_handed_out(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []

    class Looking(Callback):
        def on_save(self, step: int) -> None:
            self.look("save")

        def wants_preview(self, step: int, *, stopping: bool) -> bool:
            return step > 0

        def generate_preview(self, step: int, is_stopping: Any) -> None:
            self.look("preview")

        def finished(self, step: int) -> None:
            self.look("finished")

        def look(self, what: str) -> None:
            average = load_state(max((tmp_path / "state").iterdir())).tensors["ema"]
            seen.append(
                (what, all(torch.equal(trainable[name], average[name]) for name in average))
            )

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


@pytest.mark.parametrize("policy", ["none", "full", "attn_only"])
def test_the_parts_of_a_step_add_up_to_its_time(tmp_path, policy):
    model, trainable = toy_model()
    engine = BlockEngine(policy=policy)
    toy_training.train(
        Model(model, engine, TOY, trainable), ToyData(), folder=tmp_path,
        config=TrainConfig(steps=4, accumulation=2),
        flow=FlowConfig(), optim=OptimConfig(), ema=EMAConfig(), save=SaveConfig(),
        held_out=HeldOutConfig(),
        log=LogConfig(tensorboard=False),
    )  # fmt: skip
    for line in (each for each in lines(tmp_path) if "loss" in each):
        parts = {
            name.removeprefix("seconds/"): value
            for name, value in line.items()
            if name.startswith("seconds/")
        }
        assert parts.keys() == set(PARTS) and all(value >= 0 for value in parts.values())
        assert sum(parts.values()) <= line["seconds"], "nothing is counted twice"
        assert min(parts["forward"], parts["backward"], parts["optimizer"]) > 0
        assert (parts["recompute"] > 0) == (policy != "none")
    assert engine.clock.devices == (), "the engine of others is not timed"


def test_the_utilisation_of_a_step_is_that_of_its_items_and_seconds(tmp_path):
    asked = []

    def utilisation(items, seconds):
        asked.append((len(items), seconds))
        return 0.25

    toy_run(tmp_path, 2, utilisation=utilisation)
    rows = [line for line in lines(tmp_path) if "loss" in line]
    assert [row["mfu"] for row in rows] == [0.25, 0.25]
    assert asked == [(4, row["seconds"]) for row in rows]
