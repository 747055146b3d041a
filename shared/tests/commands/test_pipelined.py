"""Runs with pipelined micro-batches: on several devices, continued elsewhere, with a prior; and
where there is nothing to overlap."""

import pytest
import torch
from toy_world import World, equal

from ditkit_core.engine.engine import BlockEngine
from ditkit_core.loading.model import Model
from ditkit_core.testing.pretend_devices import PretendDevices
from ditkit_core.testing.toy import TOY, toy_items
from ditkit_core.testing.world import ADAPTERS, make_model, micro_batches
from ditkit_core.training import micro_batch
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.train_step import StepContext, accumulate_gradients

DIVIDED = ("--train.devices", '["cpu:1", "cpu:2"]')
PIPELINED = ("--train.pipelined", "true", "--train.accumulation", "3", "--sample.captions", "0")


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return World(tmp_path)


def test_a_run_is_continued_on_other_devices_bitwise(world):
    assert world.train("whole", 3, *PIPELINED) == 0
    with PretendDevices():
        assert world.train("parts", 2, *PIPELINED, *DIVIDED, "--train.checkpointing", "full") == 0
    assert world.train("parts", 3, *PIPELINED) == 0
    assert equal(world.adapter("whole"), world.adapter("parts"))


def test_a_change_of_schedule_is_stated(world, capsys):
    assert world.train("run", 1, *PIPELINED) == 0
    capsys.readouterr()
    assert world.train("run", 2, "--train.accumulation", "3", "--sample.captions", "0") == 0
    said = capsys.readouterr()
    assert "train.pipelined true -> false" in said.out + said.err


def test_one_micro_batch_is_refused_in_one_line_unless_a_prior_adds_to_it(world, capsys):
    assert world.train("run", 1, "--train.pipelined", "true") == 1
    error = capsys.readouterr().err
    assert "set train.accumulation to 2 or more" in error and error.count("\n") == 1
    assert not (world.folder / "run").exists()
    world.add("class/0.png", (16, 16), "olive", "a picture")
    prior = ("--prior.folder", str(world.folder / "class"), "--sample.captions", "0")
    assert world.train("run", 2, "--train.pipelined", "true", *prior) == 0
    assert world.train("other", 2, *prior) == 0
    # two micro-batches, each with one gradient of a parameter: their sum has no order
    assert equal(world.adapter("run"), world.adapter("other"))


def losses(pipelined, num):
    model = make_model(
        TOY, TOY.architecture.presets["dropout"], adapter=ADAPTERS["lora with dropout"]
    )
    batches = micro_batches(toy_items(2), num)
    made = accumulate_gradients(
        Model(model, BlockEngine(), TOY),
        batches,
        StepContext(step=2, seed=1, flow=FlowConfig(), pipelined=pipelined),
    )
    return made, {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def test_noise_and_dropout_of_a_micro_batch_are_those_of_any_schedule():
    for num in (2, 4):
        one_by_one, together = losses(False, num)[0], losses(True, num)[0]
        for of_one, of_all in zip(one_by_one.weighted, together.weighted, strict=True):
            assert torch.equal(of_one, of_all)
        assert all(map(torch.equal, one_by_one.sigmas, together.sigmas))
        assert one_by_one.ids == together.ids


def test_two_micro_batches_are_summed_bitwise_and_more_are_not():
    assert equal(losses(False, 2)[1], losses(True, 2)[1])
    assert not equal(losses(False, 4)[1], losses(True, 4)[1]), "or it is not what was asked for"


def test_there_is_one_backward(monkeypatch):
    """Two at once would draw each other's dropout."""
    order = []
    forward, backward = micro_batch.velocity_errors, torch.Tensor.backward
    monkeypatch.setattr(
        micro_batch, "velocity_errors", lambda *a, **k: order.append("forward") or forward(*a, **k)
    )
    monkeypatch.setattr(
        torch.Tensor, "backward", lambda loss: order.append("backward") or backward(loss)
    )
    losses(True, 3)
    losses(False, 2)
    assert order == ["forward"] * 3 + ["backward"] + ["forward", "backward"] * 2
