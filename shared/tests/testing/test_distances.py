"""The distances that conformance checks compare with tolerances: a NaN in any tensor is within
none."""

import math
from typing import Any

import pytest
import torch

from ditkit_core.distributed.ranks import Ranks
from ditkit_core.testing import context_steps, kernel_conformance, sharded_steps
from ditkit_core.testing.world import largest


def of_kernels(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return kernel_conformance.difference([*found.values()], [*expected.values()])


def of_ranks_that_share_tokens(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> float:
    return context_steps._gradients_apart(found, expected, Ranks())


@pytest.mark.parametrize("place", ["first", "second", "third"])
@pytest.mark.parametrize("distance", [of_kernels, of_ranks_that_share_tokens, sharded_steps.apart])
def test_a_tensor_with_a_nan_is_at_no_distance(distance: Any, place: str) -> None:
    expected = {name: torch.arange(1.0, 4.0) for name in ("first", "second", "third")}
    assert distance(expected, expected) == 0
    near = {name: tensor * 1.5 for name, tensor in expected.items()}
    assert distance(near, expected) == pytest.approx(0.5)
    assert math.isnan(distance({**near, place: torch.tensor([1.0, torch.nan, 3.0])}, expected))


def test_the_largest_is_that_of_numbers() -> None:
    assert largest(each for each in (0.5, 2.0, 1.0)) == 2.0
    assert all(
        math.isnan(largest(each))
        for each in ([math.nan, 1.0], [1.0, math.nan], [2.0, math.nan, 3.0])
    )
