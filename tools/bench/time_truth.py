"""Compare planned times with those that an H100 measured: whole steps, and their kernels by kind.

    # a minute on one core
    uv run tools/bench/time_truth.py > benchmarks/time_truth.md
    # the steps whose name contains this
    uv run tools/bench/time_truth.py --only klein

No GPU and no weights: every plan is a step on fake tensors. `planner/kernel_time.py` has the
constants that follow from these measurements, in two tables. After a new measurement, change its
row below, then those tables until the page is within its bound, then write the page again.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch

from ditkit_core.planner.gpus import parse_gpus
from ditkit_core.planner.kernel_time import gpu_seconds, host_seconds, kernel_seconds
from ditkit_core.planner.memory import Partition, Profile, compose
from ditkit_core.planner.planned_step import Size
from ditkit_core.planner.profiler import profile
from ditkit_core.planner.step_time import step_seconds
from ditkit_core.planner.workload import Workload
from ditkit_flux2.presets import PRESETS as FLUX2_PRESETS
from ditkit_flux2.spec import FLUX2
from ditkit_wan.presets import PRESETS as WAN_PRESETS
from ditkit_wan.spec import WAN
from step_jobs import step_job

(H100,) = parse_gpus("h100")
BOUND = 0.15
"""Largest distance of a plan from what was measured."""
KINDS = {
    "matmul": (
        "matmul_16",
        "matmul_32",
        "matmul_int8",
        "matmul_fp8",
        "matmul_int8_scaled",
        "matmul_fp8_scaled",
    ),
    "attention": ("attention",),
    "attention backward": ("attention_backward",),
    "elementwise": ("elementwise", "fused", "conversion", "scales"),
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of a model at full size, and what an H100 measured of it."""

    model: str
    policy: str
    kernels: str = "triton"
    blocks: int = 0
    """Of a slice; 0 for the whole model."""
    preset: Literal["default", "fast"] = "default"
    """`precision.preset`."""
    stored: str = "none"
    """`base.quantize` and, if it is none of `none`, `base.compute`."""
    seconds: tuple[float, ...] = ()
    """Of launched steps, the first ones left out."""
    replayed: tuple[float, ...] = ()
    """Of steps whose micro-batch is replayed as a CUDA graph."""
    kinds: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds of the kernels of one step by the profiler, by the names of `KINDS`."""
    launches: int = 0
    """Kernels of that step."""
    busy: float = 0.0
    """Milliseconds in which a kernel ran in that step."""

    @property
    def name(self) -> str:
        """What the tables call it."""
        stored = f", {self.stored} computed" if self.stored != "none" else ""
        sliced = f", {self.blocks} blocks" if self.blocks else ""
        fast = ", fast" if self.preset == "fast" else ""
        return f"{self.model}{sliced}, {self.policy}{fast}, {self.kernels}{stored}"

    @property
    def profile(self) -> Profile:
        """Its kernels."""
        return profile_of(
            self.model, self.policy, self.kernels, self.blocks, self.stored, self.preset
        )

    def planned(self, *, replayed: bool = False) -> float:
        """Planned seconds; those of a slice are without the optimizer, as they were measured."""
        made = self.profile
        if self.blocks:
            made = replace(made, updates_in_backward=True)
        work = Workload(cuda_graphs="on" if replayed else "off")
        return step_seconds(made, Partition(devices=(0,) * len(made.blocks)), [H100], work)

    def planned_peak(self, *, replayed: bool = False) -> int:
        """Planned bytes at the peak."""
        made = self.profile
        work = Workload(cuda_graphs="on" if replayed else "off")
        (plan,) = compose(made, Partition(devices=(0,) * len(made.blocks)), [H100.budget], work)
        return plan.peak

    def planned_kinds(self) -> Counter[str]:
        """Planned milliseconds of kernels by kind, the optimizer's left out."""
        taken = Counter[str]()
        for stage in self.profile.stages:
            for kernel, count in (*stage.kernels_forward, *stage.kernels_backward):
                kind = next((name for name, kinds in KINDS.items() if kernel.kind in kinds), "")
                taken[kind] += 1e3 * count * kernel_seconds(kernel, H100)
        return taken

    def planned_launches(self) -> int:
        """Planned operations, those of the optimizer included unless it is a slice."""
        stages = self.profile.stages
        counts = [
            count
            for stage in stages
            for _, count in (*stage.kernels_forward, *stage.kernels_backward)
        ]
        return sum(counts) + (0 if self.blocks else sum(stage.update_launches for stage in stages))

    def off(self) -> float:
        """Distance of the planned from the measured time as a share of it; 0 between the fastest
        and the slowest step."""
        pairs = [
            (self.planned(replayed=replayed), taken)
            for replayed, taken in ((False, self.seconds), (True, self.replayed))
            if taken
        ]
        return max(
            max(1 - planned / min(taken), planned / max(taken) - 1, 0.0) for planned, taken in pairs
        )


MODELS: dict[str, tuple[str, str, Size, int]] = {
    "FLUX.2 klein 4B, 512×512": ("flux2", "klein-base-4b", (1, 512, 512), 32),
    "FLUX.2 klein 4B, 1024×1024": ("flux2", "klein-base-4b", (1, 1024, 1024), 32),
    "FLUX.2 dev, 512×512": ("flux2", "dev", (1, 512, 512), 32),
    "FLUX.2 dev, 1024×1024": ("flux2", "dev", (1, 1024, 1024), 32),
    "Wan 14B, 480×832×49": ("wan", "t2v-14b", (49, 480, 832), 32),
    "Wan 1.3B, 720×1280×77, all weights": ("wan", "t2v-1.3b", (77, 720, 1280), 0),
}
"""Family, preset, frames with height and width, and the rank of the LoRA."""
SMALL, LARGE, DEV, LARGE_DEV, WAN_14B, WAN_1_3B = MODELS


@cache
def profile_of(
    model: str, policy: str, kernels: str, blocks: int, stored: str, preset: str
) -> Profile:
    """The planned step with these fields of a `Step`."""
    family, preset, size, rank = MODELS[model]
    spec, presets = {"wan": (WAN, WAN_PRESETS), "flux2": (FLUX2, FLUX2_PRESETS)}[family]
    arch: Any = presets[preset]
    job = step_job(
        spec,
        replace(arch, layers=blocks) if blocks else arch,
        size,
        rank=rank,
        policy=policy,
        kernels=kernels,
        quantize=stored,
        compute="dtype" if stored == "none" else stored,
        fast=preset == "fast",
    )
    return profile(job)


def _kinds(
    matmul: float, attention: float, backward: float, elementwise: float
) -> dict[str, float]:
    return dict(zip(KINDS, (matmul, attention, backward, elementwise), strict=True))


STEPS = (
    Step(
        model=SMALL, policy="none", seconds=(0.178, 0.218, 0.217, 0.321, 0.206, 0.227),
        replayed=(0.0509, 0.0521),
        kinds=_kinds(33.1, 1.6, 4.5, 12.8), launches=2460, busy=50.2,
    ),
    Step(
        model=SMALL, policy="none", kernels="torch", seconds=(0.245, 0.300), kinds=_kinds(35.0, 1.6,
        4.5, 35.5), launches=6001,
        busy=76.6,
    ),
    Step(
        model=SMALL, policy="full", seconds=(0.308, 0.369, 0.397, 0.506, 0.309, 0.443),
        replayed=(0.0696, 0.0698),
        kinds=_kinds(45.2, 3.1, 4.5, 15.5), launches=3250, busy=67.5,
    ),
    Step(
        model=SMALL, policy="full", kernels="torch", seconds=(0.311, 0.378), kinds=_kinds(47.9, 3.2,
        4.4, 46.6), launches=8376,
        busy=102.0,
    ),
    Step(
        model=SMALL, policy="attn_only", seconds=(0.306, 0.410), kinds=_kinds(44.5, 1.6, 4.5, 15.5),
        launches=3070, busy=65.9
    ),
    Step(
        model=SMALL, policy="attn_only", kernels="torch", seconds=(0.362, 0.384), kinds=_kinds(46.9,
        1.6, 4.5, 45.6),
        launches=7811, busy=98.5,
    ),
    Step(model=LARGE, policy="none", seconds=(0.303, 0.322, 0.252, 0.324, 0.261, 0.273),
    replayed=(0.1642, 0.1681)),
    Step(model=LARGE, policy="full", seconds=(0.362, 0.507, 0.372, 0.470, 0.303, 0.425),
    replayed=(0.2201, 0.2228)),
    Step(model=DEV, policy="full", seconds=(0.798, 0.847, 0.617, 0.770), replayed=(0.450, 0.462)),
    Step(model=DEV, policy="attn_only", seconds=(0.827, 1.152, 0.654, 0.715), replayed=(0.444,
    0.450)),
    Step(model=LARGE_DEV, policy="full", seconds=(1.484, 1.486), replayed=(1.464, 1.464)),
    Step(model=WAN_14B, policy="full", seconds=(5.468,)),
    Step(model=WAN_14B, policy="attn_only", seconds=(4.895,)),
    Step(model=WAN_14B, policy="full", preset="fast", seconds=(5.425,)),
    Step(
        model=WAN_14B, blocks=4, policy="full", seconds=(0.5516,), kinds=_kinds(191.9, 117.4, 163.8,
        49.3), launches=1172,
        busy=522.4,
    ),
    Step(
        model=WAN_14B, blocks=4, policy="full", kernels="torch", seconds=(0.6287, 0.6329),
        kinds=_kinds(194.9, 120.6, 166.1, 141.5),
        launches=2855, busy=622.7,
    ),
    Step(model=WAN_14B, blocks=4, policy="full", kernels="torch", stored="int8", seconds=(0.8537,)),
    Step(model=WAN_1_3B, policy="full", seconds=(9.479, 9.547)),
    Step(model=WAN_1_3B, policy="attn_only(self)", seconds=(7.816, 7.855)),
    Step(model=WAN_1_3B, policy="attn_only", seconds=(7.803, 7.882)),
)  # fmt: skip
"""Sessions on an NVIDIA H100 80GB HBM3, each on a machine of its own, with torch 2.11, CUDA 13.0
and cuDNN 9.19: launched steps at commit fd759269 and later, the rows of models replayed, of dev at
1024x1024 and of all blocks of Wan 14B at 08d556ef, before it was committed. One sample in bf16, a
LoRA of rank 32 unless all weights are trained, in bf16. Whole models with AdamW, slices without an
optimizer. Of each session the fastest and the slowest or median step, after those that compile and
warm up. Kinds of kernels are of fd759269, where gated sums were torch's."""


def whole_row(step: Step) -> str:
    """A step as a line of the first table."""
    cells = []
    for seconds, planned in (
        (step.seconds, step.planned()),
        (step.replayed, step.planned(replayed=True)),
    ):
        cells.append(f"{planned:.3g}")
        if not seconds:
            cells += ["", ""]
            continue
        ends = [min(seconds), max(seconds)]
        cells.append("–".join(dict.fromkeys(f"{end:.3g}" for end in ends)))
        cells.append("–".join(dict.fromkeys(f"{planned / end:.2f}" for end in reversed(ends))))
    return f"| {step.name} | {' | '.join(cells)} |"


def kinds_row(step: Step) -> str:
    """Its kernels as a line of the second table."""
    planned = step.planned_kinds()
    pairs = [(planned[kind], step.kinds[kind]) for kind in KINDS]
    cells = [f"{ours:.1f} / {measured:.1f} = {ours / measured:.2f}" for ours, measured in pairs]
    total, launches = planned.total(), step.planned_launches()
    cells.append(f"{total:.1f} / {step.busy:.1f} = {total / step.busy:.2f}")
    return f"| {step.name} | {' | '.join(cells)} | {launches:,} / {step.launches:,} = {launches / step.launches:.2f} |"


HEAD = f"""# Planned times against measured ones

`uv run tools/bench/time_truth.py > benchmarks/time_truth.md`, torch {torch.__version__.partition("+")[0]}. The plans are from fake tensors. The measurements are of several sessions, each on an
NVIDIA H100 80GB HBM3 of a machine of its own, with torch 2.11 and cuDNN 9.19; [most of them](gpu_h100.md) have a page. A step has one sample in bf16, a LoRA of rank 32
unless all weights are trained, and AdamW; slices have no optimizer.

The small tables of constants in `planner/kernel_time.py` were fitted to some of these rows: to kernels of klein 4B at 512×512 and of
slices of Wan 14B, and to launched steps of FLUX.2. So the tables show how well these constants describe one GPU. They say nothing about other
GPUs, which are assumed to reach the same shares of their published rates. Not fitted: whole steps of Wan, replayed steps at 1024×1024 and of dev, and diffusers'.

## Steps, in seconds

*Launched* is an eager step: the host launches every operation. The hosts were slow, and the times of steps with few tokens scatter with them; the ratios are those
to the slowest and to the fastest step. *Replayed* is a step whose micro-batch is replayed as CUDA graphs, so that the GPU never waits for the host. Every plan is
at most {BOUND:.0%} outside the range that was measured.

| step | planned, launched | measured | planned / measured | planned, replayed | measured | planned / measured |
|---|---|---|---|---|---|---|"""
KERNELS = f"""
## Kernels of a step, in milliseconds

Planned / measured, by kind of kernel, and of all; and operations planned / kernels launched, which are more because cuBLAS divides some products. Kinds were measured
when gated sums were still operations of torch, which are slower; *all* of klein 4B's `none` and `full` is newer.

| step | {" | ".join(KINDS)} | all | launches |
|{"---|" * (len(KINDS) + 3)}"""
DIFFUSERS = (
    (SMALL, False, (0.1805, 0.2027)),
    (SMALL, True, (0.2716, 0.3628)),
    (LARGE, False, (0.2818, 0.3127)),
    (LARGE, True, (0.4015, 0.4303)),
    (DEV, True, (0.7409, 0.8448)),
    (LARGE_DEV, True, (2.181, 2.183)),
)
"""Model, whether it recomputes its blocks, and seconds of diffusers' own step: bf16 autocast,
peft's LoRA of rank 32 on the layers of ours, AdamW."""


def their_row(model: str, checkpointing: bool, seconds: tuple[float, ...]) -> str:
    """A step of diffusers as a line of the third table."""
    # imports diffusers, for which tests of our own steps have no seconds
    from roofline import CASES, theirs

    case = next(case for case in CASES if case.name.partition(" (")[0] == model.replace("×", "x"))
    step = theirs(case, autocast=True, checkpointing=checkpointing)
    kernels = step.rest + Counter(
        {kernel: n * count for n, block in step.blocks.values() for kernel, count in block.items()}
    )
    busy = gpu_seconds(frozenset(kernels.items()), H100)
    launching = host_seconds(frozenset(kernels.items()))
    ends = min(seconds), max(seconds)
    ratios = "–".join(f"{max(busy, launching) / end:.2f}" for end in reversed(ends))
    name = f"{model}, {'full' if checkpointing else 'none'}"
    return f"| {name} | {step.launches:,} | {busy:.3g} | {launching:.3g} | {ends[0]:.3g}–{ends[1]:.3g} | {ratios} |"


THEIRS = """
## Another program's steps, in seconds

diffusers' own model and checkpointing under bf16 autocast, counted in the same way (`tools/bench/roofline.py`), without the optimizer. Nothing was fitted to these rows.

| step | operations | planned, of the GPU | of the host | measured | longer of both / measured |
|---|---|---|---|---|---|"""


def page(steps: tuple[Step, ...]) -> Iterator[str]:
    """The lines of the page."""
    yield HEAD
    yield from map(whole_row, steps)
    yield KERNELS
    yield from (kinds_row(step) for step in steps if step.kinds)
    yield THEIRS
    yield from (
        their_row(*each) for each in DIFFUSERS if any(step.model == each[0] for step in steps)
    )


def main() -> int:
    """Print the page; exit status 1 if a plan is off by more than `BOUND`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="steps whose name contains this")
    wanted = parser.parse_args().only.lower()
    steps = tuple(step for step in STEPS if wanted in step.name.lower())
    for line in page(steps):
        print(line, flush=True)
    wrong = [step.name for step in steps if step.off() > BOUND]
    print(*(f"{name}: off by more than {BOUND:.0%}" for name in wrong), sep="\n", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
