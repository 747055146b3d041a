"""Triton's interpreter, as kernels are tested in it."""

import operator
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")  # not on every system

from triton.runtime import interpreter

from ditkit_core.testing.interpreter import repair_interpreter


def test_a_loop_may_end_at_a_computed_number(monkeypatch):
    class Tensor:
        handle = SimpleNamespace(data=np.array([3], dtype=np.int32))

    monkeypatch.setattr(
        interpreter, "_patch_lang_tensor", interpreter._patch_lang_tensor
    )  # is put back
    repair_interpreter()
    interpreter._patch_lang_tensor(Tensor, SimpleNamespace(set_attr=setattr))
    assert operator.index(Tensor()) == 3
