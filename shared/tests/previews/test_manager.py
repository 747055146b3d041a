"""Previews disturb nothing: a run with them and one without are bitwise identical in all that
training makes."""

from pathlib import Path

import pytest
import torch
from preview_runs import FLAGS, check_equal, numbers
from toy_world import World

from ditkit_core.training.checkpoint import load_state


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gc.collect", lambda *_: 0)  # takes long, and nothing here is large
    return World(tmp_path)


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_training_is_bitwise_identical_with_previews_and_without(world: World, method: str) -> None:
    flags = (*FLAGS, "--adapter.method", method)
    assert world.train("without", 4, *flags, "--sample.captions", "0") == 0
    assert world.train("every", 4, *flags, "--sample.every_steps", "1", "--sample.seed", "3") == 0
    drawn = {path.name[:11] for path in (world.folder / "every" / "samples").iterdir()}
    assert drawn == {f"step-{step:06d}" for step in range(5)}
    check_equal(world.folder / "without", world.folder / "every")
    held_out = [row for row in numbers(world.folder / "every") if "held_out_low" in row]
    assert [row["step"] for row in held_out] == [2, 4]
    # neither the previews nor the interval's first measurement are forgotten by a save
    if method == "lora":
        assert world.train("parts", 3, *flags, "--sample.every_steps", "2") == 0
        assert world.train("parts", 4, *flags, "--sample.every_steps", "0") == 0
        one, other = (
            load_state(world.folder / name / "state" / "step-000004")
            for name in ("without", "parts")
        )
        assert all(
            torch.equal(tensor, other.tensors["trainable"][k])
            for k, tensor in one.tensors["trainable"].items()
        )
        for value in ("held_out_interval", "held_out_before_clips"):
            assert one.values[value] == other.values[value]


def test_a_second_process_may_sample_from_a_run_that_trains(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no lock and reads whole saves alone: that is how previews leave the critical path
    where there is a second device."""
    from ditkit_core.commands.export import Exporter

    out, drawn = world.folder / "drawn", []
    on_save = Exporter.on_save

    def drawing(exporter: Exporter, step: int) -> None:
        on_save(exporter, step)
        if step == 2:
            run = str(world.folder / "run")
            drawn.append(
                world.run("sample", "--run", run, "--prompt", "while it trains", "--out", str(out))
            )

    assert (
        world.train(
            "alone", 4, "--save.every_steps", "2", "--ema.decay", "0.9", "--sample.captions", "0"
        )
        == 0
    )
    monkeypatch.setattr(Exporter, "on_save", drawing)
    assert (
        world.train(
            "run", 4, "--save.every_steps", "2", "--ema.decay", "0.9", "--sample.captions", "0"
        )
        == 0
    )
    assert drawn == [0] and (out / "sampled-001-step-000002-0-while-it-trains.png").exists()
    check_equal(world.folder / "alone", world.folder / "run")
