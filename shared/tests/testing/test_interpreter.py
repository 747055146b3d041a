"""Triton's interpreter, as kernels are tested in it."""

import operator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")  # not on every system

import triton.language as tl
from triton.runtime import interpreter

from ditkit_core.testing.interpreter import repair_interpreter


@pytest.fixture
def repaired(monkeypatch):
    """Until the test ends."""
    builder = interpreter.InterpreterBuilder
    for where, name in (
        (interpreter, "_patch_lang_tensor"),
        (builder, "create_dot"),
        (builder, "cast_impl"),
    ):
        monkeypatch.setattr(where, name, getattr(where, name))  # is put back
    repair_interpreter()


@pytest.mark.usefixtures("repaired")
def test_a_loop_may_end_at_a_computed_number():
    class Tensor:
        handle = SimpleNamespace(data=np.array([3], dtype=np.int32))

    interpreter._patch_lang_tensor(Tensor, SimpleNamespace(set_attr=setattr))
    assert operator.index(Tensor()) == 3


@pytest.mark.usefixtures("repaired")
def test_numbers_are_rounded_to_bf16_as_a_gpu_rounds_them():
    """To the nearest, and of two equally near ones to the even one; torch rounds so too."""
    ties = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8]
    values = torch.tensor([*ties, 0.0, -0.0, 1e-40, 3.4e38, float("inf"), float("nan")])
    values = torch.cat([values, torch.randn(1000, generator=torch.Generator().manual_seed(0))])
    handle = interpreter.TensorHandle(values.numpy(), tl.float32)
    bits = interpreter.InterpreterBuilder().cast_impl(handle, tl.bfloat16).data
    rounded = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    torch.testing.assert_close(rounded, values.bfloat16(), rtol=0, atol=0, equal_nan=True)
