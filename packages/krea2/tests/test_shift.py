"""The shift of Krea 2's noise levels, which grows with the tokens of an image: patches of 2 × 2
latents."""

import math

import pytest
import torch

from ditkit_krea2.spec import KREA2


@pytest.mark.parametrize(
    ("height", "width", "mu"), [(32, 32, 0.5), (16, 64, 0.5), (160, 160, 1.15), (64, 104, 0.648958)]
)
def test_training_shifts_along_the_line_of_tokens(height: int, width: int, mu: float) -> None:
    shift = KREA2.training.shift(torch.empty(16, 1, height, width))
    assert math.log(shift) == pytest.approx(mu, rel=1e-5)
