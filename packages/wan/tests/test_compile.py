"""Compiled Wan blocks: the same regions are kept, and the same numbers come out."""

from pathlib import Path

import pytest

from ditkit_core.testing.compiled_runs import check_policies, printed

SCRIPT = Path(__file__).parent / "compiled_wan.py"


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "dtype"), [("full", "float32"), ("lora", "bfloat16")])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])  # minutes of g++
def test_compiled_policies_keep_what_they_say_and_change_no_number(adapter, dtype, backend):
    check_policies(printed(SCRIPT, adapter, dtype, backend), num_attention=4, dtype=dtype, backend=backend)
