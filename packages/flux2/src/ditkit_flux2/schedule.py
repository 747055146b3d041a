"""Noise levels of FLUX.2: their shift towards noise in training and sampling, and the number of
steps.

Source: `compute_empirical_mu` and `get_schedule` in black-forest-labs/flux2, src/flux2/sampling.py.
A shift moves a level s to shift * s / (1 + (shift - 1) * s); both rules below give its logarithm,
mu, from the number of tokens of the image.
"""

import math

from jaxtyping import Float64
from torch import Tensor

from ditkit_core.families.euler import shifted_levels
from ditkit_core.models.spec import SampleDefaults
from ditkit_flux2.presets import Flux2Arch

_FEW = (256, 0.5)
_MANY = (4096, 1.15)
"""(tokens, mu) of the two ends of the line that FLUX models are trained along: images of 256² and
of 1024² pixels."""

_AT_10_STEPS = (8.73809524e-05, 1.89833333)
_AT_200_STEPS = (0.00016927, 0.45666666)
"""(slope, offset) of mu over the tokens, as the authors measured them for schedules of 10 and of
200 steps."""

MOST_TOKENS_BY_STEPS = 4300
"""Up to this many tokens, mu depends on the number of steps as well; beyond it, the line of 200
steps applies to any number."""


def linear_mu(tokens: int) -> float:
    """Logarithm of the shift in training: a straight line over the tokens, extended beyond its two
    ends."""
    (few, low), (many, high) = _FEW, _MANY
    return low + (high - low) / (many - few) * (tokens - few)


def training_shift(latents: Tensor) -> float:
    """Shift of the noise levels in training on latents [channels, frames, height, width];
    references are not counted."""
    return math.exp(linear_mu(math.prod(latents.shape[1:])))


def empirical_mu(tokens: int, steps: int) -> float:
    """Logarithm of the shift that the authors sample with: a fit over tokens and steps.

    It jumps at 4300 tokens, a little above 1024² pixels: from 2.04 to 1.18 at 50 steps, from 2.31
    to 1.18 at 4. The models' authors and all programs after them sample this way, so the jump is
    kept. A constant shift avoids it.
    """
    at_200 = _AT_200_STEPS[0] * tokens + _AT_200_STEPS[1]
    if tokens > MOST_TOKENS_BY_STEPS:
        return at_200
    at_10 = _AT_10_STEPS[0] * tokens + _AT_10_STEPS[1]
    return at_200 + (at_200 - at_10) / 190 * (steps - 200)


def sigmas(tokens: int, steps: int, shift: float) -> Float64[Tensor, " levels"]:
    """The noise levels of a schedule, from 1 to 0: one more than steps.

    Args:
        tokens: Tokens of the generated image, without text and references.
        steps: Number of Euler steps.
        shift: Shift of the levels; 0 takes the authors' shift, `empirical_mu`.
    """
    return shifted_levels(steps, shift or math.exp(empirical_mu(tokens, steps)))


def sample_defaults(arch: Flux2Arch) -> SampleDefaults:
    """Steps and guidance of the models' authors.

    Distilled klein takes 4 steps without guidance, dev embeds its guidance, and klein base has a
    negative prompt, the empty one.
    """
    if arch.guidance:
        return SampleDefaults(steps=50, guidance=4.0, guided_by="embedding")
    if arch.distilled:
        return SampleDefaults(steps=4, guidance=1.0, guided_by="nothing")
    return SampleDefaults(steps=50, guidance=4.0, guided_by="negative")
