"""Time one training step of ours against diffusers': same weights, inputs, adapter and checkpointing, one process, interleaved.

    uv run tools/bench_step.py                                   # the grid that the project holds itself to, on this CPU
    uv run tools/bench_step.py --tokens 1024 --dtype bf16 --repeats 15

A step is forward, loss, backward of a LoRA on q, k, v, o; no optimizer, which is the same for both. Prints both medians, the
ratio, both peaks, and the floor: the time our step spends inside matmuls and attention, below which nothing can go
without changing the arithmetic.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ditkit_core.activation_checkpoint import Engine
from ditkit_core.adapters import AdapterConfig, initialise, inject
from ditkit_core.precision import Precision, parse_dtype
from ditkit_wan.model import WanInputs, WanTransformer
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN
from ditkit_wan.state_dict import NAMES

MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product", "aten::mkldnn_linear")
GRIDS = {1024: (4, 32, 32), 4096: (4, 64, 64), 256: (1, 32, 32)}
"""Latent sizes (frames, height, width) whose patches give that many tokens."""


def build(width: int, blocks: int, rank: int, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Ours and diffusers' with the same weights and the same adapters."""
    from diffusers import WanTransformer3DModel
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    heads = width // 128
    theirs = WanTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=128, ffn_dim=4 * width, num_layers=blocks
    ).requires_grad_(False)  # fmt: skip
    for name, parameter in theirs.named_parameters():
        if not any(part in theirs._keep_in_fp32_modules for part in name.split(".")):
            parameter.data = parameter.data.to(dtype)
    state = {NAMES.to_native(name): tensor for name, tensor in theirs.state_dict().items()}
    ours = WanTransformer(WanArch(dim=width, ffn_dim=4 * width, heads=heads, layers=blocks), Precision(matmul=dtype))
    for name, parameter in ours.named_parameters():
        parameter.data = state[name].float() if WAN.keep_fp32(name) else state[name].clone()
    inject(ours, AdapterConfig(rank=rank, targets=("q,k,v,o",)), WAN.adapter_targets)
    initialise(ours, 0, device_of=lambda module: torch.device("cpu"))
    inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=rank, target_modules=r".*attn[12]\.(to_[qkv]|to_out\.0)"), theirs
    )
    for name, module in theirs.named_modules():
        if name.endswith(("to_q", "to_k", "to_v", "to_out.0")):
            native = NAMES.to_native(f"{name}.weight")
            mirror = ours.get_submodule(native.removesuffix(".weight"))
            for part in ("lora_A", "lora_B"):
                weight = getattr(module, part)["default"].weight
                weight.data = 0.02 * torch.randn(weight.shape)  # fp32 over any base, on both sides
                getattr(mirror, part)["default"].weight.data = weight.data.clone()
    return ours.train(), theirs.train()


def steps(args: argparse.Namespace, dtype: torch.dtype) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Our step and diffusers' step as closures that return the loss."""
    ours, theirs = build(args.width, args.blocks, args.rank, dtype)
    frames, height, width = GRIDS[args.tokens]
    latents, target = torch.randn(2, 1, 16, frames, height, width)
    text = torch.randn(1, 512, 4096).to(dtype)
    timestep = torch.tensor([731.25])
    engine = Engine(policy=args.checkpointing)
    if args.checkpointing != "none":
        theirs.enable_gradient_checkpointing()

    def finish(model: torch.nn.Module, prediction: Tensor) -> Tensor:
        loss = (prediction.float() - target).square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach()

    def our_step() -> Tensor:
        return finish(ours, torch.stack(ours(WanInputs(list(latents), timestep, list(text)), engine)))

    def their_step() -> Tensor:
        # what its training scripts do: the model's dtype in, the prediction in fp32 for the loss
        out = theirs(hidden_states=latents.to(dtype), timestep=timestep, encoder_hidden_states=text, return_dict=False)
        return finish(theirs, out[0])

    return our_step, their_step


def seconds(step: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def floor_share(step: Callable[[], Tensor]) -> float:
    """Share of a step that is spent inside matmuls and attention."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    rows = profile.key_averages()
    total = sum(row.self_cpu_time_total for row in rows)
    return sum(row.self_cpu_time_total for row in rows if row.key.startswith(MATMULS)) / total


def live_peak(step: Callable[[], Tensor]) -> int:
    """Most bytes that tensors of one step held at once, from the profiler's allocation events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def measure(args: argparse.Namespace, dtype_name: str) -> None:
    our_step, their_step = steps(args, parse_dtype(dtype_name))
    losses = [float(step()) for step in (our_step, their_step)]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(args.repeats):
        for step, taken in zip((our_step, their_step), times, strict=True):
            taken.append(seconds(step))
    mine, them = (statistics.median(taken) for taken in times)
    share = floor_share(our_step)
    print(
        f"wan width {args.width} blocks {args.blocks} tokens {args.tokens} {dtype_name} {args.checkpointing}: "
        f"ours {mine * 1e3:.0f} ms, diffusers {them * 1e3:.0f} ms, ratio {mine / them:.3f}, floor/diffusers {mine * share / them:.3f} "
        f"(matmul+SDPA are {share:.0%} of ours); peak ours {live_peak(our_step) / 2**20:.0f} MiB, "
        f"diffusers {live_peak(their_step) / 2**20:.0f} MiB; losses {losses[0]:.5f} / {losses[1]:.5f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, choices=sorted(GRIDS), help="default: 1024 and 4096")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="default: both")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--checkpointing", default="full", choices=("none", "full"))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, {args.threads} thread(s), LoRA rank {args.rank} on q,k,v,o, {args.repeats} interleaved repeats"
    )
    for tokens in [args.tokens] if args.tokens else [1024, 4096]:
        for dtype in [args.dtype] if args.dtype else ["fp32", "bf16"]:
            measure(argparse.Namespace(**{**vars(args), "tokens": tokens}), dtype)


if __name__ == "__main__":
    main()
