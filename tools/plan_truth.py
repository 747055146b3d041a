"""Hold plans against what is measured: the peak of real training steps, each in a process of its own.

    uv run tools/plan_truth.py                    # the grid on this machine's CPU, as benchmarks/plan_truth_cpu.md has it
    uv run tools/plan_truth.py --device cuda      # the same grid at larger sizes on the first GPU
    uv run tools/plan_truth.py --only wan-lora    # the cases whose name contains this

On a CPU the peak is that of the process (VmHWM) above what it was before the model was built, under glibc settings that give freed memory
back at once; without them the process keeps what it freed and its size says nothing. On a GPU it is torch.cuda.max_memory_allocated.
Exit status 1 if a plan is off by more than 5 %.
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

    @property
    def name(self) -> str:
        """What the table calls it."""
        parts = [self.model, self.method, self.policy, self.dtype, f"{self.tokens}x{self.batch}"]
        return "-".join([*parts, *(["ema"] if self.ema else []), *([self.quantize] if self.quantize != "none" else [])])


def grid(device: torch.device) -> list[Case]:
    """The cases: each lever alone and with others, for both models."""
    wan, flux2 = Case(model="wan"), Case(model="flux2")
    cases = [replace(case, policy=policy) for case in (wan, flux2) for policy in ("none", "full", "attn_only")]
    cases += [replace(case, dtype="fp32", policy=policy) for case in (wan, flux2) for policy in ("full", "attn_only")]
    cases += [replace(case, method="full", dtype="fp32", policy="full") for case in (wan, flux2)]
    cases += [replace(wan, batch=2, policy="attn_only"), replace(flux2, batch=2, policy="full")]
    cases += [replace(wan, quantize="int8", policy="none"), replace(wan, method="full", dtype="fp32", ema=0.99)]
    if device.type == "cuda":
        cases = [replace(case, width=3072, tokens=16384, blocks=8) for case in cases]
    return cases


def described(case: Case) -> tuple[Any, Any, Any, list[dict[str, Tensor]]]:
    """Spec, architecture, adapter settings and the items of a micro-batch, on `meta`."""
    from ditkit_core.adapters.config import AdapterConfig

    heads, side = case.width // 128, {1024: 32, 4096: 64, 16384: 128}[case.tokens]
    adapter = AdapterConfig(method="lora" if case.method == "lora" else "full", rank=case.rank)
    with torch.device("meta"):
        if case.model == "wan":
            from ditkit_wan.presets import WanArch
            from ditkit_wan.spec import WAN as spec

            arch: Any = WanArch(dim=case.width, ffn_dim=4 * case.width, heads=heads, layers=case.blocks)
            frames = 13  # 4 frames of latents, so that each has a quarter of the tokens
            item = spec.training.empty_item(arch, (frames, 16 * side // 2, 16 * side // 2), ())
        else:
            from ditkit_flux2.presets import Flux2Arch
            from ditkit_flux2.spec import FLUX2 as spec

            arch = Flux2Arch(
                dim=case.width, heads=heads, double_layers=case.blocks // 3, single_layers=case.blocks,
                text_dim=5 * case.width // 2, guidance=False,
            )  # fmt: skip
            item = spec.training.empty_item(arch, (1, 16 * side, 16 * side), ())
        return spec, arch, adapter, [dict(item) for _ in range(case.batch)]


def measure(case: Case, device: torch.device) -> dict[str, float]:
    """Two real steps; run in a process of its own."""
    from ditkit_core.adapters.inject import inject, trainable_parameters
    from ditkit_core.encoding.loader import Batch
    from ditkit_core.engine.engine import BlockEngine
    from ditkit_core.models.precision import Precision, compute_fp32_in_fp32, parse_dtype
    from ditkit_core.run.prepare import build_on_meta
    from ditkit_core.training.config import EMAConfig, FlowConfig
    from ditkit_core.training.optimizers import OptimConfig
    from ditkit_core.training.train_model import TrainModel
    from ditkit_core.training.train_state import TrainState
    from ditkit_core.training.train_step import StepContext, training_step

    torch.set_num_threads(1)
    compute_fp32_in_fp32()
    spec, arch, adapter, outline = described(case)
    precision = Precision(matmul=parse_dtype(case.dtype))
    items = [{name: torch.randn(t.shape).to(t.dtype) for name, t in item.items()} for item in outline]
    model = build_on_meta(spec, arch, precision)
    if case.quantize != "none":
        from ditkit_core.weights.quantize import convert

        convert(model, case.quantize, spec.precision.keep_fp32)
    inject(model, adapter, spec.adapters.targets)
    base = resident() if device.type == "cpu" else 0
    fill(model, spec, precision, device)
    trained = TrainState(model, trainable_parameters(model), OptimConfig(), EMAConfig(decay=case.ema))
    model.train()
    for step in range(2):  # the optimizer's state is there from the second on
        batch = Batch(ids=[str(i) for i in range(len(items))], items=items)
        training_step(
            TrainModel(model, BlockEngine(policy=case.policy), spec),
            [batch],
            trained.optimizer,
            StepContext(step=step, seed=0, flow=FlowConfig()),
            lr=1e-4,
            clip_norm=1.0,
        )
        trained.average.update(step + 1)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else highest()
    return {"peak": peak - base}


def fill(model: nn.Module, spec: Any, precision: Any, device: torch.device) -> None:
    """Random weights in the place of those on `meta`, in the dtypes that loading gives."""
    from ditkit_core.adapters.inject import canonical_name, is_adapter_name

    for prefix, module in model.named_modules():
        for leaf, old in module._parameters.items():
            if old is None:
                continue
            name = f"{prefix}.{leaf}"
            wide = is_adapter_name(name) or spec.precision.keep_fp32(canonical_name(name))
            dtype = old.dtype if not old.is_floating_point() or old.itemsize == 1 else None
            if dtype is None:
                values = 0.02 * torch.randn(old.shape, device=device, dtype=torch.float32 if wide else precision.matmul)
            else:
                values = torch.zeros(old.shape, device=device, dtype=dtype)
            module._parameters[leaf] = nn.Parameter(values, old.requires_grad)


def plan(case: Case, device: torch.device) -> int:
    """What a plan says of the same steps."""
    from ditkit_core.models.precision import Precision, parse_dtype
    from ditkit_core.planner.memory import Budget, Partition, compose
    from ditkit_core.planner.planned_step import StepJob as Job
    from ditkit_core.planner.profiler import profile
    from ditkit_core.training.config import EMAConfig, FlowConfig
    from ditkit_core.training.optimizers import OptimConfig

    spec, arch, adapter, items = described(case)
    job = Job(
        spec=spec, arch=arch, adapter=adapter, precision=Precision(matmul=parse_dtype(case.dtype)), batch=items,
        policy=case.policy, optim=OptimConfig(), ema=EMAConfig(decay=case.ema), flow=FlowConfig(),
        clip_norm=1.0, quantize=case.quantize, kind=device.type,
    )  # fmt: skip
    made = profile(job)
    (planned,) = compose(
        made,
        Partition(devices=(0,) * len(made.blocks), streamed=frozenset()),
        [Budget(name="", total=2**50, workspace=0)],
    )
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


def in_own_process(case: Case, device: torch.device) -> dict[str, float]:
    """Measure a case where nothing else was ever allocated."""
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, "--device", str(device), "--measure", json.dumps(asdict(case))]
    done = subprocess.run(command, check=False, env=os.environ | settings, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{case.name}: {done.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


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
    parser.add_argument("--measure", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(Case(**json.loads(args.measure)), args.device)))
        return 0
    print("| case | planned MiB | measured MiB | planned / measured |\n|---|---|---|---|")
    worst = 0.0
    smaller = {name: value for name in ("width", "tokens") if (value := getattr(args, name))}
    for case in (replace(case, **smaller) for case in grid(args.device)):
        if args.only not in case.name:
            continue
        planned, measured = plan(case, args.device), in_own_process(case, args.device)
        ratio = planned / measured["peak"]
        worst = max(worst, abs(ratio - 1))
        mebibytes = f"{planned / 2**20:,.0f} | {measured['peak'] / 2**20:,.0f}"
        print(f"| {case.name} | {mebibytes} | {ratio:.3f} |", flush=True)
    print(f"\nWorst: {worst:.1%} off; allowed {TOLERANCE:.0%}. torch {torch.__version__}.")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
