"""Compare checkpointing policies: recomputed attention, time, memory, and whether results are
bitwise identical.

    # this CPU: 4,096 tokens, 2 blocks of Wan 2.1 1.3B's width
    uv run tools/bench/bench_checkpointing.py
    # Wan 2.1 1.3B whole, 77 frames of 720x1280: 72,000 tokens
    uv run tools/bench/bench_checkpointing.py --device cuda
    # in a few minutes
    uv run tools/bench/bench_checkpointing.py --device cuda --blocks 8 --repeats 3
    uv run tools/bench/bench_checkpointing.py --device cuda --size 480x832 --frames 77 \\
        --trained full
    uv run tools/bench/bench_checkpointing.py --policies full 'attn_only(self)'

The experiment that the policies were founded on: `attn_only` runs attention's forward once for each
call instead of twice, and everything else as often as `full` does. A step is forward, loss and
backward, with random weights, of a LoRA on q, k, v and o or of all weights; steps of each policy
alternate with steps of `full`, in one process. Kernels are counted by torch.profiler (operations on
a CPU, launched kernels on a GPU). The last columns are the loss and the largest relative difference
of a gradient against the first `full` step; a second `full` run gives the noise floor. Each row is
printed when it is measured; one for which memory is short has dashes. On a GPU `none`, which would
need 200 GiB there, is left out unless it is named.
"""

import argparse
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from device_clock import (
    by_kind,
    interleaved,
    launches,
    peak_bytes,
    started_on,
    unless_out_of_memory,
)
from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import initialise, inject, trainable_parameters
from ditkit_core.engine.ac_schedule import parse_schedule
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.models.precision import Precision, parse_dtype
from ditkit_wan.model.inputs import WanInputs
from ditkit_wan.model.transformer import WanTransformer
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN

COLUMNS = ("attention", "attention backward", "matmul", "elementwise")


@dataclass(frozen=True, kw_only=True)
class Found:
    """Measurements of one policy."""

    seconds: float
    of_full: float
    """Ratio of its time to that of `full`."""
    counts: Counter[str]
    peak: int
    loss: float
    gradients: dict[str, Tensor]


def latent_size(args: argparse.Namespace, device: torch.device) -> tuple[int, int, int]:
    """Frames, rows and columns of the latents: those of `--frames` of `--size`, where either is
    given, and else a usual size of the device."""
    on_gpu = device.type == "cuda"
    frames, rows, columns = (1, 16, 16) if args.tiny else (20, 90, 160) if on_gpu else (4, 64, 64)
    if args.size:
        rows, columns = (int(pixels) // 8 for pixels in args.size.split("x"))
    return (1 + (args.frames - 1) // 4 if args.frames else frames), rows, columns


def build(
    args: argparse.Namespace, device: torch.device
) -> tuple[WanTransformer, Callable[[str], Tensor]]:
    """The model, and a step under a policy that returns the loss and leaves gradients."""
    on_gpu = device.type == "cuda"
    blocks = args.blocks or (30 if on_gpu else 2)
    size = latent_size(args, device)
    dtype = parse_dtype(args.dtype)
    dim, ffn_dim = (128, 256) if args.tiny else (1536, 8960)
    text_dim, rows = (128, 16) if args.tiny else (4096, 512)
    arch = WanArch(
        dim=dim,
        ffn_dim=ffn_dim,
        heads=dim // 128,
        layers=blocks,
        text_dim=text_dim,
        text_tokens=rows,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = (
            WanTransformer(arch, Precision(matmul=dtype))
            .train()
            .requires_grad_(args.trained == "full")
        )
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(
            torch.float32 if WAN.precision.keep_fp32(name) else dtype
        )
    if args.trained == "lora":
        inject(model, AdapterConfig(rank=32, targets=("q,k,v,o",)), WAN.adapters.targets)
        initialise(model, 0, device_of=lambda module: device)
    for name, parameter in trainable_parameters(model).items():
        if "lora_B" in name:  # as in training: at zero nothing would reach lora_A
            parameter.data = 0.01 * torch.randn(parameter.shape, device=device)
    latents, target = torch.randn(2, 1, 16, *size, device=device)
    text = torch.randn(1, rows, text_dim, device=device).to(dtype)
    inputs = WanInputs(list(latents), torch.tensor([731.25], device=device), list(text))

    def step(policy: str) -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = (
            (torch.stack(model(inputs, BlockEngine(policy=policy, backend=args.backend))) - target)
            .square()
            .mean()
        )
        loss.backward()
        return loss.detach()

    tokens = size[0] * size[1] * size[2] // 4
    trained = "LoRA rank 32" if args.trained == "lora" else "all weights trained"
    print(
        f"Wan width {dim}, {blocks} blocks, {tokens:,} tokens, {args.dtype}, {trained}, "
        f"{args.backend}, torch {torch.__version__}",
        flush=True,
    )
    return model, step


def measured(
    model: WanTransformer,
    step: Callable[[str], Tensor],
    policy: str,
    args: argparse.Namespace,
    device: torch.device,
) -> Found:
    """Everything about one policy."""
    once = partial(step, policy)
    loss = float(once())
    gradients = {
        n: p.grad.clone() for n, p in trainable_parameters(model).items() if p.grad is not None
    }
    peak, (counts, _) = peak_bytes(once, device), by_kind(launches(once, device))
    base, own = interleaved([lambda: step("full"), once], args.repeats, device)
    median = statistics.median(own)
    return Found(
        seconds=median,
        of_full=median / statistics.median(base),
        counts=counts,
        peak=peak,
        loss=loss,
        gradients=gradients,
    )


def row(name: str, each: Found | None, full: Found | None) -> str:
    """A row of the table, in Markdown."""
    if each is None or full is None:
        return f"| `{name}` |" + " - |" * (len(COLUMNS) + 6)
    # Not Python's `max`, which may pass over a NaN.
    apart = [
        (each.gradients[key] - value).norm() / value.norm().clamp_min(1e-30)
        for key, value in full.gradients.items()
    ]
    gradient = float(torch.stack(apart).max())
    counts = " | ".join(
        str(sum(n for kind, n in each.counts.items() if kind.removesuffix(" fp32") == column))
        for column in COLUMNS
    )
    return (
        f"| `{name}` | {counts} | {each.seconds:.3f} s | {each.of_full:.3f} | "
        f"{each.peak / 2**20:,.0f} MiB | {(each.peak - full.peak) / 2**20:+,.0f} MiB | "
        f"{abs(each.loss - full.loss):.2g} | {gradient:.2g} |"
    )


def measure(args: argparse.Namespace, device: torch.device) -> None:
    """Print a row for every policy: `full` first, and once more at the end for the noise floor."""
    model, step = build(args, device)
    titles = [
        "policy",
        *COLUMNS,
        "step",
        "of `full`",
        "peak",
        "above `full`",
        "loss difference",
        "gradient difference",
    ]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}", flush=True)
    full: Found | None = None
    for name in [*dict.fromkeys(["full", *args.policies]), "full, again"]:
        policy = name.removesuffix(", again")
        each = unless_out_of_memory(
            lambda policy=policy: measured(model, step, policy, args, device)
        )
        full = full or each
        print(row(name, each, full), flush=True)


def _size(text: str) -> str:
    if not re.fullmatch(r"(\d*[1-9]\d*)x(\d*[1-9]\d*)", text) or any(
        int(pixels) % 16 for pixels in text.split("x")
    ):
        raise argparse.ArgumentTypeError(f"{text!r} is not HEIGHTxWIDTH in multiples of 16 pixels")
    return text


def _frames(text: str) -> int:
    if not text.isdecimal() or int(text) % 4 != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 more than a multiple of 4")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--policies", nargs="+", help="default: none (on a CPU), attn_only, attn_only(self)"
    )
    parser.add_argument("--backend", default="sdpa")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument(
        "--size", type=_size, help="HEIGHTxWIDTH in pixels; default: 512x512, on a GPU 720x1280"
    )
    parser.add_argument(
        "--frames",
        type=_frames,
        help="of the clip, 1 more than a multiple of 4; default: 13, on a GPU 77",
    )
    parser.add_argument(
        "--trained", default="lora", choices=("lora", "full"), help="an adapter, or all weights"
    )
    parser.add_argument(
        "--blocks", type=int, default=0, help="default: 2 on a CPU, all 30 on a GPU"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a look at whether everything runs: small and fast, and worth nothing",
    )
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    device = started_on(args.device)
    args.policies = args.policies or [
        *(["none"] if device.type == "cpu" else []),
        "attn_only",
        "attn_only(self)",
    ]
    for policy in args.policies:
        parse_schedule(policy)
    measure(args, device)


if __name__ == "__main__":
    main()
