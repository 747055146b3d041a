"""What fits on which GPU: the table of docs/memory.md, from the planner's own search.

    # print it
    uv run tools/docs/plan_tables.py
    # the rows whose name contains this
    uv run tools/docs/plan_tables.py --only klein-base-4b
    # write it into docs/memory.md, with a plan, and a part of the plan into README.md
    uv run tools/docs/plan_tables.py --write

No GPU and no weights: every profile is a step on fake tensors.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from ditkit_core.config.resolve import resolve
from ditkit_core.config.sizes import GIB
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.fit import least_missing
from ditkit_core.planner.gpus import GPU, parse_gpus
from ditkit_core.planner.search import Candidate, FitTask
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.plans.changes import Changed, fit_levels, levers
from ditkit_core.run.plans.fit import task_for
from ditkit_flux2.spec import FLUX2
from ditkit_wan.spec import WAN
from marked import replaced

ROOT = Path(__file__).parents[2]
MEMORY, README = ROOT / "docs" / "memory.md", ROOT / "README.md"
TABLE = "<!-- what fits: written by tools/docs/plan_tables.py -->", "<!-- end of what fits -->"
EXAMPLE = "<!-- a plan: written by tools/docs/plan_tables.py -->", "<!-- end of a plan -->"
EXCERPT = (
    "<!-- an excerpt of a plan: written by tools/docs/plan_tables.py -->",
    "<!-- end of an excerpt of a plan -->",
)
SHOWN = (
    "GiB ",
    "weights ",
    "optimizer ",
    "activations ",
    "peak ",
    "free ",
    "blocks ",
    "streamed ",
    " ",
)
"""How those lines of a plan's first table begin that README.md shows."""
COMMAND = "wan-train packages/wan/configs/t2v_14b_lora.toml --plan --gpus 24GiB,32GiB --train.split_points 16 --train.swap_blocks 16"
GPUS = ("12GiB", "16GiB", "24GiB", "32GiB", "48GiB", "80GiB", "2x16GiB", "2x24GiB")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run file at a size of its own."""

    spec: ModelSpec
    file: str
    """Of the package's configs or of the recipes, without its ending."""
    size: tuple[int, int, int]
    """Frames, height and width."""

    @property
    def config(self) -> RunConfig:
        """The run file, with this size for all samples."""
        frames, height, width = self.size
        flags = {"data.height": height, "data.width": width, "data.buckets": False}
        if self.spec.data.frame_step:
            flags["data.frames"] = frames
        shipped = ROOT / "packages" / self.spec.name / "configs" / f"{self.file}.toml"
        recipe = self.spec.demo.config.parent.parent / "recipes" / shipped.name
        return resolve(RunConfig, file=recipe if recipe.exists() else shipped, flags=flags)

    @property
    def name(self) -> str:
        """The preset, what is trained, and the size."""
        frames, height, width = self.size
        config = self.config
        trained = (
            "full fine-tune" if config.adapter.method == "full" else f"LoRA {config.adapter.rank}"
        )
        trained += f", {config.optim.name}" * (config.optim.name != "adamw")
        return f"{config.model.preset}, {trained}<br>{height}×{width}{f'×{frames}' if frames > 1 else ''}"


ROWS = (
    *(
        Row(spec=WAN, file=file, size=size)
        for file in ("t2v_1.3b_lora", "t2v_14b_lora")
        for size in ((49, 480, 832), (81, 720, 1280))
    ),
    Row(spec=WAN, file="t2v_1.3b_full", size=(49, 480, 832)),
    Row(spec=WAN, file="wan_14b_full_24gb", size=(33, 480, 832)),
    *(
        Row(spec=FLUX2, file=file, size=(1, side, side))
        for file in ("klein_base_4b_lora", "klein_base_9b_lora", "dev_lora")
        for side in (512, 1024)
    ),
    Row(spec=FLUX2, file="klein_base_4b_full", size=(1, 1024, 1024)),
    Row(spec=FLUX2, file="klein_9b_full_24gb", size=(1, 1024, 1024)),
    Row(spec=FLUX2, file="dev_full_24gb", size=(1, 1024, 1024)),
)


@cache
def _task(spec_name: str, config: RunConfig) -> FitTask:
    """The task to fit, without GPUs; its profiles are made once for all of them."""
    spec = {WAN.name: WAN, FLUX2.name: FLUX2}[spec_name]
    return task_for(create_run(spec, config), ())


def fitted(row: Row, gpus: tuple[GPU, ...]) -> str:
    """A cell: what the choice of `--fit` for these GPUs costs."""
    level, _, result = fit_levels(
        row.config, lambda config: replace(_task(row.spec.name, config), gpus=gpus)
    )
    chosen = result.chosen
    if chosen is None:
        return "<br>".join(["–", *_change(row, gpus)])
    return "<br>".join([_cost(chosen), *_changed(chosen, level.changed)])


def _cost(chosen: Candidate) -> str:
    seconds = f"{chosen.seconds:.{0 if chosen.seconds >= 10 else 1}f} s"
    return f"{seconds}, host {chosen.host / GIB:.1f}" if chosen.host else seconds


def _changed(chosen: Candidate, changes: Sequence[Changed]) -> list[str]:
    """The settings that change what is learned, without how updates in the backward clip."""
    quantize = chosen.execution.quantize
    return [
        *([quantize] if quantize != "none" else []),
        *(
            f"{change.key.rpartition('.')[2]} {change.value}"
            for change in changes
            if change.key not in ("optim.fused_backward", "train.clip_by")
        ),
    ]


def _change(row: Row, gpus: tuple[GPU, ...]) -> Iterator[str]:
    """The mildest single change of the configuration that would make it fit; nothing if there is
    none."""
    enough = []
    for lever in levers(row.spec, row.config, gpus):
        for change in lever:
            if change.config != row.config and not least_missing(
                replace(_task(row.spec.name, change.config), gpus=gpus)
            ):
                enough.append(change)
                break
    if enough:
        words = min(enough, key=lambda change: change.lost_share).words
        yield f"with {words.partition(' (now')[0]}"


def line(row: Row) -> str:
    """A row of the table."""
    return f"| {row.name} | {' | '.join(fitted(row, parse_gpus(gpus)) for gpus in GPUS)} |"


def notes() -> str:
    """What the cells mean and assume."""
    single = [gpu for gpus in map(parse_gpus, GPUS) if len(gpus) == 1 for gpu in gpus]
    rates = [
        f"{gpu.name} {gpu.bf16_flops / 1e12:.0f} TFLOP/s in bf16, {gpu.fp32_flops / 1e12:.0f} in "
        f"fp32"
        for gpu in single
    ]
    reserves = ", ".join(
        f"{gpu.reserve / GIB:.1f} of {gpu.total / GIB:.1f} ({gpu.name.removesuffix('GiB')})"
        for gpu in single
    )
    return (
        "A cell has the seconds of a step, an **estimate**, GiB of page-locked host memory for "
        "streamed weights and offloaded activations, and settings that change what is learned. A "
        "dash: nothing fits but with the change below it. Of training alone, with one sample in a "
        "micro-batch and AdamW where nothing else is said. Left free of what torch reports: "
        f"{reserves} GiB. A size stands for the slowest known GPU with as much memory "
        f"({'; '.join(rates)}). Planned, not measured: fake tensors, torch {_torch()}."
    )


def _torch() -> str:
    return torch.__version__.partition("+")[0]


def table(rows: tuple[Row, ...] = ROWS) -> Iterator[str]:
    """Line by line."""
    yield f"| | {' | '.join(gpus.replace('x', ' × ').replace('GiB', ' GiB') for gpus in GPUS)} |"
    yield "|" + "---|" * (1 + len(GPUS))
    yield from map(line, rows)


def section(lines: list[str]) -> str:
    """What stands between the markers."""
    return "\n".join(["", *lines, "", notes(), ""])


def plan() -> str:
    """A plan as a command prints it."""
    program, *arguments = COMMAND.split()
    command = [str(Path(sys.executable).parent / program), *arguments]
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8", check=True
    ).stdout.strip()


def example(printed: str) -> str:
    """A plan and its command as docs/memory.md has them."""
    return f"\n```console\n$ uv run {COMMAND}\n{printed}\n```\n"


def excerpt(printed: str) -> str:
    """The lines of it that README.md has: of its first table, which is of training."""
    lines = [line for line in printed.partition("\n\n")[0].splitlines() if line.startswith(SHOWN)]
    return "\n".join(["```console", f"$ uv run {COMMAND}", *lines, "```"])


def main() -> int:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"rewrite the table of {MEMORY.name}, and the plan there and in {README.name}",
    )
    args = parser.parse_args()
    if args.only and args.write:
        parser.error("--write writes all rows; leave --only out")
    lines = []
    for each in table(tuple(row for row in ROWS if args.only in row.name)):
        print(each, flush=True)
        lines.append(each)
    if args.write:
        printed = plan()
        text = replaced(MEMORY.read_text(encoding="utf-8"), TABLE, section(lines), MEMORY.name)
        MEMORY.write_text(replaced(text, EXAMPLE, example(printed), MEMORY.name), encoding="utf-8")
        text = README.read_text(encoding="utf-8")
        README.write_text(replaced(text, EXCERPT, excerpt(printed), README.name), encoding="utf-8")
        print(f"written to {MEMORY} and {README}", file=sys.stderr)
    else:
        print(f"\n{notes()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
