"""Checks of compiled blocks, whose steps run in processes of their own: the type checks of tests cannot be traced."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOLERANCES = {"float32": 2e-5, "bfloat16": 0.1}
"""Of compiled against eager steps, relative to the largest value of a tensor. fp32: the plain compositions that run under a compiler, and the
loops that it fuses, sum in another order. bf16: eager blocks round between operations that a fused loop keeps in fp32, so that values
differ by a few of bf16's steps of 2^-8."""


def printed(script: Path, *arguments: str) -> Any:
    """What a script prints last, as JSON."""
    ran = subprocess.run(
        [sys.executable, str(script), *arguments], check=False, capture_output=True, text=True, timeout=280
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


def check_policies(found: Mapping[str, Mapping[str, Any]], *, num_attention: int, dtype: str, backend: str) -> None:
    """Hold what `compiled_steps.compare` found of `none`, `full` and `attn_only` against what they promise.

    Args:
        found: By policy.
        num_attention: Attention calls of a forward.
        dtype: Of the matmuls, as torch names it.
        backend: The compiler's; `aot_eager` changes no bit between policies.
    """
    assert {policy: under["forwards"] for policy, under in found.items()} == {
        "none": num_attention, "full": 2 * num_attention, "attn_only": num_attention,
    }  # fmt: skip
    if backend == "aot_eager":
        assert all(under["equal"] for under in found.values()), found
    assert max(under["from_eager"] for under in found.values()) <= TOLERANCES[dtype], found
