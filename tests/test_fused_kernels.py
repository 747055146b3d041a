"""tools/bench/fused_kernels.py on a block of a few operations, whose traffic can be counted by hand."""

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ditkit_core.planner.memory_tracker import Kernel
from workspace import ROOT


class Carry(NamedTuple):
    x: Tensor


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, carry):
        return carry._replace(x=(carry.x * self.rate).sin() + carry.x)


@pytest.mark.slow  # importing the compiler takes seconds
def test_a_chain_of_operations_reads_its_inputs_once_and_writes_its_result_once(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))
    from fused_kernels import kernels_of

    carry = Carry(torch.ones(4, 16, requires_grad=True))
    tensor, rate = 4 * 16 * 4, 16 * 4
    forward, backward = (
        2 * tensor + rate,
        3 * tensor + rate,
    )  # the gradient of x from x, the rate and the gradient above
    assert kernels_of(Waves(), carry) == Counter(
        {Kernel("elementwise", 0, forward): 1, Kernel("elementwise", 0, backward): 1}
    )
