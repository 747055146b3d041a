"""`flow.slider_positive`: an adapter that moves predictions along the direction from one prompt to
another."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_training import toy_model
from toy_world import World, equal

from ditkit_core.encoding.cache import Cache
from ditkit_core.encoding.encode import text_key
from ditkit_core.encoding.encoded_sample import SLIDER_PREFIXES
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.nn.lora import without_adapters
from ditkit_core.testing.toy import TOY, toy_items
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.flow_matching import NoisedBatch, slider_target, sliding
from ditkit_core.training.micro_batch import flow_loss
from ditkit_core.training.validation import validation_loss

pytestmark = pytest.mark.usefixtures("equal_steps_are_profiled_once")

SLIDER = FlowConfig(slider_positive="old", slider_negative="young", slider_guidance=1.0)
FLAGS = (
    "--flow.slider_positive",
    "old",
    "--flow.slider_negative",
    "young",
    "--sample.captions",
    "0",
)


def slider_items(count: int = 4) -> list[dict[str, torch.Tensor]]:
    """Items with the same two prompts."""
    *items, positive, negative = toy_items(count + 2)
    prompts = dict(zip(SLIDER_PREFIXES, (positive["text"], negative["text"]), strict=True))
    return [
        {**item, **{f"{prefix}text": text for prefix, text in prompts.items()}} for item in items
    ]


def predicted(
    model: Any, item: dict[str, torch.Tensor], text: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """The velocity at noise level 0.5, by the model's forward alone."""
    noised = 0.5 * item["latents"] + 0.5 * noise
    with torch.no_grad():
        velocity: torch.Tensor = model(
            TOY.training.make_inputs([noised], torch.tensor([0.5]), [{**item, "text": text}], 1.0)
        )[0]
    return velocity


def test_the_target_is_both_positive_targets_of_ai_toolkit() -> None:
    """Their "enhance positive" and "erase negative", from differences to the neutral prediction, at
    its mean and standard deviation."""
    random = torch.Generator().manual_seed(0)
    neutral, positive, negative = (
        torch.randn(3, 4, 1, 6, 6, generator=random, dtype=torch.float64) + 0.3
    )
    guidance = 3.0
    towards = (positive - neutral) - (negative - neutral)
    away = (negative - neutral) - (positive - neutral)
    target = slider_target(neutral, positive, negative, guidance)
    assert target.dtype == torch.float64
    for theirs in (neutral + guidance * towards, neutral - guidance * away):
        standard = (theirs - theirs.mean()) / (theirs.std() + 1e-8)
        torch.testing.assert_close(
            target, standard * neutral.std() + neutral.mean(), rtol=1e-12, atol=1e-12
        )


def test_predictions_are_of_the_base_whatever_the_adapter_has_learnt() -> None:
    model, trained = toy_model("lora")
    (item,) = slider_items(1)
    noise = torch.ones_like(item["latents"])
    with without_adapters(model):
        neutral, positive, negative = (
            predicted(model, item, item[name], noise)
            for name in ("text", *(f"{prefix}text" for prefix in SLIDER_PREFIXES))
        )
    for parameter in trained.values():
        parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    assert not torch.allclose(predicted(model, item, item["text"], noise), neutral)
    batch = sliding(
        Model(model, BlockEngine(), TOY), NoisedBatch([item], torch.tensor([0.5]), [noise]), SLIDER
    )
    assert batch.targets is not None and not batch.targets[0].requires_grad
    torch.testing.assert_close(batch.targets[0], slider_target(neutral, positive, negative, 1.0))


def test_a_trained_slider_moves_predictions_towards_one_end_at_strength_1_and_to_the_other_at_minus_1() -> (
    None
):
    model, trained = toy_model("lora")
    train, items = Model(model, BlockEngine(), TOY), slider_items()
    optimizer, random = (
        torch.optim.AdamW(trained.values(), lr=2e-2),
        torch.Generator().manual_seed(0),
    )
    for _ in range(30):
        flow_loss(train, items, SLIDER, generator=random).backward()
        optimizer.step()
        optimizer.zero_grad()
    noise = torch.randn(items[0]["latents"].shape, generator=random)
    moved = {}
    for strength in (1, -1):
        if strength == -1:
            for name, parameter in trained.items():
                if "lora_B" in name:
                    parameter.data.neg_()
        shares = []
        for item in items:
            with without_adapters(model):
                neutral, positive, negative = (
                    predicted(model, item, item[name], noise)
                    for name in ("text", *(f"{prefix}text" for prefix in SLIDER_PREFIXES))
                )
            wanted = positive - negative
            change = predicted(model, item, item["text"], noise) - neutral
            shares.append(float((change * wanted).sum() / wanted.square().sum()))
        moved[strength] = sum(shares) / len(shares)
    assert moved[1] > 0.3 and moved[-1] < -0.3, moved


def test_validation_measures_the_slider() -> None:
    """An adapter that does nothing yet is as far from the target as the target is from the neutral
    prediction."""
    model, _ = toy_model("lora")
    train, (item,) = Model(model, BlockEngine(), TOY), slider_items(1)
    same = {**item, **{f"{prefix}text": item["text"] for prefix in SLIDER_PREFIXES}}
    assert validation_loss(train, ["clip"], [same], (0.5,), SLIDER).mean < 1e-10
    assert validation_loss(train, ["clip"], [item], (0.5,), SLIDER).mean > 1e-5


def test_an_item_without_the_prompts_is_refused_with_what_makes_them() -> None:
    model, _ = toy_model("lora")
    with pytest.raises(UserError, match="encode them with slider = "):
        flow_loss(Model(model, BlockEngine(), TOY), toy_items(1), SLIDER)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slider_positive": " "}, "slider_positive is blank"),
        (
            {"slider_positive": "a", "slider_negative": "\0"},
            "slider_negative is blank or has a null byte",
        ),
        ({"slider_negative": "young"}, "need flow.slider_positive"),
        ({"slider_guidance": 2.0}, "need flow.slider_positive"),
        ({"slider_positive": "old", "slider_negative": "old"}, "are the same prompt"),
        ({"slider_positive": "old", "slider_guidance": 0.0}, "must be above 0"),
        ({"slider_positive": "old", "slider_guidance": float("nan")}, "must be above 0"),
        ({"slider_positive": "old", "target_guidance": 3.0}, "two targets of one prediction"),
    ],
)
def test_settings_that_make_no_slider_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FlowConfig(**fields)


def test_a_run_goes_on_bitwise_learns_another_target_and_refuses_other_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    world, flags = World(tmp_path), (*FLAGS, "--held_out.clips", "1", "--prior.match_base", "0.25")
    assert world.train("at once", 2, *flags) == 0
    assert world.train("in parts", 1, *flags) == 0 and world.train("in parts", 2, *flags) == 0
    assert equal(world.adapter("at once"), world.adapter("in parts"))
    assert world.train("plain", 2, *flags[4:]) == 0
    assert not equal(world.adapter("at once"), world.adapter("plain"))
    capsys.readouterr()
    assert world.train("at once", 3, "--flow.slider_positive", "ancient", *flags[2:]) == 1
    assert "flow.slider_positive" in capsys.readouterr().err


def test_the_prompts_are_not_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ditkit_core.encoding.cache._SETTLED_SECONDS", -1)
    world, prune = World(tmp_path), ("--prune-cache", "unused")
    assert world.run("encode", "--run.folder", str(tmp_path / "run"), *FLAGS, *prune) == 0
    entries = [
        Cache(tmp_path / "cache").path("text", text_key(prompt, world.text))
        for prompt in ("old", "young")
    ]
    assert all(entry.exists() for entry in entries)
    assert world.train("run", 1, *FLAGS) == 0
    assert world.run("encode", "--run.folder", str(tmp_path / "other"), *FLAGS[4:], *prune) == 0
    assert all(entry.exists() for entry in entries), (
        "another run's pruning knows what this one needs"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--adapter.method", "full"), "changes the base itself"),
        (("--prior.prompt", "a class"), "would train the class images"),
    ],
)
def test_a_run_that_can_make_no_slider_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert World(tmp_path).train("run", 1, *FLAGS, *flags) == 1
    assert message in capsys.readouterr().err


def test_a_plan_counts_one_more_forward_of_guidance_and_three_of_a_slider_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    world, plans = World(tmp_path), []
    for flags in ((), ("--flow.target_guidance", "3"), FLAGS[:4]):
        folder = ("--run.folder", str(tmp_path / "run"), "--adapter.targets", '["qkv"]')
        assert world.run("train", *folder, "--plan", "--json", "--gpus", "24GiB", *flags) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert len({plan["devices"][0]["peak"] for plan in plans}) == 1
    plain, one, three = (plan["seconds_per_step"] for plan in plans)
    assert three - plain == pytest.approx(3 * (one - plain), rel=1e-3) and one > plain
