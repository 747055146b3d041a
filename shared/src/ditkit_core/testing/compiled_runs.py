"""Checks of compiled blocks, whose steps run in processes of their own: the type checks of tests cannot be traced."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ditkit_core.testing.scripts import output_of
from ditkit_core.testing.suite_process import SUPPORT

TOLERANCES = {"float32": 2e-5, "bfloat16": 0.1}
"""Tolerances of compiled against eager steps, relative to the largest value of a tensor. fp32: compiled code sums in another order. bf16:
eager blocks round between operations where a fused loop stays in fp32, so that values differ by a few of bf16's steps of 2^-8."""


def printed(
    script: Path | str, *arguments: str, folder: Path | None = None, timeout: int = 280, **variables: str
) -> Any:
    """Run a script, or a module by name, and parse the last line that it prints as JSON; `folder` is its working folder and import path.

    `variables` are in its environment besides this process's own.
    """
    if isinstance(script, Path) and folder is None and not variables:
        return json.loads(output_of(script, *arguments, seconds=timeout).splitlines()[-1])
    named = ["-m", script] if isinstance(script, str) else [str(script)]
    env = os.environ | variables | ({} if folder is None else {"PYTHONPATH": str(folder / SUPPORT)})
    command = [sys.executable, *named, *arguments]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout, cwd=folder, env=env)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


def variants_of(folder: Path) -> dict[str, str]:
    """The variants of a model with conformance checks in a folder, each with its module.

    Variants for compiled checks alone are in modules whose names begin with `compiled_` instead of `test_conformance`.
    """
    return {
        name: file.stem
        for file in [*sorted(folder.glob("test_conformance*.py")), *sorted(folder.glob(f"{SUPPORT}/compiled_*.py"))]
        for name in re.findall(
            r"^class ([A-Z]\w*)\(.*\b(?:Conformance|CoreChecks|EverySuite)\b.*\)",
            file.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    }


def by_variant(
    work: str, folder: Path, names: Collection[str], *, module: str = "compiled_conformance", **options: Any
) -> dict[str, Any]:
    """The results of one of the works of a module of `ditkit_core.testing`, by variant; no work's name is needed where there is one."""
    modules = variants_of(folder)
    wanted = dict.fromkeys(modules[name] for name in names)
    arguments = [*([work] if work else []), ",".join(wanted), ",".join(names)]
    results = printed(f"ditkit_core.testing.{module}", *arguments, folder=folder, **options)
    assert results.keys() == set(names)
    return dict(results)


def check_kernels(file: str, names: Collection[str]) -> None:
    """Check the Triton kernels in the blocks of some variants, whose checks are next to a file: numbers close to torch's, and bitwise the same
    under every policy."""
    folder = Path(file).parent
    results = by_variant("", folder, names, module="kernel_conformance", timeout=1200, TRITON_INTERPRET="1")
    for name, trained in results.items():
        for under in trained.values():
            # Other last bits show that the kernels ran.
            assert under["equal"] and under["differs"] and under["from_torch"] <= TOLERANCES["float32"], (name, results)


def check_variants(folder: Path, names: Collection[str]) -> None:
    """Check compiled steps of some variants: numbers close to eager, at most one graph per kind of block, none for a second step."""
    for name, results in by_variant("variants", folder, names).items():
        assert results["from_eager"] <= TOLERANCES["float32"], (name, results)
        first, second = results["graphs"]
        assert first <= results["kinds"] and second == 0, (name, results)


def check_equal_policies(work: str, folder: Path, names: Collection[str]) -> None:
    """Check the results of `policies` or `full`: policies are bitwise identical, and attention runs as often as in eager mode."""
    tolerance = TOLERANCES["float32" if work == "full" else "bfloat16"]
    for name, results in by_variant(work, folder, names, timeout=3000).items():
        assert {policy: under["forwards"] for policy, under in results.items()} == {
            policy: under["eager forwards"] for policy, under in results.items()
        }, (name, results)
        assert results["full"]["forwards"] > results["attn_only"]["forwards"] == results["none"]["forwards"], (
            name,
            results,
        )
        assert all(under["equal"] and under["from_eager"] <= tolerance for under in results.values()), (name, results)


def check_levers(work: str, folder: Path, names: Collection[str]) -> None:
    """Check that no combination of levers changed a number, and that every lever had an effect."""
    for name, results in by_variant(work, folder, names, timeout=3000).items():
        assert results and not any(results.values()), (name, {case: wrong for case, wrong in results.items() if wrong})


def check_policies(results: Mapping[str, Mapping[str, Any]], *, num_attention: int, dtype: str, backend: str) -> None:
    """Check the result of `compiled_steps.compare` for `none`, `full` and `attn_only`.

    Args:
        results: Results by policy.
        num_attention: Number of attention calls in a forward.
        dtype: Dtype of the matmuls, by torch's name.
        backend: The compiler's backend; under `aot_eager`, policies are bitwise identical.
    """
    assert {policy: under["forwards"] for policy, under in results.items()} == {
        "none": num_attention, "full": 2 * num_attention, "attn_only": num_attention,
    }  # fmt: skip
    if backend == "aot_eager":
        assert all(under["equal"] for under in results.values()), results
    assert all(under["from_eager"] <= TOLERANCES[dtype] for under in results.values()), results
