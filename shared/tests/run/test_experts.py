"""Which noise levels an expert trains on, what it has of its own, and which files are whose."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from ditkit_core.errors import UserError
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.spec import Expert
from ditkit_core.run.config import ExpertsConfig, RunConfig
from ditkit_core.run.experts import (
    check_experts,
    check_named,
    named_after,
    noise_range,
    own_settings,
    restricted,
)
from ditkit_core.training.config import FlowConfig, HeldOutConfig
from ditkit_core.training.flow_matching import sample_noise, shift_sigma, sigma_at

BOUNDARIES = (0.875, 0.9, 0.3, 0.7, 0.8999999, 0.417)


def pair(boundary: float) -> tuple[Expert, Expert]:
    return (
        Expert(
            name="high_noise", part="transformer", min_sigma=boundary, max_sigma=1.0, guidance=4.0
        ),
        Expert(
            name="low_noise", part="transformer_2", min_sigma=0.0, max_sigma=boundary, guidance=3.0
        ),
    )


def flows(boundary: float, **settings: Any) -> tuple[FlowConfig, FlowConfig]:
    high, low = (
        restricted(expert, FlowConfig(**settings), HeldOutConfig())[0] for expert in pair(boundary)
    )
    return high, low


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_ranges_are_adjacent_and_their_ends_on_the_right_side_in_fp32(boundary: float) -> None:
    (lowest, top), (zero, highest) = (noise_range(expert) for expert in pair(boundary))
    assert (zero, top) == (0.0, 1.0)
    first, last = torch.tensor(lowest), torch.tensor(highest)
    assert float(first) == lowest and float(last) == highest, "fp32 numbers"
    assert torch.nextafter(last, torch.tensor(1.0)) == first, "no level is nobody's"
    assert float(1000 * last) < 1000 * boundary <= float(1000 * first)
    assert abs(lowest - boundary) < 1e-6


@pytest.mark.parametrize("shift", [1.0, 5.0, 12.0])
@pytest.mark.parametrize("sampling", ["uniform", "logit_normal"])
@pytest.mark.parametrize("boundary", [0.875, 0.9])
def test_no_sample_is_on_the_wrong_side(boundary: float, sampling: Any, shift: float) -> None:
    """Also those at the very ends of the distribution, as the loop draws them: in fp64, then fp32,
    then times 1000."""
    ends = torch.tensor([0.0, 5e-324, 1e-16, 1e-9, 1 - 1e-9, 1 - 2**-53, 1.0], dtype=torch.float64)
    close = torch.linspace(0, 1e-6, 1000, dtype=torch.float64)
    many = torch.rand(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drawn = torch.cat([ends, close, 1 - close, many])
    high, low = (
        1000 * sigma_at(drawn, flow, shift).float() for flow in flows(boundary, sampling=sampling)
    )
    assert (
        high.dtype == torch.float32
        and float(high.min()) >= 1000 * boundary
        and float(high.max()) <= 1000
    )
    assert float(low.max()) < 1000 * boundary and float(low.min()) >= 0
    for i in range(200):
        for flow, is_high in zip(flows(boundary, sampling=sampling), (True, False), strict=True):
            sigma, _ = sample_noise(torch.zeros(1), flow, shift, 0, i)
            assert (float(1000 * sigma) >= 1000 * boundary) == is_high


def conditional(sigma: torch.Tensor, low: float, high: float, shift: float) -> torch.Tensor:
    """The exact share of the restricted distribution (uniform, shifted) below a level."""
    a, b, x = (
        shift_sigma(torch.as_tensor(value, dtype=torch.float64), 1 / shift)
        for value in (low, high, sigma)
    )
    return ((x - a) / (b - a)).clamp(0, 1)


def distance(draws: torch.Tensor, low: float, high: float, shift: float) -> float:
    """Kolmogorov's between draws and the exact restricted distribution."""
    ordered, count = draws.double().sort().values, len(draws)
    exact = conditional(ordered, low, high, shift)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    return float(torch.maximum((steps[1:] - exact).abs(), (exact - steps[:-1]).abs()).max())


@pytest.mark.parametrize(
    ("boundary", "shift"), [(0.875, 3.0), (0.875, 5.0), (0.875, 12.0), (0.9, 5.0)]
)
def test_an_experts_levels_are_the_distribution_restricted_and_not_clamped(
    boundary: float, shift: float
) -> None:
    count = 20_000
    uniform = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    critical = 1.95 / math.sqrt(count)  # of a thousand true distributions, one is further off
    for flow, low, high in zip(flows(boundary), (boundary, 0.0), (1.0, boundary), strict=True):
        assert distance(sigma_at(uniform, flow, shift).float(), low, high, shift) < critical
    whole = sigma_at(uniform, FlowConfig(), shift)
    clamped = whole.clamp(boundary, 1.0)
    piled = float((clamped == boundary).double().mean())
    assert distance(clamped, boundary, 1.0, shift) > 10 * critical
    assert abs(piled - float(conditional(torch.tensor(boundary), 0, 1, shift))) < 0.02
    if (boundary, shift) == (0.875, 3.0):
        assert 0.68 < piled < 0.72, (
            "what a trainer that clamps does: seven of ten draws sit on the boundary"
        )
    unrestricted = distance(whole, boundary, 1.0, shift)
    assert unrestricted > 10 * critical, (
        "a high-noise expert that is trained on all levels would be noticed"
    )


@pytest.mark.parametrize(("boundary", "share"), [(0.875, 0.417), (0.9, 0.358)])
def test_the_high_noise_experts_share_at_shift_5_is_the_known_one(
    boundary: float, share: float
) -> None:
    """Source: DiffSynth-Studio's index fractions, by 1000 shifted timesteps; they hold for shift 5
    alone."""
    count = 100_000
    draws = sigma_at((torch.arange(count) + 0.5) / count, FlowConfig(), 5.0)
    high, low = pair(boundary)
    lowest = noise_range(high)[0]
    assert abs(float((draws >= lowest).double().mean()) - share) < 1e-3
    assert abs(float((draws <= noise_range(low)[1]).double().mean()) - (1 - share)) < 1e-3
    at_12 = sigma_at((torch.arange(count) + 0.5) / count, FlowConfig(), 12.0)
    assert abs(float((at_12 >= lowest).double().mean()) - share) > 0.1


def test_configured_levels_intersect_with_the_experts() -> None:
    high, low = flows(0.875, min_sigma=0.2, max_sigma=0.95)
    assert (high.min_sigma, high.max_sigma) == (0.875, 0.95)
    assert low.min_sigma == 0.2 and 0.8749 < low.max_sigma < 0.875
    with pytest.raises(
        UserError, match=r"flow.max_sigma = 0.8 leave nothing to the high_noise expert.*0.875 to 1"
    ):
        flows(0.875, max_sigma=0.8)


def test_held_out_levels_are_the_experts_own() -> None:
    sections = [restricted(expert, FlowConfig(), HeldOutConfig()) for expert in pair(0.875)]
    (_, of_high), (_, of_low) = sections
    assert of_low.sigmas == (0.1, 0.3, 0.5, 0.7), "those of the default that it sees"
    assert len(of_high.sigmas) == 5 and all(0.875 <= sigma < 1 for sigma in of_high.sigmas), (
        "a grid of its own"
    )
    assert len(set(of_high.sigmas)) == 5
    edges = HeldOutConfig(sigmas=(1.0,))
    low_end = restricted(pair(0.875)[1], FlowConfig(), edges)[1].sigmas
    assert all(float(1000 * torch.tensor(sigma)) < 875 for sigma in low_end), (
        "not even the end of its range is over it"
    )
    assert restricted(pair(0.875)[0], FlowConfig(), edges)[1].sigmas == (1.0,)
    for expert, (_, grid) in zip(pair(0.875), sections, strict=True):
        narrow = FlowConfig(min_sigma=0.6, max_sigma=0.9)
        assert restricted(expert, narrow, HeldOutConfig())[1] == grid, (
            "[flow] may change while a run goes on"
        )


def test_restricting_twice_changes_nothing() -> None:
    for expert in pair(0.9):
        once = restricted(expert, FlowConfig(), HeldOutConfig())
        assert restricted(expert, *once) == once


def test_each_expert_has_its_own_rank_rate_and_steps() -> None:
    config = replace(RunConfig(), experts=ExpertsConfig(rank=(16, 32), lr=(1e-5,), steps=()))
    high, low = (own_settings(config, pair(0.9), expert) for expert in pair(0.9))
    assert (high.adapter.rank, low.adapter.rank) == (16, 32)
    assert high.optim.lr == low.optim.lr == 1e-5 and high.train.steps == config.train.steps
    assert (high.experts, low.experts) == (
        ExpertsConfig(train="high_noise"),
        ExpertsConfig(train="low_noise"),
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"rank": (1, 2, 3)},
            (
                r"experts.rank has 3 numbers; give one for each expert \(high_noise, low_noise\), or "
                r"one"
            ),
        ),
        ({"lr": (1e-4, 1e-4, 1e-4)}, "experts.lr has 3 numbers"),
        ({"steps": (1, 2, 3)}, "experts.steps has 3 numbers"),
    ],
)
def test_as_many_numbers_as_experts(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_experts(ExpertsConfig(**settings), pair(0.9), ModelPaths(), ["two"])


@pytest.mark.parametrize(
    ("settings", "model", "says"),
    [
        (
            {"train": "low_noise"},
            {},
            "experts.train is for a model of two experts.*set model.preset to one of two",
        ),
        ({"rank": (4,)}, {}, "experts.rank is for a model of two"),
        (
            {},
            {"transformer_2": "a.safetensors"},
            "model.transformer_2 is the second of two experts.*model.preset",
        ),
        (
            {},
            {"transformer": "wan2.2_t2v_low_noise_14B_fp16.safetensors"},
            r"named after one of two experts \(low_noise\)",
        ),
    ],
)
def test_a_model_of_one_transformer_has_no_experts(settings: Any, model: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_experts(ExpertsConfig(**settings), (), ModelPaths(**model), ["two"])
    check_experts(ExpertsConfig(), (), ModelPaths(transformer="wan.safetensors"), ["two"])


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors", "high_noise"),
        ("/models/Wan2.2/low_noise_model", "low_noise"),
        ("/models/low_noise_model/diffusion_pytorch_model.safetensors", "low_noise"),
        ("lora_HIGH_fp16.safetensors", "high_noise"),
        ("Wan2.2-T2V-A14B-LowNoise-Q8.safetensors", "low_noise"),
        ("/low_vram/wan_high_noise.safetensors", "high_noise"),
        ("base/transformer_2", ""),
        ("lowlight.safetensors", ""),
        ("high_and_low_noise_high_noise.safetensors", ""),
        ("a slow pan.safetensors", ""),
    ],
)
def test_names_tell_experts_apart(path: str, name: str) -> None:
    assert named_after(path) == name


def test_files_of_the_other_expert_are_refused() -> None:
    """Two experts have the same shapes: a swapped pair trains without a word otherwise."""
    swapped = ModelPaths(
        transformer="wan_low_noise.safetensors", transformer_2="wan_high_noise.safetensors"
    )
    with pytest.raises(
        UserError,
        match="model.transformer = .* is named after the low_noise expert; model.transformer is",
    ):
        check_experts(ExpertsConfig(), pair(0.9), swapped, ["two"])
    for path in ("base/transformer_2", "base/transformer_2/model.safetensors"):
        swapped = ModelPaths(transformer=path, transformer_2="base/transformer")
        with pytest.raises(
            UserError,
            match="model.transformer = .* is in 'transformer_2', which is the folder of the low",
        ):
            check_experts(ExpertsConfig(), pair(0.9), swapped, ["two"])
    own = ModelPaths(transformer="high/transformer", transformer_2="low/transformer")
    check_experts(ExpertsConfig(), pair(0.9), own, ["two"])
    right = ModelPaths(
        transformer="wan_high_noise.safetensors", transformer_2="wan_low_noise.safetensors"
    )
    check_experts(ExpertsConfig(), pair(0.9), right, ["two"])
    high, low = pair(0.9)
    check_named(high, "adapter.init", "a_high_noise.safetensors")
    check_named(high, "base.merge", "b.safetensors")
    with pytest.raises(
        UserError,
        match="adapter.init = .* is named after the high_noise expert, and this is the low",
    ):
        check_named(low, "adapter.init", "a_high_noise.safetensors")
    with pytest.raises(UserError, match="base.merge = .* is named after the low_noise expert"):
        check_named(high, "base.merge", "lightning-LOW.safetensors")
