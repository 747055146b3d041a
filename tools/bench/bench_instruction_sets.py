"""Time a training step of ours against diffusers' under each instruction set of a CPU: a table of
benchmarks/step_cpu.md.

    uv run tools/bench/bench_instruction_sets.py            # print the table
    uv run tools/bench/bench_instruction_sets.py --write    # write it into the page, too

Each row is a process of its own, because libraries choose their kernels when they are loaded;
`tools/bench/bench_step.py` has what is timed. Both sides take turns in one process. Still, ratios
on a machine that does other work are worth nothing.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "docs"))  # `marked` is there

import torch

import bench_step
from ditkit_core.models.precision import parse_dtype
from marked import replaced

PAGE = Path(__file__).parents[2] / "benchmarks" / "step_cpu.md"
TABLE = (
    "<!-- by instruction set: written by tools/bench/bench_instruction_sets.py -->",
    "<!-- end of by instruction set -->",
)
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
SETS = {
    "all that there is": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", **AVX2},
    "default of ATen": {"ATEN_CPU_CAPABILITY": "default", **AVX2},
}
"""Environment variables of torch, oneDNN and MKL by the name of the set. Products are oneDNN's and
MKL's, so the last has AVX2 there."""
CASES = tuple((model, dtype) for model in ("wan", "flux2") for dtype in ("fp32", "bf16"))


def one(arguments: Sequence[str]) -> dict[str, Any]:
    """Measure one case in this process."""
    args = bench_step.configured(arguments)
    dtype = parse_dtype(args.dtype)
    pair = bench_step.PAIRS[args.model](args, dtype)
    steps = bench_step.steps_of(args, pair, dtype)
    found = bench_step.measured(
        {"ours": steps.ours, "diffusers": steps.theirs}, args.repeats, args.device
    )
    share = bench_step.floor_share(steps.ours, args.device)
    return {name: row.seconds for name, row in found.items()} | {
        "share": share, "capability": torch.backends.cpu.get_cpu_capability(),
        "tokens": args.tokens,
    }  # fmt: skip


def table(given: Sequence[str]) -> Iterator[str]:
    """The table, line by line."""
    yield "| instruction set | model | tokens | dtype | ours | diffusers | ratio | floor / diffusers |"
    yield "|" + "---|" * 8
    for name, variables in SETS.items():
        for model, dtype in CASES:
            command = [
                sys.executable,
                str(Path(__file__)),
                "--one",
                *given,
                "--model",
                model,
                "--dtype",
                dtype,
            ]
            done = subprocess.run(
                command, env=os.environ | variables, check=True, stdout=subprocess.PIPE, text=True
            )
            row = json.loads(done.stdout.splitlines()[-1])
            ours, theirs = row["ours"], row["diffusers"]
            times = f"{ours * 1e3:.0f} ms | {theirs * 1e3:.0f} ms | **{ours / theirs:.3f}** | {ours * row['share'] / theirs:.3f}"
            print(
                f"{name} ({row['capability']}), {model} {dtype}: {times}",
                file=sys.stderr,
                flush=True,
            )
            yield f"| {name} ({row['capability']}) | {model} | {row['tokens']:,} | {dtype} | {times} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write the table into benchmarks/step_cpu.md"
    )
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args, others = parser.parse_known_args(arguments)
    if args.one:
        print(json.dumps(one(others)))
        return
    given = others or ["--tokens", "1024", "--repeats", "15"]
    lines = [
        *table(given),
        "",
        (
            f"`tools/bench/bench_step.py {' '.join(given)}`, torch {torch.__version__}, "
            f"{platform.processor() or platform.machine()}, one thread."
        ),
    ]
    print("\n".join(lines))
    if args.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(
            replaced(page, TABLE, "\n".join(["", *lines, ""]), PAGE.name), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
