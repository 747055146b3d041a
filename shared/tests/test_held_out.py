"""The held-out loss: a fixed grid, measured without touching anything."""

from dataclasses import replace

import pytest
import torch

from ditkit_core.activation_checkpoint import Engine
from ditkit_core.errors import UserError
from ditkit_core.held_out import HeldOutConfig, held_out_loss
from ditkit_core.testing.toy import TOY, toy_items
from ditkit_core.testing.world import make_model
from toy_training import toy_model

SIGMAS = (0.2, 0.5, 0.9)


def measure(model, ids=("a", "b", "c"), sigmas=SIGMAS):
    items = dict(zip("abc", toy_items(3, ragged=True), strict=True))
    return held_out_loss(model, Engine(), TOY, ids, [items[name] for name in ids], sigmas)


def test_noise_levels_reach_the_model_in_fp32_as_they_were_named():
    """993.7 thousandths have no bf16 form: the nearest are 992 and 996."""
    seen = []

    def seeing(noised, sigma, items, guidance):
        seen.append((sigma, guidance))
        return TOY.make_inputs(noised, sigma, items, guidance)

    model = make_model(TOY, TOY.presets["tiny"], dtype=torch.bfloat16)
    held_out_loss(model, Engine(), replace(TOY, make_inputs=seeing), ["a"], toy_items(1), (0.9937,), 3.5)
    ((sigma, guidance),) = seen
    assert torch.equal(sigma, torch.tensor([0.9937])) and guidance == 3.5


def test_the_number_is_the_same_whatever_was_drawn_before():
    model, _ = toy_model(dropout=0.5)
    first = measure(model)
    torch.manual_seed(123)
    assert measure(model) == first
    assert first.mean > 0 and list(first.per_sigma) == list(SIGMAS)
    assert first.mean == pytest.approx(sum(first.per_sigma.values()) / 3)


def test_a_clip_and_a_level_count_alike_whatever_else_is_measured():
    model, _ = toy_model()
    alone = [measure(model, (name,)).per_sigma for name in "abc"]
    together = measure(model).per_sigma
    for sigma in SIGMAS:
        assert together[sigma] == sum(one[sigma] for one in alone) / 3
    assert measure(model, sigmas=(0.5,)).mean == together[0.5]


def test_measuring_leaves_modes_gradients_and_random_numbers_as_they_were():
    model, trainable = toy_model(dropout=0.5)
    model.train()
    model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(7)
    before = torch.get_rng_state()
    measure(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in trainable.values())


def test_modes_are_put_back_after_an_error():
    model, _ = toy_model()
    model.train()
    with pytest.raises(KeyError):
        held_out_loss(model, Engine(), TOY, ["a"], [{"latents": toy_items(1)[0]["latents"]}], SIGMAS)
    assert all(module.training for module in model.modules())


def test_a_better_model_has_a_lower_loss():
    model, trainable = toy_model()
    before = measure(model).mean
    with torch.no_grad():
        trainable["head.out.weight"].mul_(10)
    assert measure(model).mean > before


@pytest.mark.parametrize("fields", [{"clips": -1}, {"every_steps": -1}, {"sigmas": ()}, {"sigmas": (0.5, 1.5)}])
def test_settings_out_of_range_are_refused(fields):
    with pytest.raises(UserError, match=r"held_out\."):
        HeldOutConfig(**fields)
