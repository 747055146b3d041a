"""Compiled Wan blocks: the same regions are kept, and the same numbers come out."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def printed(script: str, *arguments: str) -> Any:
    """What a script of this folder prints last."""
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).parent / script), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


TOLERANCES = {"float32": 2e-5, "bfloat16": 0.1}
"""Of compiled against eager steps, relative to the largest value of a tensor. fp32: the plain compositions that run under a compiler, and the
loops that it fuses, sum in another order. bf16: eager blocks round between operations that a fused loop keeps in fp32, so that values
differ by a few of bf16's steps of 2^-8."""


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "dtype"), [("full", "float32"), ("lora", "bfloat16")])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])  # minutes of g++
def test_compiled_policies_keep_what_they_say_and_change_no_number(adapter, dtype, backend):
    """In a process of its own: the type checks of tests cannot be traced."""
    found = printed("compiled_wan.py", adapter, dtype, backend)
    plain = found["none"]["forwards"]
    assert plain == 4 and found["attn_only"]["forwards"] == plain and found["full"]["forwards"] == 2 * plain
    if backend == "aot_eager":
        assert all(under["equal"] for under in found.values()), found
    assert max(under["from_eager"] for under in found.values()) <= TOLERANCES[dtype], found
