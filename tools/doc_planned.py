"""Tables of docs/ that the planner makes: memory and recomputation of each checkpointing policy, and the policies that a budget chooses."""

from collections.abc import Iterator
from functools import cache

import torch

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.config.sizes import GIB
from ditkit_core.engine.ac_policies import Policy
from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision
from ditkit_core.planner.ac_budget import BudgetTask, choose
from ditkit_core.planner.gpus import parse_gpus
from ditkit_core.planner.memory import Budget, Partition, Profile, compose
from ditkit_core.planner.planned_step import StepJob as Job
from ditkit_core.planner.profiler import profile
from ditkit_core.training.config import EMAConfig, FlowConfig
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_flux2.presets import PRESETS as FLUX2_PRESETS
from ditkit_flux2.spec import FLUX2
from ditkit_wan.presets import PRESETS as WAN_PRESETS
from ditkit_wan.spec import WAN

SUBJECTS = {
    "wan": (WAN, WAN_PRESETS["t2v-1.3b"], (77, 720, 1280), "q,k,v,o"),
    "flux2": (FLUX2, FLUX2_PRESETS["dev"], (1, 1024, 1024), "blocks"),
}
"""Spec, sizes, frames with height and width, and the targets of the LoRA of rank 32."""
POLICIES = (
    "none", "ops(matmul, attention)", "every_n(2)", "attn_only", "attn_only(self)", "full", "attn_only+offload", "full+offload",
)  # fmt: skip
GPUS = {"wan": ("24GiB", "32GiB", "48GiB", "80GiB"), "flux2": ("80GiB", "96GiB")}
TERA = 10**12


@cache
def planned(family: str, policy: str, precision: Precision = Precision()) -> Profile:  # noqa: B008
    """A step of a LoRA with one sample, the base in bf16."""
    spec, arch, size, targets = SUBJECTS[family]
    with torch.device("meta"):
        item = spec.training.empty_item(arch, size, [])
    return profile(
        Job(
            spec=spec, arch=arch, adapter=AdapterConfig(rank=32, targets=(targets,)), precision=precision, batch=[item],
            policy=policy, optim=OptimConfig(), ema=EMAConfig(), flow=FlowConfig(),
        )
    )  # fmt: skip


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
        a.flops_backward - b.flops_backward for a, b in zip(made.blocks, planned(family, "none").blocks, strict=True)
    )
    kept_bytes, host = (sum(sizes) for sizes in zip(*((cost.kept, cost.on_host) for cost in made.blocks), strict=True))
    (plan,) = compose(made, _whole(made), [Budget(name="", total=2**60, workspace=0)])
    return (
        f"| `{policy}` | {kept_bytes / GIB:.1f} GiB | {plan.peak / GIB:.1f} GiB | {f'{host / GIB:.1f} GiB' if host else '–'} | "
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
        choice = choose(BudgetTask(profile_of=profile_of, division=_whole(plain), budgets=(budget,)))
    except UserError:
        return "nothing fits | |"
    again, forward = 0, 0
    for index, policy in enumerate(choice.policies):
        block = planned(family, str(policy)).blocks[index]
        again += block.flops_backward - plain.blocks[index].flops_backward
        forward += block.flops_forward
    (plan,) = choice.plans
    return f"`{choice.schedule}` | {plan.peak / GIB:.1f} GiB | {again / forward:.0%} of a forward"
