"""Noise levels, targets and weights."""

import math

import pytest
import torch

from ditkit_core.encoding.loss_masks import LOSS_WEIGHTS
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import make_model
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.flow_matching import (
    LossMask,
    NoisedBatch,
    loss_weight,
    sample_noise,
    shift_sigma,
    sigma_at,
    velocity_errors,
)
from ditkit_core.training.micro_batch import flow_loss

GRID = torch.linspace(0, 1, 1001, dtype=torch.float64)
CONFIGS = [
    FlowConfig(sampling="uniform"),
    FlowConfig(shifting="constant", shift=5.0),
    FlowConfig(sampling="logit_normal", logit_mean=0.4, logit_std=1.3),
    FlowConfig(sampling="uniform", min_sigma=0.2, max_sigma=0.7),
    FlowConfig(shifting="constant", shift=3.0, min_sigma=0.875),
    FlowConfig(
        sampling="logit_normal", shifting="constant", shift=2.0, min_sigma=0.1, max_sigma=0.9
    ),
]


def levels_of(probability, config):
    return sigma_at(probability, config, config.shift)


def test_a_shift_of_five_gives_the_official_timesteps():
    sigma = shift_sigma(torch.linspace(1, 0, 1001, dtype=torch.float64)[:-1], 5.0)
    timesteps = 1000 * sigma
    assert timesteps[416].item() == pytest.approx(875.30, abs=5e-3)
    assert timesteps[417].item() == pytest.approx(874.85, abs=5e-3)
    assert int((timesteps >= 875).sum()) == 417
    assert int((timesteps >= 900).sum()) == 358


def test_the_inverse_shift_undoes_a_shift():
    assert torch.allclose(shift_sigma(shift_sigma(GRID, 5.0), 1 / 5.0), GRID, rtol=0, atol=1e-14)


@pytest.mark.parametrize("config", CONFIGS)
def test_quantiles_cover_the_range_in_order(config):
    sigma = levels_of(GRID, config)
    assert sigma.dtype is torch.float64
    assert (sigma.diff() > 0).all()
    assert sigma[0].item() == pytest.approx(config.min_sigma, abs=1e-12)
    assert sigma[-1].item() == pytest.approx(config.max_sigma, abs=1e-12)


def test_the_logit_normal_has_the_mean_and_deviation_it_was_given():
    logits = torch.logit(sigma_at((torch.arange(100_000) + 0.5) / 100_000, CONFIGS[2]))
    assert logits.mean().item() == pytest.approx(0.4, abs=1e-3)
    assert logits.std().item() == pytest.approx(1.3, abs=1e-3)


def test_adding_the_log_of_a_shift_to_the_logit_mean_shifts():
    moved = sigma_at(GRID, FlowConfig(sampling="logit_normal", logit_mean=math.log(3.0)))
    plain = FlowConfig(sampling="logit_normal")
    assert torch.allclose(moved, shift_sigma(sigma_at(GRID, plain), 3.0), atol=1e-12)
    assert torch.allclose(moved, sigma_at(GRID, plain, 3.0), atol=1e-12)


@pytest.mark.parametrize(
    ("shifting", "expected"), [("model", 2.5), ("none", 1.0), ("constant", 7.0)]
)
def test_levels_are_shifted_by_what_the_configuration_says(shifting, expected):
    shift = 7.0 if shifting == "constant" else 1.0
    assert FlowConfig(shifting=shifting, shift=shift).shift_for(2.5) == expected


def test_a_range_restricts_the_distribution_and_clamps_nothing():
    levels = sigma_at((torch.arange(100_000) + 0.5) / 100_000, FlowConfig(), 3.0)
    inside = levels[(levels > 0.4) & (levels < 0.9)]
    restricted = sigma_at(
        (torch.arange(1000) + 0.5) / 1000, FlowConfig(min_sigma=0.4, max_sigma=0.9), 3.0
    )
    expected = torch.quantile(inside, (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000)
    assert torch.allclose(restricted, expected, atol=1e-4)


@pytest.mark.parametrize("config", CONFIGS)
def test_samples_are_fp32_and_follow_the_quantiles(config):
    draws = torch.stack(
        [sample_noise(torch.zeros(1), config, config.shift, 1, place)[0] for place in range(1000)]
    )
    assert draws.dtype is torch.float32
    assert (draws >= config.min_sigma).all() and (draws <= config.max_sigma).all()
    quantiles = torch.quantile(draws.double(), torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    assert torch.allclose(quantiles, levels_of(torch.tensor([0.25, 0.5, 0.75]), config), atol=0.03)


def test_noise_is_a_function_of_its_names():
    latents = torch.zeros(4, 1, 3, 3)
    config = FlowConfig()
    level, noise = sample_noise(latents, config, 5.0, 0, "noise", 7, 0, "clip")
    torch.manual_seed(99)
    again_level, again = sample_noise(latents, config, 5.0, 0, "noise", 7, 0, "clip")
    assert level == again_level and torch.equal(noise, again)
    for names in (
        (1, "noise", 7, 0, "clip"),
        (0, "noise", 8, 0, "clip"),
        (0, "noise", 7, 0, "other"),
    ):
        other_level, other = sample_noise(latents, config, 5.0, *names)
        assert other_level != level and not torch.equal(other, noise)


def test_bell_weights_are_those_of_the_thousand_timestep_table():
    timesteps = 1000 * shift_sigma(torch.linspace(1, 0, 1001, dtype=torch.float64)[:-1], 5.0)
    table = torch.exp(-2 * ((timesteps - 500) / 1000) ** 2)
    table = table - table.min()
    table = table * 1000 / table.sum()
    config = FlowConfig(weighting="bell")
    assert torch.allclose(loss_weight(timesteps / 1000, config, 5.0), table, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("config", CONFIGS)
def test_bell_weights_average_to_one_over_any_distribution(config):
    config = FlowConfig(**{**vars(config), "weighting": "bell"})
    weights = loss_weight(
        levels_of((torch.arange(20_000) + 0.5) / 20_000, config), config, config.shift
    )
    assert weights.mean().item() == pytest.approx(1.0, abs=5e-3)


def test_the_other_weights_follow_their_formula():
    sigma = torch.tensor([0.25, 0.5])
    assert torch.equal(loss_weight(sigma, FlowConfig()), torch.ones(2))
    assert torch.equal(
        loss_weight(sigma, FlowConfig(weighting="sigma_sqrt", min_sigma=0.1)),
        torch.tensor([16.0, 4.0]),
    )
    expected = torch.tensor([2 / (math.pi * 0.625), 4 / math.pi])
    assert torch.allclose(loss_weight(sigma, FlowConfig(weighting="cosmap")), expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"shift": 0.0},
        {"logit_std": 0.0},
        {"min_sigma": 0.5, "max_sigma": 0.5},
        {"max_sigma": 1.5},
        {"weighting": "sigma_sqrt"},
        {"guidance": -1.0},
        {"shift": 3.0},
        {"logit_mean": 1.0},
        {"logit_std": 0.5},
    ],
)
def test_settings_that_make_no_sense_are_refused_in_one_line(fields):
    with pytest.raises(UserError) as error:
        FlowConfig(**fields)
    assert "flow." in str(error.value) and "\n" not in str(error.value)


class Oracle(torch.nn.Module):
    """Answers with the true velocity, plus an offset for each sample."""

    def __init__(self, items, noise, offsets):
        super().__init__()
        self.answers = [
            eps - item["latents"] + o for item, eps, o in zip(items, noise, offsets, strict=True)
        ]

    def forward(self, inputs, engine):
        self.inputs = inputs
        return self.answers


def test_the_target_is_noise_minus_data_and_sizes_count_alike():
    items = toy_items(2, ragged=True)
    noise = [
        torch.randn(item["latents"].shape, generator=torch.Generator().manual_seed(3))
        for item in items
    ]
    sigma = torch.tensor([0.25, 1.0])
    model = Oracle(items, noise, [2.0, -3.0])
    errors = velocity_errors(
        Model(model, BlockEngine(), TOY), NoisedBatch(items, sigma, noise), 1.0
    )
    assert errors.dtype is torch.float32
    assert torch.allclose(errors, torch.tensor([4.0, 9.0]))
    assert torch.allclose(model.inputs.latents[0], 0.75 * items[0]["latents"] + 0.25 * noise[0])
    assert torch.equal(model.inputs.latents[1], noise[1])
    assert model.inputs.sigma.dtype is torch.float32


def test_a_masked_loss_is_that_of_a_plain_masked_mean_squared_error():
    """As the training scripts of diffusers and kohya write it: the squared errors, without a
    reduction, times the mask, and their mean."""
    model = make_model(TOY, TOY.architecture.presets["tiny"])
    items, sigma = toy_items(3), torch.tensor([0.2, 0.5, 0.8])
    random = torch.Generator().manual_seed(0)
    noise = [torch.randn(item["latents"].shape, generator=random) for item in items]
    weights = [torch.rand(1, *item["latents"].shape[1:], generator=random) for item in items[:2]]
    masked = [
        item | {LOSS_WEIGHTS: weight} for item, weight in zip(items, weights, strict=False)
    ] + items[2:]
    toy = Model(model, BlockEngine(), TOY)
    found = velocity_errors(toy, NoisedBatch(masked, sigma, noise), 1.0)

    assert torch.equal(found[2], velocity_errors(toy, NoisedBatch(items, sigma, noise), 1.0)[2]), (
        "without a mask, as ever"
    )
    noised = [
        (1 - s) * item["latents"] + s * eps
        for s, item, eps in zip(sigma, items, noise, strict=True)
    ]
    predicted = model(TOY.training.make_inputs(noised, sigma, items, 1.0))
    expected = []
    for velocity, item, eps, weight in zip(
        predicted, items, noise, [*weights, torch.ones(())], strict=True
    ):
        loss = torch.nn.functional.mse_loss(velocity, eps - item["latents"], reduction="none")
        expected.append((loss * weight).mean())
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-6, atol=0)
    parameters = [parameter for name, parameter in model.named_parameters() if "layers" in name]
    for ours, plain in zip(
        torch.autograd.grad(found.sum(), parameters),
        torch.autograd.grad(sum(expected), parameters),
        strict=True,
    ):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)


def test_weights_go_with_the_places_that_the_model_learns():
    """A given first frame is no part of the mean, whatever the mask says about it."""
    spec = altered(TOY, loss_mask=lambda item: torch.tensor([0.0, 1.0]).reshape(1, 2, 1, 1))
    squares = torch.rand(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    weights = torch.rand(1, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    mask = LossMask.of(spec, {"latents": squares, LOSS_WEIGHTS: weights})
    torch.testing.assert_close(mask.mean(squares), (squares * weights)[:, 1].mean())
    nothing = LossMask.of(spec, {"latents": squares, LOSS_WEIGHTS: torch.zeros(1, 2, 4, 4)})
    assert float(nothing.mean(squares)) == 0, "a sample that is black everywhere teaches nothing"


def test_the_loss_of_ones_own_loop_is_the_mean_over_sampled_levels():
    model = Model(make_model(TOY, ToyArch()), BlockEngine(), TOY)
    items, flow = toy_items(3), FlowConfig(sampling="logit_normal", weighting="bell")
    loss = flow_loss(model, items, flow, generator=torch.Generator().manual_seed(5))
    assert torch.equal(
        loss, flow_loss(model, items, flow, generator=torch.Generator().manual_seed(5))
    )
    random = torch.Generator().manual_seed(5)
    levels = [
        sigma_at(u, flow, 5.0).float() for u in torch.rand(3, dtype=torch.float64, generator=random)
    ]
    noise = [torch.randn(item["latents"].shape, generator=random) for item in items]
    errors = velocity_errors(model, NoisedBatch(items, torch.stack(levels), noise), 1.0)
    weights = torch.stack([loss_weight(level, flow, 5.0) for level in levels])
    assert torch.equal(loss, (errors * weights).mean())
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.module.parameters())
    torch.manual_seed(6)
    assert flow_loss(model, items) != loss
