"""Noise levels of FLUX.2: how far they are shifted towards noise, in training and when samples are drawn, and in how many steps.

Source: `compute_empirical_mu` and `get_schedule` in black-forest-labs/flux2, src/flux2/sampling.py. A shift moves a level s to
shift * s / (1 + (shift - 1) * s); both rules below give its logarithm, mu, from the number of tokens of the picture.
"""

import math

import torch
from jaxtyping import Float64
from torch import Tensor

from ditkit_core.models.spec import SampleDefaults
from ditkit_flux2.presets import Flux2Arch

_FEW = (256, 0.5)
_MANY = (4096, 1.15)
"""(tokens, mu) of the two ends of the line that FLUX models are trained along: pictures of 256² and of 1024² pixels."""

_AT_10_STEPS = (8.73809524e-05, 1.89833333)
_AT_200_STEPS = (0.00016927, 0.45666666)
"""(slope, offset) of mu over the tokens, as the authors measured them for schedules of 10 and of 200 steps."""

MOST_TOKENS_BY_STEPS = 4300
"""Up to so many tokens the steps decide too; beyond, the line of 200 steps holds whatever they are."""


def linear_mu(tokens: int) -> float:
    """Logarithm of the shift in training: a straight line over the tokens, which goes on beyond its two ends."""
    (few, low), (many, high) = _FEW, _MANY
    return low + (high - low) / (many - few) * (tokens - few)


def training_shift(latents: Tensor) -> float:
    """Shift of the noise levels in training on latents [channels, frames, height, width]; references do not count."""
    return math.exp(linear_mu(math.prod(latents.shape[1:])))


def empirical_mu(tokens: int, steps: int) -> float:
    """Logarithm of the shift that the authors draw samples with: a fit in tokens and steps.

    It jumps at 4300 tokens, a little above 1024² pixels: from 2.04 to 1.18 at 50 steps, from 2.31 to 1.18 at 4. That is how
    the models' authors and every program after them draw, so it is kept, and a constant shift is the way round it.
    """
    at_200 = _AT_200_STEPS[0] * tokens + _AT_200_STEPS[1]
    if tokens > MOST_TOKENS_BY_STEPS:
        return at_200
    at_10 = _AT_10_STEPS[0] * tokens + _AT_10_STEPS[1]
    return at_200 + (at_200 - at_10) / 190 * (steps - 200)


def sigmas(tokens: int, steps: int, shift: float) -> Float64[Tensor, "levels"]:
    """The noise levels of a schedule, from 1 to 0: one more than steps.

    Args:
        tokens: Of the picture that is drawn, without text and references.
        steps: How often the model's velocity is followed.
        shift: Of the levels; 0 takes the authors' own, `empirical_mu`.
    """
    shift = shift or math.exp(empirical_mu(tokens, steps))
    levels = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return shift * levels / (1 + (shift - 1) * levels)


def sample_defaults(arch: Flux2Arch) -> SampleDefaults:
    """How the models' authors draw: distilled klein in 4 steps without guidance, dev with its embedding of guidance, klein base
    with a negative prompt, which is the empty one.
    """
    if arch.guidance:
        return SampleDefaults(steps=50, guidance=4.0, guided_by="embedding")
    if arch.distilled:
        return SampleDefaults(steps=4, guidance=1.0, guided_by="nothing")
    return SampleDefaults(steps=50, guidance=4.0, guided_by="negative")
