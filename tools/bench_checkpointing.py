"""Compare checkpointing policies: recomputed attention, time, memory, and whether results are bitwise identical.

    uv run tools/bench_checkpointing.py                    # this CPU: 4,096 tokens, 2 blocks of Wan 2.1 1.3B's width
    uv run tools/bench_checkpointing.py --device cuda      # Wan 2.1 1.3B whole, 77 frames of 720x1280: 72,000 tokens
    uv run tools/bench_checkpointing.py --policies full 'attn_only(self)' 'ops(matmul)'

The experiment that the policies were founded on: `attn_only` runs attention's forward once for each call instead of twice, and everything
else as often as `full` does. A step is forward, loss and backward of a LoRA on q, k, v and o with random weights; steps of the policies
alternate in one process. Kernels are counted by torch.profiler (operations on a CPU, launched kernels on a GPU). The last columns are
the loss and the largest relative difference of a gradient against the first `full` step; a second `full` run gives the noise floor.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench_step import live_peak
from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import initialise, inject, trainable_parameters
from ditkit_core.engine.ac_schedule import parse_schedule
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.models.precision import Precision, parse_dtype
from ditkit_wan.model.transformer import WanInputs, WanTransformer
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN

VIEWS = (
    "view", "reshape", "transpose", "expand", "as_strided", "slice", "select", "unsqueeze", "squeeze", "aten::t", "permute", "detach",
    "empty", "flatten", "unflatten", "unbind", "split", "chunk", "narrow", "resize", "alias", "is_", "result_type", "to", "set_", "item",
    "size", "stride", "lift", "_local_scalar", "data_ptr", "record_stream", "_backward", "T", "broadcast", "movedim", "real", "imag",
)  # fmt: skip
"""Operations that compute nothing, by the start of their name."""


@dataclass
class Found:
    """Measurements of one policy."""

    seconds: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    peak: int = 0
    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)


def kind_of(name: str, *, on_gpu: bool) -> str:
    """The kind of an operation (CPU) or a kernel (GPU): attention, backward of it, a product of matrices, or elementwise work."""
    low = name.lower()
    if on_gpu:
        is_attention = any(word in low for word in ("flash", "fmha", "sdpa", "attention"))
        products = ("gemm", "cutlass", "nvjet", "xmma", "cublas")
    else:
        is_attention = "scaled_dot_product_flash" in low
        products = ("aten::mm", "aten::addmm", "aten::bmm", "aten::mkldnn_linear")
    if is_attention:
        return "attention backward" if any(word in low for word in ("bwd", "backward")) else "attention"
    if any(word in low if on_gpu else low == word for word in products):
        return "matmul"
    return "elementwise"


def counted(step: Callable[[], object], *, on_gpu: bool) -> Counter[str]:
    """How often a step does each kind of work."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step()
    counts: Counter[str] = Counter()
    for event in profile.events() or ():
        if on_gpu:
            is_kernel = event.device_type == torch.autograd.DeviceType.CUDA
            if not is_kernel or event.name.startswith(("Mem", "aten::")):
                continue
        elif not event.name.startswith("aten::") or is_view(event.name) or is_inside(event):
            continue
        counts[kind_of(event.name, on_gpu=on_gpu)] += 1
    return counts


def is_inside(event: Any) -> bool:
    """Whether an operation is part of a product or of attention, or only made of others that are counted."""
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith("aten::") and kind_of(parent.name, on_gpu=False) != "elementwise":
            return True
        parent = parent.cpu_parent
    parts = (part.name for part in event.cpu_children if part.name.startswith("aten::"))
    return kind_of(event.name, on_gpu=False) == "elementwise" and any(not is_view(part) for part in parts)


def is_view(name: str) -> bool:
    """Whether an operation only looks at memory differently, or asks for it."""
    return name.removeprefix("aten::").startswith(VIEWS) or name in VIEWS


def build(args: argparse.Namespace, device: torch.device) -> tuple[WanTransformer, Callable[[str], Tensor]]:
    """The model, and a step under a policy that returns the loss and leaves gradients."""
    on_gpu = device.type == "cuda"
    blocks = args.blocks or (30 if on_gpu else 2)
    size = (20, 90, 160) if on_gpu else (4, 64, 64)
    dtype = parse_dtype(args.dtype)
    arch = WanArch(dim=1536, ffn_dim=8960, heads=12, layers=blocks)
    torch.manual_seed(0)
    with torch.device(device):
        model = WanTransformer(arch, Precision(matmul=dtype)).train().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if WAN.precision.keep_fp32(name) else dtype)
    inject(model, AdapterConfig(rank=32, targets=("q,k,v,o",)), WAN.adapters.targets)
    initialise(model, 0, device_of=lambda module: device)
    for name, parameter in trainable_parameters(model).items():
        if "lora_B" in name:  # as in training: at zero nothing would reach lora_A
            parameter.data = 0.01 * torch.randn(parameter.shape, device=device)
    latents, target = torch.randn(2, 1, 16, *size, device=device)
    text = torch.randn(1, 512, 4096, device=device).to(dtype)
    inputs = WanInputs(list(latents), torch.tensor([731.25], device=device), list(text))

    def step(policy: str) -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = (torch.stack(model(inputs, BlockEngine(policy=policy, backend=args.backend))) - target).square().mean()
        loss.backward()
        return loss.detach()

    tokens = size[0] * size[1] * size[2] // 4
    print(
        f"Wan width 1536, {blocks} blocks, {tokens:,} tokens, {args.dtype}, LoRA rank 32, {args.backend}, torch {torch.__version__}"
    )
    return model, step


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Found]:
    """Every policy, `full` first and once more at the end for the noise floor."""
    model, step = build(args, device)
    on_gpu = device.type == "cuda"
    found = {name: Found() for name in [*dict.fromkeys(["full", *args.policies]), "full, again"]}
    for name, each in found.items():
        policy = name.removesuffix(", again")
        step(policy)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
            step(policy)
            each.peak = torch.cuda.max_memory_allocated(device)
        else:
            each.peak = live_peak(lambda policy=policy: step(policy))
        each.loss = float(step(policy))
        each.gradients = {n: p.grad.clone() for n, p in trainable_parameters(model).items() if p.grad is not None}
        each.counts = counted(lambda policy=policy: step(policy), on_gpu=on_gpu)
    for _ in range(args.repeats):
        for name, each in found.items():
            start = time.perf_counter()
            step(name.removesuffix(", again"))
            if on_gpu:
                torch.cuda.synchronize(device)
            each.seconds.append(time.perf_counter() - start)
    return found


def table(found: dict[str, Found]) -> str:
    """Markdown, a row for each policy."""
    full = found["full"]
    columns = ["attention", "attention backward", "matmul", "elementwise"]
    lines = [
        "| policy | "
        + " | ".join(columns)
        + " | step | of `full` | peak | above `full` | loss difference | gradient difference |",
        "|---|" + "---|" * (len(columns) + 6),
    ]
    for name, each in found.items():
        mine, base = statistics.median(each.seconds), statistics.median(full.seconds)
        gradient = max(
            float((each.gradients[key] - value).norm() / value.norm().clamp_min(1e-30))
            for key, value in full.gradients.items()
        )
        counts = " | ".join(str(each.counts[column]) for column in columns)
        lines.append(
            f"| `{name}` | {counts} | {mine:.3f} s | {mine / base:.3f} | {each.peak / 2**20:,.0f} MiB | "
            f"{(each.peak - full.peak) / 2**20:+,.0f} MiB | {abs(each.loss - full.loss):.2g} | {gradient:.2g} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--policies", nargs="+", default=["none", "attn_only", "attn_only(self)"])
    parser.add_argument("--backend", default="sdpa")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--blocks", type=int, default=0, help="default: 2 on a CPU, all 30 on a GPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    for policy in args.policies:
        parse_schedule(policy)
    found = measure(args, torch.device(args.device))
    print(table(found))


if __name__ == "__main__":
    main()
