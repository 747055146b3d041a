"""FLUX.2 trained with the Triton kernels by several ranks, under Triton's interpreter."""

from pathlib import Path

import pytest
from kernel_ranks_of_flux2 import CASES

from ditkit_core.testing.conformance_kernel_ranks import KernelRanksConformance


@pytest.mark.slow  # and not with those of ranks, which each change waits for: the interpreter takes two minutes
class TestKernelRanks(KernelRanksConformance):
    script = Path(__file__).parent / "support" / "kernel_ranks_of_flux2.py"
    cases = CASES
    more = ("gated_unit", "gated_unit_backward")
