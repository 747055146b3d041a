"""`flow.target_guidance`: the velocity that a base distilled with guidance learns;
`testing/conformance_peers.py` compares it with diffusers."""

from pathlib import Path

import pytest
import torch
from toy_training import toy_model
from toy_world import World, equal

from ditkit_core.encoding.encoded_sample import EMPTY_CAPTION_PREFIX, with_caption
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.testing.toy import TOY, toy_items
from ditkit_core.training import flow_matching
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.flow_matching import NoisedBatch, guiding
from ditkit_core.training.validation import validation_loss

FLAGS = ("--flow.target_guidance", "3", "--sample.captions", "0", "--held_out.clips", "1")


def guided_item() -> dict[str, torch.Tensor]:
    item, other = toy_items(2)
    return {**item, f"{EMPTY_CAPTION_PREFIX}text": other["text"]}


def test_the_empty_caption_replaces_that_of_the_item_and_nothing_else() -> None:
    item, other = guided_item(), toy_items(2)[1]
    without = with_caption(item, EMPTY_CAPTION_PREFIX)
    assert torch.equal(without["text"], other["text"])
    assert all(without[name] is item[name] for name in item if name != "text")


def test_an_item_without_the_empty_caption_is_refused_with_what_makes_one() -> None:
    with pytest.raises(UserError, match="encode them with empty_captions = True"):
        with_caption(toy_items(1)[0], EMPTY_CAPTION_PREFIX)


def test_a_model_that_has_its_guidance_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of samples that one caption stands for, the gradient is zero at the guided mean; of plain
    targets it is zero at the mean."""
    random = torch.Generator().manual_seed(0)
    unconditional, mean, spread = torch.randn(3, 1, 1, 2, 2, generator=random, dtype=torch.float64)
    monkeypatch.setattr(flow_matching, "_predicted", lambda *_: [unconditional])
    guided = unconditional + 3.0 * (mean - unconditional)
    gradients = {}
    for weight in (3.0, 1.0):
        prediction = guided.clone().requires_grad_()
        for sign in (1, -1):
            batch = NoisedBatch(
                [guided_item()], torch.tensor([0.5]), [], targets=[mean + sign * spread]
            )
            targets = guiding(
                Model(toy_model()[0], BlockEngine(), TOY), batch, FlowConfig(target_guidance=weight)
            ).targets
            assert targets is not None
            (prediction - targets[0]).square().sum().backward()
        gradients[weight] = prediction.grad.abs().max()
    assert gradients[3.0] < 1e-5  # targets are float32
    assert gradients[1.0] > 0.1


def test_no_gradient_passes_through_the_prediction_without_caption() -> None:
    model, _ = toy_model()
    item = guided_item()
    noise = torch.ones_like(item["latents"])
    batch = guiding(
        Model(model, BlockEngine(), TOY),
        NoisedBatch([item], torch.tensor([0.5]), [noise]),
        FlowConfig(target_guidance=2.0),
    )
    assert batch.targets is not None and not batch.targets[0].requires_grad


def test_validation_measures_the_guided_velocity() -> None:
    model, _ = toy_model()
    losses = [
        validation_loss(
            Model(model, BlockEngine(), TOY), ["clip"], [guided_item()], (0.5,), flow
        ).mean
        for flow in (FlowConfig(), FlowConfig(target_guidance=3.0))
    ]
    assert losses[1] > 1.5 * losses[0], "of random weights, whose prediction is far from both"


def test_a_run_goes_on_bitwise_and_learns_another_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    assert world.train("at once", 2, *FLAGS) == 0
    assert world.train("in parts", 1, *FLAGS) == 0 and world.train("in parts", 2, *FLAGS) == 0
    assert equal(world.adapter("at once"), world.adapter("in parts"))
    assert world.train("plain", 2, *FLAGS[2:]) == 0
    assert not equal(world.adapter("at once"), world.adapter("plain"))
    assert world.train("by level", 2, *FLAGS, "--flow.target_schedule", "sigma") == 0
    assert not equal(world.adapter("at once"), world.adapter("by level"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_guidance": 0.5}, "must be at least 1"),
        ({"target_schedule": "sigma"}, "has no effect with flow.target_guidance = 1"),
    ],
)
def test_settings_that_make_no_guidance_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FlowConfig(**fields)
