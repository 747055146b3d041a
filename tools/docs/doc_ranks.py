"""How runs scale over ranks: the table of docs/ranks.md, from the search of `--fit`. Nothing is
measured."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ditkit_core.config.resolve import resolve
from ditkit_core.config.sizes import GIB
from ditkit_core.io.console import doing
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.fit import RankFit
from ditkit_core.planner.gpus import parse_gpus
from ditkit_core.planner.rank_layout import RankLayout
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.plans.fit import division_of, tasks_of
from ditkit_flux2.spec import FLUX2
from ditkit_wan.spec import WAN

ROOT = Path(__file__).parents[2]
SAMPLES = 64
"""Micro-batches of a step, of one sample each, on any number of ranks."""
MACHINES = (1, 8, 64)
"""Of eight GPUs each."""
FULL = {"adapter.method": "full", "optim.rounding": "split"}
WELL = 0.9
"""Efficiency below which exchanges are said to stop scaling."""


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A run that more and more ranks train."""

    spec: ModelSpec
    name: str
    file: str
    flags: dict[str, object]

    def config(self) -> RunConfig:
        """Its run file with the flags."""
        file = ROOT / "packages" / self.spec.name / "configs" / f"{self.file}.toml"
        return resolve(
            RunConfig,
            file=file,
            flags={"train.accumulation": SAMPLES, "data.buckets": False, **self.flags},
        )


CLIP = {"data.frames": 49, "data.height": 480, "data.width": 832}
IMAGE = {"data.height": 1024, "data.width": 1024}
RUNS = (
    Scaled(spec=WAN, name="Wan 14B, LoRA 32", file="t2v_14b_lora", flags=CLIP),
    Scaled(spec=WAN, name="Wan 14B, all weights", file="t2v_14b_lora", flags=CLIP | FULL),
    Scaled(spec=FLUX2, name="FLUX.2 dev, LoRA 32", file="dev_lora", flags=IMAGE),
    Scaled(spec=FLUX2, name="FLUX.2 dev, all weights", file="dev_lora", flags=IMAGE | FULL),
)


def scaled() -> Iterator[str]:
    """The table, line by line."""
    yield "| | GPUs | how ranks divide it | GiB a rank | s a step | efficiency | what stops scaling first |"
    yield "|" + "---|" * 7
    (gpu,) = parse_gpus("80GiB")
    for each in RUNS:
        run = create_run(each.spec, each.config())
        tasks = tasks_of(run, gpu)
        for nodes in MACHINES:
            ranks = RankLayout(nproc=8, nodes=nodes)
            found = division_of(run, tasks, ranks, "nvlink,ib400")
            doing(f"{each.name} on {ranks.size}")
            cells = (
                [f"lacks {found / GIB:.1f} GiB"] if isinstance(found, int) else list(_cells(found))
            )
            yield f"| {each.name} | {ranks.size} | {' | '.join(cells)} |"


def _cells(found: RankFit) -> Iterator[str]:
    layout, execution, (time,) = found.layout, found.chosen.execution, found.plan.times
    parts = [
        str(execution.checkpointing),
        *([execution.quantize] if execution.quantize != "none" else []),
    ]
    parts += [f"swap {execution.swap_blocks[0]}"] if execution.swap_blocks else []
    parts += [f"shard {layout.shard}"] if layout.shard > 1 else []
    parts += [f"context {layout.context}"] if layout.context > 1 else []
    yield ", ".join(parts)
    yield f"{found.chosen.plan[0].peak / GIB:.1f}"
    yield f"{found.seconds:.1f}"
    yield f"{time.efficiency or 0:.0%}"
    slowest = max(zip(time.exchanges, found.plan.sent, strict=True))[1]
    if (time.efficiency or 0) < WELL:
        yield slowest
    else:
        yield f"samples: {SAMPLES} a step" if layout.data_ranks >= SAMPLES else "nothing yet"
