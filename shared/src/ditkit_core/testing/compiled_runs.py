"""Checks of compiled blocks, whose steps run in processes of their own: the type checks of tests cannot be traced."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

SUPPORT = "support"
"""The folder beside the tests whose modules they import by name."""

TOLERANCES = {"float32": 2e-5, "bfloat16": 0.1}
"""Of compiled against eager steps, relative to the largest value of a tensor. fp32: the plain compositions that run under a compiler, and the
loops that it fuses, sum in another order. bf16: eager blocks round between operations that a fused loop keeps in fp32, so that values
differ by a few of bf16's steps of 2^-8."""


def printed(script: Path | str, *arguments: str, folder: Path | None = None, timeout: int = 280) -> Any:
    """What a script, or a module by its name, prints last, as JSON; run in a folder, whose modules it finds, for at most so many seconds."""
    named = ["-m", script] if isinstance(script, str) else [str(script)]
    env = os.environ if folder is None else os.environ | {"PYTHONPATH": str(folder / SUPPORT)}
    command = [sys.executable, *named, *arguments]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout, cwd=folder, env=env)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


def variants_of(folder: Path) -> dict[str, str]:
    """Variants of a model that conformance checks in a folder know, and the module that has each: one joins by being written there.

    Those that other checks need not know are in modules whose names begin with `compiled_` in place of `test_conformance`.
    """
    return {
        name: file.stem
        for file in [*sorted(folder.glob("test_conformance*.py")), *sorted(folder.glob(f"{SUPPORT}/compiled_*.py"))]
        for name in re.findall(
            r"^class ([A-Z]\w*)\(.*(?:Conformance|Checks)\)", file.read_text(encoding="utf-8"), re.MULTILINE
        )
    }


def by_variant(work: str, folder: Path, names: Collection[str], **options: Any) -> dict[str, Any]:
    """What a work of `compiled_conformance` found, for each of some variants."""
    modules = variants_of(folder)
    wanted = dict.fromkeys(modules[name] for name in names)
    found = printed(
        "ditkit_core.testing.compiled_conformance", work, ",".join(wanted), ",".join(names), folder=folder, **options
    )
    assert found.keys() == set(names)
    return dict(found)


def check_variants(folder: Path, names: Collection[str]) -> None:
    """Hold compiled steps of some variants against what all variants keep: eager numbers, one graph for each kind of block, none for a second step."""
    for name, found in by_variant("variants", folder, names).items():
        assert found["from_eager"] <= TOLERANCES["float32"], (name, found)
        first, second = found["graphs"]
        assert first <= found["kinds"] and second == 0, (name, found)


def check_equal_policies(work: str, folder: Path, names: Collection[str]) -> None:
    """Hold what `policies` or `full` found of some variants: equal policies that run attention as often as eager ones."""
    tolerance = TOLERANCES["float32" if work == "full" else "bfloat16"]
    for name, found in by_variant(work, folder, names, timeout=3000).items():
        assert {policy: under["forwards"] for policy, under in found.items()} == {
            policy: under["eager forwards"] for policy, under in found.items()
        }, (name, found)
        assert found["full"]["forwards"] > found["attn_only"]["forwards"] == found["none"]["forwards"], (name, found)
        assert all(under["equal"] and under["from_eager"] <= tolerance for under in found.values()), (name, found)


def check_levers(work: str, folder: Path, names: Collection[str]) -> None:
    """Hold that levers changed nothing in any of their combinations, and were in force."""
    for name, found in by_variant(work, folder, names, timeout=3000).items():
        assert found and not any(found.values()), (name, {case: wrong for case, wrong in found.items() if wrong})


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
