"""Tables of docs/ that the planner makes: memory and recomputation of each checkpointing policy,
and the policies that a budget chooses."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ditkit_core.config.resolve import resolve
from ditkit_core.config.sizes import GIB
from ditkit_core.engine.ac_policies import Policy
from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision
from ditkit_core.planner.ac_budget import BudgetTask, choose
from ditkit_core.planner.gpus import parse_gpus
from ditkit_core.planner.memory import Budget, Partition, Profile, compose
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.planner.profiler import profile
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.plans.planned_step import PlannedStep
from ditkit_flux2.spec import FLUX2
from ditkit_wan.spec import WAN

ROOT = Path(__file__).parents[2]
SUBJECTS = {
    "wan": (WAN, "t2v_1.3b_lora", (77, 720, 1280), "q,k,v,o"),
    "flux2": (FLUX2, "dev_lora", (1, 1024, 1024), "blocks"),
}
"""Spec, run file, frames with height and width, and the targets of the LoRA of rank 32."""
POLICIES = (
    "none", "every_n(2)", "attn_only", "attn_only(self)", "full", "attn_only+offload",
    "full+offload",
)  # fmt: skip
GPUS = {"wan": ("24GiB", "48GiB"), "flux2": ("80GiB",)}
TERA = 10**12


@cache
def job_of(family: str) -> StepJob:
    """The step that a plan of this run makes, of a LoRA with one sample over a base in bf16, on
    recent GPUs."""
    spec, file, (frames, height, width), targets = SUBJECTS[family]
    flags = {
        "data.height": height,
        "data.width": width,
        "data.buckets": False,
        "adapter.targets": [targets],
    }
    if spec.data.frame_step:
        flags["data.frames"] = frames
    path = ROOT / "packages" / spec.name / "configs" / f"{file}.toml"
    return PlannedStep.of(create_run(spec, resolve(RunConfig, file=path, flags=flags))).job


@cache
def planned(family: str, policy: str, precision: Precision | None = None) -> Profile:
    """That step with this policy of all blocks, and these dtypes instead of the default ones."""
    job = job_of(family)
    return profile(job.with_execution(checkpointing=policy, precision=precision or job.precision))


def kept(family: str) -> Iterator[str]:
    """A row for each policy."""
    yield f"| policy of all {len(planned(family, 'full').blocks)} blocks | blocks keep | peak GPU memory | host memory | recomputed |"
    yield "|---|---:|---:|---:|---:|"
    yield from (row(family, policy) for policy in POLICIES)


def row(family: str, policy: str) -> str:
    """A policy's memory in GiB and its recomputation, relative to the forward of the blocks."""
    made = planned(family, policy)
    forward = sum(cost.flops_forward for cost in made.blocks)
    again = sum(
        a.flops_backward - b.flops_backward
        for a, b in zip(made.blocks, planned(family, "none").blocks, strict=True)
    )
    kept_bytes, host = (
        sum(sizes)
        for sizes in zip(*((cost.kept, cost.on_host) for cost in made.blocks), strict=True)
    )
    (plan,) = compose(made, _whole(made), [Budget(name="", total=2**60, workspace=0)])
    return (
        f"| `{policy}` | {kept_bytes / GIB:.1f} GiB | {plan.peak / GIB:.1f} GiB | "
        f"{f'{host / GIB:.1f} GiB' if host else '–'} | "
        f"{again / TERA:,.0f} TFLOP, {again / forward:.0%} of a forward |"
    )


def _whole(made: Profile) -> Partition:
    return Partition(devices=(0,) * len(made.blocks))


def budgets() -> Iterator[str]:
    """The choices of `budget` for GPUs of several sizes."""
    yield '| run | GPU | `train.checkpointing = "budget"` chooses | peak | recomputed |'
    yield "|---|---|---|---:|---:|"
    for family, gpus in GPUS.items():
        spec, _, (frames, height, width), _ = SUBJECTS[family]
        run = f"{'Wan 2.1 1.3B' if spec is WAN else 'FLUX.2 dev'}, {height}×{width}{f'×{frames}' if frames > 1 else ''}"
        yield from (f"| {run} | {gpu} | {_chosen(family, gpu)} |" for gpu in gpus)


def _chosen(family: str, name: str) -> str:
    plain = planned(family, "none")
    (gpu,) = parse_gpus(name)
    budget = Budget(name=gpu.name, total=gpu.total, reserve=gpu.reserve)

    def profile_of(policy: Policy) -> Profile:
        return planned(family, str(policy))

    try:
        task = BudgetTask(
            profile_of=profile_of, division=_whole(plain), budgets=(budget,), gpus=(gpu,)
        )
        choice = choose(task)
    except UserError:
        return "nothing fits | |"
    again, forward = 0, 0
    for index, policy in enumerate(choice.policies):
        block = planned(family, str(policy)).blocks[index]
        again += block.flops_backward - plain.blocks[index].flops_backward
        forward += block.flops_forward
    (plan,) = choice.plans
    return f"`{choice.schedule}` | {plan.peak / GIB:.1f} GiB | {again / forward:.0%} of a forward"
