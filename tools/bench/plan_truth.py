"""Hold plans against what is measured: the peak of real training steps, each in a process of its
own.

    # the grid on this machine's CPU, as benchmarks/plan_truth_cpu.md has it
    uv run tools/bench/plan_truth.py
    # slices of Wan 14B and FLUX.2 dev at full width on the first GPU
    uv run tools/bench/plan_truth.py --device cuda
    # the cases whose name contains this
    uv run tools/bench/plan_truth.py --only wan-lora

On a CPU the peak is that of the process (VmHWM) above what it was before the model was built, under
glibc settings that give freed memory back at once; without them the process keeps what it freed and
its size says nothing. On a GPU it is torch.cuda.max_memory_allocated; what the allocator reserved
and what the driver says is in use are printed next to it. There a plan includes the workspaces of
cuBLAS, which torch allocates. In fp32 attention takes another kernel on a GPU than the CPU's that
was planned, so cases in fp32 compare that, too. A case for which memory is short gets dashes. Exit
status 1 if a plan is off by more than 5 %, or a case could not be measured.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core.engine.devices import choose_device
from ditkit_core.io.allocator import allocator_settings

TOLERANCE = 0.05
SMALLEST = 300 * 2**20
"""Bytes of activations below which the rest of a process hides what is measured."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run to plan and to measure."""

    model: str
    method: str = "lora"
    policy: str = "full"
    dtype: str = "bf16"
    tokens: int = 4096
    batch: int = 1
    ema: float = 0.0
    quantize: str = "none"
    width: int = 768
    blocks: int = 6
    rank: int = 32
    swapped: bool = False
    """Whether all blocks are streamed."""
    between: int = 0
    """Tokens of steps between the measured ones, of another shape and fewer; 0 for none."""

    @property
    def name(self) -> str:
        """What the table calls it."""
        parts = [self.model, self.method, self.policy, self.dtype, f"{self.tokens}x{self.batch}"]
        others = {"ema": self.ema, self.quantize: self.quantize != "none", "swapped": self.swapped}
        others[f"between {self.between}"] = self.between > 0
        return "-".join([*parts, *(name for name, is_set in others.items() if is_set)])


def grid(device: torch.device) -> list[Case]:
    """The cases: each lever alone and with others, for Wan and FLUX.2."""
    wan, flux2 = Case(model="wan"), Case(model="flux2")
    if device.type == "cuda":
        wan = replace(wan, width=5120, tokens=20280, blocks=4)
        flux2 = replace(flux2, width=6144, blocks=6)
        cases = [replace(wan, policy=policy) for policy in ("full", "attn_only", "full+offload")]
        cases += [
            replace(wan, swapped=True),
            flux2,
            replace(flux2, policy="attn_only"),
            replace(wan, quantize="int8"),
        ]
        cases += [
            replace(wan, policy="none"),
            replace(wan, dtype="fp32"),
            replace(flux2, method="full", dtype="fp32", blocks=3),
        ]
        cases.insert(5, replace(flux2, between=1024))
        return [
            *cases,
            replace(flux2, batch=2),
            replace(wan, quantize="nf4"),
            replace(flux2, swapped=True),
        ]
    cases = [
        replace(case, policy=policy)
        for case in (wan, flux2)
        for policy in ("none", "full", "attn_only")
    ]
    cases += [
        replace(case, dtype="fp32", policy=policy)
        for case in (wan, flux2)
        for policy in ("full", "attn_only")
    ]
    cases += [replace(case, method="full", dtype="fp32", policy="full") for case in (wan, flux2)]
    cases += [replace(wan, batch=2, policy="attn_only"), replace(flux2, batch=2, policy="full")]
    cases += [
        replace(wan, quantize="int8", policy="none"),
        replace(wan, method="full", dtype="fp32", ema=0.99),
    ]
    return cases


def tiny_cases() -> list[Case]:
    """Cases that show whether everything runs."""
    small = Case(model="wan", width=128, tokens=1024, blocks=3)
    return [small, replace(small, swapped=True, between=256)]


def described(case: Case) -> tuple[Any, Any, Any, list[dict[str, Tensor]]]:
    """Spec, architecture, adapter settings and the items of a micro-batch, on `meta`."""
    from ditkit_core.adapters.config import AdapterConfig

    heads = case.width // 128
    rows, columns = {
        256: (16, 16),
        1024: (32, 32),
        4096: (64, 64),
        16384: (128, 128),
        20280: (60, 104),
    }[case.tokens]
    adapter = AdapterConfig(method="lora" if case.method == "lora" else "full", rank=case.rank)
    with torch.device("meta"):
        if case.model == "wan":
            from ditkit_wan.presets import WanArch
            from ditkit_wan.spec import WAN as spec

            ffn_dim = {5120: 13824}.get(case.width, 4 * case.width)
            arch: Any = WanArch(dim=case.width, ffn_dim=ffn_dim, heads=heads, layers=case.blocks)
            # Of 13 frames come 4 of latents, so that each has a quarter of the tokens; of 49 come
            # 13.
            frames = 49 if case.tokens == 20280 else 13
            item = spec.training.empty_item(arch, (frames, 8 * rows, 8 * columns), ())
        else:
            from ditkit_flux2.presets import Flux2Arch
            from ditkit_flux2.spec import FLUX2 as spec

            arch = Flux2Arch(
                dim=case.width, heads=heads, double_layers=case.blocks // 3,
                single_layers=case.blocks,
                text_dim=5 * case.width // 2, guidance=False,
            )  # fmt: skip
            item = spec.training.empty_item(arch, (1, 16 * rows, 16 * columns), ())
        return spec, arch, adapter, [dict(item) for _ in range(case.batch)]


def measure(case: Case, device: torch.device) -> dict[str, float]:
    """Two real steps; run in a process of its own."""
    from ditkit_core.adapters.inject import inject, trainable_parameters
    from ditkit_core.encoding.loader import Batch
    from ditkit_core.engine.block_swap import BlockSwap
    from ditkit_core.engine.devices import make_current
    from ditkit_core.engine.engine import BlockEngine
    from ditkit_core.engine.placement import Placement
    from ditkit_core.loading.model import Model
    from ditkit_core.models.precision import Precision, compute_fp32_in_fp32, parse_dtype
    from ditkit_core.models.spec import build_on_meta
    from ditkit_core.training.config import EMAConfig, FlowConfig
    from ditkit_core.training.optim.optimizers import OptimConfig
    from ditkit_core.training.train_state import TrainState
    from ditkit_core.training.train_step import StepContext, training_step

    torch.set_num_threads(1)
    make_current([device])
    compute_fp32_in_fp32()
    spec, arch, adapter, outline = described(case)
    precision = Precision(matmul=parse_dtype(case.dtype))
    items = [
        {name: torch.randn(t.shape).to(t.dtype) for name, t in item.items()} for item in outline
    ]
    model = build_on_meta(spec, arch, precision)
    if case.quantize != "none":
        from ditkit_core.weights.quantize import convert

        convert(model, case.quantize, spec.precision.keep_fp32)
    inject(model, adapter, spec.adapters.targets)
    base = resident() if device.type == "cpu" else 0
    fill(model, spec, precision, device, swapped=case.swapped)
    count = len(model.blocks())
    placement = Placement(
        embed=device, blocks=(device,) * count, head=device, streamed=frozenset(range(count))
    )
    hooks = (BlockSwap(model, placement),) if case.swapped else ()
    trained = TrainState(
        model, trainable_parameters(model), OptimConfig(), EMAConfig(decay=case.ema)
    )
    model.train()
    shapes = [items]
    if case.between:
        smaller = described(replace(case, tokens=case.between))[3]
        shapes.append(
            [
                {name: torch.randn(t.shape).to(t.dtype) for name, t in item.items()}
                for item in smaller
            ]
        )
    for step in range(2 * len(shapes)):  # the optimizer's state is there from the second on
        items = shapes[step % len(shapes)]
        batch = Batch(ids=[str(i) for i in range(len(items))], items=items)
        training_step(
            Model(model, BlockEngine(policy=case.policy, hooks=hooks), spec),
            [batch],
            trained.optimizer,
            StepContext(step=step, seed=0, flow=FlowConfig()),
            lr=1e-4,
            clip_norm=1.0,
        )
        trained.average.update(step + 1)
    if device.type != "cuda":
        return {"peak": highest() - base}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "peak": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
        "in use": total - free,
    }


def fill(model: Any, spec: Any, precision: Any, device: torch.device, *, swapped: bool) -> None:
    """Random weights in the place of those on `meta`, in the dtypes that loading gives; frozen ones
    of swapped blocks on the host."""
    from ditkit_core.adapters.inject import canonical_name, is_adapter_name

    inside = {id(module) for block in model.blocks() for module in block.modules()}
    for prefix, module in model.named_modules():
        for leaf, old in module._parameters.items():
            if old is None:
                continue
            name = f"{prefix}.{leaf}"
            wide = is_adapter_name(name) or spec.precision.keep_fp32(canonical_name(name))
            dtype = old.dtype if not old.is_floating_point() or old.itemsize == 1 else None
            there = (
                torch.device("cpu")
                if swapped and id(module) in inside and not old.requires_grad
                else device
            )
            if dtype is None:
                values = 0.02 * torch.randn(
                    old.shape, device=there, dtype=torch.float32 if wide else precision.matmul
                )
            else:
                values = torch.zeros(old.shape, device=there, dtype=dtype)
            module._parameters[leaf] = nn.Parameter(values, old.requires_grad)


def plan(case: Case, device: torch.device) -> int:
    """What a plan says of the same steps."""
    from ditkit_core.execution import Execution
    from ditkit_core.models.precision import Precision, parse_dtype
    from ditkit_core.planner.memory import Budget, Partition, compose
    from ditkit_core.planner.planned_step import StepJob as Job
    from ditkit_core.planner.profiler import profile
    from ditkit_core.training.config import EMAConfig

    spec, arch, adapter, items = described(case)
    precision = Precision(matmul=parse_dtype(case.dtype))
    job = Job(
        spec=spec,
        arch=arch,
        adapter=adapter,
        batch=items,
        ema=EMAConfig(decay=case.ema),
        kind=device.type,
        execution=Execution(
            checkpointing=case.policy, kernels="torch", quantize=case.quantize, precision=precision
        ),
    )
    made = profile(job)
    count = len(made.blocks)
    # torch allocates cuBLAS' workspaces as tensors, which the measured peak has as well.
    budget = (
        Budget(name="", total=2**50)
        if device.type == "cuda"
        else Budget(name="", total=2**50, workspace=0)
    )
    streamed = frozenset(range(count)) if case.swapped else frozenset[int]()
    (planned,) = compose(made, Partition(devices=(0,) * count, streamed=streamed), [budget])
    return planned.peak


def resident() -> int:
    """Resident bytes of this process; its peak is counted from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def highest() -> int:
    """Most resident bytes since `resident`."""
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def in_own_process(case: Case, device: torch.device, **variables: str) -> dict[str, float] | str:
    """Measure a case where nothing else was ever allocated; why not, in a line, if it fails.

    Args:
        variables: Added to the environment.
    """
    settings = {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "PYTHONWARNINGS": "ignore",
    }
    command = [
        sys.executable,
        __file__,
        "--device",
        str(device),
        "--measure",
        json.dumps(asdict(case)),
    ]
    environment = os.environ | settings | variables
    done = subprocess.run(
        command,
        check=False,
        env=environment | allocator_settings(environment),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A plan next to what was measured, in bytes."""

    planned: int
    measured: dict[str, float] | str
    """Why there is none, if the case failed."""

    @property
    def ratio(self) -> float | None:
        """Planned by measured peak."""
        return None if isinstance(self.measured, str) else self.planned / self.measured["peak"]

    def columns(self) -> dict[str, str]:
        """The cells of a row, by the names of the columns."""
        found = {} if isinstance(self.measured, str) else self.measured
        amounts = {"planned MiB": self.planned, "measured MiB": found.get("peak")}
        amounts |= {f"{name} MiB": found[name] for name in found if name != "peak"}
        cells = {
            name: "-" if value is None else f"{value / 2**20:,.0f}"
            for name, value in amounts.items()
        }
        return cells | {"planned / measured": "-" if self.ratio is None else f"{self.ratio:.3f}"}


def compared(case: Case, device: torch.device) -> Comparison:
    """Plan a case, and measure it."""
    return Comparison(planned=plan(case, device), measured=in_own_process(case, device))


def main() -> int:
    """The grid as a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--width",
        type=int,
        help="of all cases, in place of their own: a quick look, which measures nothing worth keeping",
    )
    parser.add_argument("--tokens", type=int, choices=[1024, 4096, 16384], help="the same")
    parser.add_argument(
        "--tiny", action="store_true", help="two small cases: a look at whether everything runs"
    )
    parser.add_argument("--measure", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(Case(**json.loads(args.measure)), args.device)))
        return 0
    args.device = choose_device(str(args.device), "--device")
    titles = [
        "planned MiB",
        "measured MiB",
        *(["reserved MiB", "in use MiB"] if args.device.type == "cuda" else []),
    ]
    print(
        f"| case | {' | '.join([*titles, 'planned / measured'])} |\n|{'---|' * (len(titles) + 2)}",
        flush=True,
    )
    worst, failed = 0.0, False
    smaller = {name: value for name in ("width", "tokens") if (value := getattr(args, name))}
    for case in (
        replace(case, **smaller) for case in (tiny_cases() if args.tiny else grid(args.device))
    ):
        if args.only not in case.name:
            continue
        found = compared(case, args.device)
        if isinstance(found.measured, str):
            print(f"{case.name}: {found.measured}", file=sys.stderr, flush=True)
        failed |= found.ratio is None
        worst = max(worst, abs((found.ratio or 1.0) - 1))
        cells = found.columns()
        print(
            f"| {case.name} | "
            f"{' | '.join(cells.get(name, '-') for name in [*titles, 'planned / measured'])} |",
            flush=True,
        )
    print(f"\nWorst: {worst:.1%} off; allowed {TOLERANCE:.0%}. torch {torch.__version__}.")
    return int(failed or (worst > TOLERANCE and not args.tiny))


if __name__ == "__main__":
    sys.exit(main())
