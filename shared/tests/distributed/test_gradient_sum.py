"""The order in which a step's gradients are added."""

import pytest
import torch
from torch import nn

from ditkit_core.distributed.gradient_sum import GradientSum, num_waiting_sums
from ditkit_core.distributed.ranks import Ranks


def tree(values):
    """The sum by its definition: the left part is the largest power of two below the number."""
    if len(values) == 1:
        return values[0]
    left = 1 << (len(values) - 1).bit_length() - 1
    return tree(values[:left]) + tree(values[left:])


@pytest.mark.parametrize("count", range(1, 14))
def test_gradients_are_added_in_the_tree_of_their_numbers(count):
    random = torch.Generator().manual_seed(count)
    gradients = [
        torch.randn(64, generator=random) * 10.0 ** (number % 5) for number in range(count)
    ]
    parameter = nn.Parameter(torch.zeros(64))
    total = GradientSum({"p": parameter}, count, Ranks())
    for number, gradient in enumerate(gradients):
        assert len(total._sums) == num_waiting_sums(number), (
            "the plan counts as many sets of gradients as there are"
        )
        (parameter * gradient).sum().backward()
        total.add(number)
    total.finish()
    assert torch.equal(parameter.grad, tree(gradients))


def test_a_parameter_without_a_gradient_keeps_none():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    total = GradientSum({"used": used, "unused": unused}, 3, Ranks())
    for number in range(3):
        used.sum().backward()
        total.add(number)
    total.finish()
    assert used.grad.tolist() == [3, 3] and unused.grad is None
