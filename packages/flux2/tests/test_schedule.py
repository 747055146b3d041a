"""The noise levels against diffusers' scheduler, and against the authors' table."""

import math
from typing import Any

import pytest
import torch

from ditkit_flux2.schedule import empirical_mu, linear_mu, sigmas, training_shift


@pytest.mark.parametrize("steps", [4, 10, 28, 50, 200])
@pytest.mark.parametrize("tokens", [16, 256, 1024, 4096, 4300, 4301, 6889, 16384])
def test_empirical_mu_is_that_of_diffusers(tokens: int, steps: int) -> None:
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    # the same line in another order of operations
    assert empirical_mu(tokens, steps) == pytest.approx(
        compute_empirical_mu(tokens, steps), rel=1e-12
    )


def test_empirical_mu_jumps_above_4300_tokens() -> None:
    rounded = [
        round(empirical_mu(tokens, 50), 2) for tokens in (1024, 4096, 4300, 4301, 6889, 16384)
    ]
    assert rounded == [1.70, 2.02, 2.04, 1.18, 1.62, 3.23]
    assert round(empirical_mu(4300, 4), 2) == 2.31 and empirical_mu(4301, 4) == empirical_mu(
        4301, 50
    )


def test_training_is_shifted_along_the_line_between_its_two_sizes() -> None:
    assert linear_mu(256) == 0.5 and linear_mu(4096) == pytest.approx(1.15, rel=1e-12)
    assert linear_mu(2176) == pytest.approx((0.5 + 1.15) / 2)
    assert training_shift(torch.empty(128, 1, 16, 16, device="meta")) == pytest.approx(
        math.exp(0.5)
    )
    assert training_shift(torch.empty(128, 1, 128, 32, device="meta")) == pytest.approx(
        math.exp(1.15)
    )


def diffusers_scheduler() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, shift=3.0, base_shift=0.5, max_shift=1.15,
        base_image_seq_len=256, max_image_seq_len=4096
    )  # fmt: skip


@pytest.mark.parametrize(("tokens", "steps"), [(24, 4), (1024, 50), (4096, 28), (9216, 50)])
def test_the_levels_are_those_of_diffusers(tokens: int, steps: int) -> None:
    scheduler = diffusers_scheduler()
    given = torch.linspace(1, 1 / steps, steps, dtype=torch.float64).tolist()
    scheduler.set_timesteps(sigmas=given, mu=empirical_mu(tokens, steps))
    levels = sigmas(tokens, steps, 0.0)
    assert levels.dtype == torch.float64 and levels.shape == (steps + 1,)
    assert levels[0] == 1 and levels[-1] == 0 and (levels.diff() < 0).all()
    # diffusers' are fp32, whose rounding near 1 is 6e-8 and is made several times
    torch.testing.assert_close(levels.float(), scheduler.sigmas, atol=5e-7, rtol=0)


def test_a_constant_shift_takes_the_place_of_the_fit() -> None:
    assert torch.equal(
        sigmas(1024, 4, 1.0), torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0], dtype=torch.float64)
    )
    assert sigmas(1024, 2, 3.0)[1].item() == pytest.approx(0.75)
    assert torch.equal(sigmas(24, 5, 3.0), sigmas(9216, 5, 3.0))
