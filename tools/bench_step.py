"""Time one training step of ours against diffusers': same weights, inputs, adapter and checkpointing, one process, interleaved.

    uv run tools/bench_step.py                                   # the grid of the project's target, on this CPU
    uv run tools/bench_step.py --model flux2                     # the same for FLUX.2
    uv run tools/bench_step.py --tokens 1024 --dtype bf16 --repeats 15
    uv run tools/bench_step.py --tokens 1024 --compile           # both compiled, too, each as its users would: block by block

A step is forward, loss, backward of a LoRA (Wan: q, k, v, o; FLUX.2: those of both streams, and both layers of a single block); no
optimizer, which is the same for both. Prints both medians, the ratio, both peaks, and the floor: the time our step spends inside matmuls
and attention, below which nothing can go without changing the arithmetic.
"""

import argparse
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import initialise, inject
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.models.precision import Precision, parse_dtype
from ditkit_core.models.state_dict import StateDictNames

MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product", "aten::mkldnn_linear")
Predict = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Ours and diffusers' model with equal weights and adapters, each as a closure from fixed inputs to the prediction."""

    ours: nn.Module
    theirs: nn.Module
    predict: Callable[[BlockEngine], Tensor]
    their_predict: Predict
    target: Tensor
    shape: str


def wan_pair(args: argparse.Namespace, dtype: torch.dtype) -> Pair:
    """Wan blocks; the model's text is attended to across."""
    from diffusers import WanTransformer3DModel

    from ditkit_wan.model.transformer import WanInputs, WanTransformer
    from ditkit_wan.presets import WanArch
    from ditkit_wan.spec import WAN

    size = {256: (1, 32, 32), 1024: (4, 32, 32), 4096: (4, 64, 64)}[args.tokens]
    torch.manual_seed(0)
    heads = args.width // 128
    theirs = WanTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=128, ffn_dim=4 * args.width, num_layers=args.blocks
    )
    arch = WanArch(dim=args.width, ffn_dim=4 * args.width, heads=heads, layers=args.blocks)
    ours = WanTransformer(arch, Precision(matmul=dtype))
    share_weights(ours, theirs, WAN.architecture.names, WAN.precision.keep_fp32, dtype)
    share_adapters(ours, theirs, WAN.architecture.names, ("q,k,v,o",), WAN.adapters.targets, args.rank)
    latents, target = torch.randn(2, 1, 16, *size)
    text, timestep = torch.randn(1, 512, 4096).to(dtype), torch.tensor([731.25])
    return Pair(
        ours=ours.train(),
        theirs=theirs.train(),
        predict=lambda engine: torch.stack(ours(WanInputs(list(latents), timestep, list(text)), engine)),
        # what its training scripts do: the model's dtype in, the prediction in fp32 for the loss
        their_predict=lambda: theirs(
            hidden_states=latents.to(dtype), timestep=timestep, encoder_hidden_states=text, return_dict=False
        )[0],
        target=target,
        shape=f"blocks {args.blocks} tokens {args.tokens}",
    )


def flux2_pair(args: argparse.Namespace, dtype: torch.dtype) -> Pair:
    """Half as many double as single blocks; 512 rows of text next to the image's tokens."""
    from diffusers import Flux2Transformer2DModel

    from ditkit_flux2.model.inputs import Flux2Inputs
    from ditkit_flux2.model.rope import token_positions
    from ditkit_flux2.model.transformer import Flux2Transformer
    from ditkit_flux2.presets import Flux2Arch
    from ditkit_flux2.spec import FLUX2

    grid = {256: (16, 16), 1024: (32, 32), 4096: (64, 64)}[args.tokens]
    torch.manual_seed(0)
    heads, text_dim = args.width // 128, 5 * args.width // 2
    theirs = Flux2Transformer2DModel(
        num_layers=max(1, args.blocks // 2), num_single_layers=args.blocks, num_attention_heads=heads,
        joint_attention_dim=text_dim, guidance_embeds=False,
    )  # fmt: skip
    arch = Flux2Arch(
        dim=args.width, heads=heads, double_layers=max(1, args.blocks // 2), single_layers=args.blocks, text_dim=text_dim,
        guidance=False,
    )  # fmt: skip
    ours = Flux2Transformer(arch, Precision(matmul=dtype))
    share_weights(ours, theirs, FLUX2.architecture.names, FLUX2.precision.keep_fp32, dtype)
    targets = ("img_attn.q", "img_attn.k", "img_attn.v", "img_attn.proj", "txt_attn.q", "txt_attn.k", "txt_attn.v", "txt_attn.proj",
               "linear1", "linear2")  # fmt: skip
    share_adapters(ours, theirs, FLUX2.architecture.names, targets, FLUX2.adapters.targets, args.rank)
    latents, target = torch.randn(2, 1, 128, 1, *grid)
    text, sigma = torch.randn(1, 512, text_dim).to(dtype), torch.tensor([0.73125])
    positions = token_positions(512, grid, [], torch.device("cpu"))

    def their_predict() -> Tensor:
        rows = latents.flatten(2).transpose(1, 2).to(dtype)
        out = theirs(
            hidden_states=rows, encoder_hidden_states=text, timestep=sigma, guidance=None, img_ids=positions[512:],
            txt_ids=positions[:512], return_dict=False,
        )[0]  # fmt: skip
        return out.transpose(1, 2).unflatten(-1, (1, *grid))

    return Pair(
        ours=ours.train(),
        theirs=theirs.train(),
        predict=lambda engine: torch.stack(ours(Flux2Inputs(list(latents), sigma, None, list(text), [[]]), engine)),
        their_predict=their_predict,
        target=target,
        shape=f"blocks {arch.double_layers}+{arch.single_layers} tokens {args.tokens}+512",
    )


PAIRS = {"wan": wan_pair, "flux2": flux2_pair}


def share_weights(
    ours: nn.Module, theirs: nn.Module, names: StateDictNames, keep_fp32: Callable[[str], bool], dtype: torch.dtype
) -> None:
    """Give both the same values in the dtypes that each is trained in."""
    theirs.requires_grad_(False)
    keep = theirs._keep_in_fp32_modules or ()
    for name, parameter in theirs.named_parameters():
        if not any(part in keep for part in name.split(".")):
            parameter.data = parameter.data.to(dtype)
    pieces: dict[str, dict[int, Tensor]] = {}
    for name, tensor in theirs.state_dict().items():
        parts = names.to_native(name) or ()
        for part, rows in zip(parts, tensor.chunk(len(parts)), strict=True):
            pieces.setdefault(part.name, {})[part.index] = rows
    for name, parameter in ours.named_parameters():
        value = torch.cat([rows for _, rows in sorted(pieces[name].items())])
        parameter.data = value.float() if keep_fp32(name) else value.to(dtype)


def share_adapters(
    ours: nn.Module, theirs: nn.Module, names: StateDictNames, targets: tuple[str, ...],
    named_sets: Mapping[str, tuple[str, ...]], rank: int,
) -> None:  # fmt: skip
    """The same LoRA on the same layers, fp32 over any base."""
    from peft import LoraConfig, inject_adapter_in_model

    mirrors = {}
    for name in inject(ours, AdapterConfig(rank=rank, targets=targets), named_sets):
        (part,) = names.from_native["diffusers"](f"{name}.weight")
        mirrors[name] = part.name.removesuffix(".weight")
    initialise(ours, 0, device_of=lambda module: torch.device("cpu"))
    pattern = "|".join(map(re.escape, mirrors.values()))
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=pattern), theirs)
    for name, mirror in mirrors.items():
        for half in ("lora_A", "lora_B"):
            weight = ours.get_submodule(f"{name}.{half}.default").weight
            weight.data = 0.02 * torch.randn(weight.shape)
            theirs.get_submodule(f"{mirror}.{half}.default").weight.data = weight.data.clone()


def steps(
    args: argparse.Namespace, pair: Pair, *, compile: bool = False
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Our step, compiled or not, and diffusers' step as closures that return the loss."""
    engine = BlockEngine(policy=args.checkpointing, compile=compile)
    if args.checkpointing != "none":
        pair.theirs.enable_gradient_checkpointing()

    def finish(model: nn.Module, prediction: Tensor) -> Tensor:
        loss = (prediction.float() - pair.target).square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach()

    return lambda: finish(pair.ours, pair.predict(engine)), lambda: finish(pair.theirs, pair.their_predict())


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
    pair = PAIRS[args.model](args, parse_dtype(dtype_name))
    our_step, their_step = steps(args, pair)
    losses = [float(step()) for step in (our_step, their_step)]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(args.repeats):
        for step, taken in zip((our_step, their_step), times, strict=True):
            taken.append(seconds(step))
    mine, them = (statistics.median(taken) for taken in times)
    share = floor_share(our_step)
    print(
        f"{args.model} width {args.width} {pair.shape} {dtype_name} {args.checkpointing}: "
        f"ours {mine * 1e3:.0f} ms, diffusers {them * 1e3:.0f} ms, ratio {mine / them:.3f}, floor/diffusers {mine * share / them:.3f} "
        f"(matmul+SDPA are {share:.0%} of ours); peak ours {live_peak(our_step) / 2**20:.0f} MiB, "
        f"diffusers {live_peak(their_step) / 2**20:.0f} MiB; losses {losses[0]:.5f} / {losses[1]:.5f}",
        flush=True,
    )
    if args.compile:
        measure_compiled(args, pair, (our_step, their_step))


def measure_compiled(args: argparse.Namespace, pair: Pair, eager: tuple[Callable[[], Tensor], ...]) -> None:
    """Both compiled, and both eager. diffusers' blocks stay compiled afterwards, so the eager steps are timed with the compiler told to
    stand aside."""
    our_compiled, their_compiled = steps(args, pair, compile=True)
    pair.theirs.compile_repeated_blocks()

    def aside(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.compiler.set_stance("force_eager"):
                return step()

        return run

    every = (our_compiled, their_compiled, *map(aside, eager))
    losses = [float(step()) for step in every]
    for step in every[:2]:
        step()  # a second look at sizes and gradients may compile again
    times: tuple[list[float], ...] = tuple([] for _ in every)
    for _ in range(args.repeats):
        for step, taken in zip(every, times, strict=True):
            taken.append(seconds(step))
    ours, theirs, ours_eager, theirs_eager = (statistics.median(taken) for taken in times)
    print(
        f"  compiled: ours {ours * 1e3:.0f} ms, diffusers {theirs * 1e3:.0f} ms; ratios eager/eager {ours_eager / theirs_eager:.3f}, "
        f"compiled/eager {ours / theirs_eager:.3f}, compiled/compiled {ours / theirs:.3f}; losses {losses[0]:.5f} / {losses[1]:.5f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(PAIRS), default="wan")
    parser.add_argument(
        "--tokens", type=int, choices=(256, 1024, 4096), help="of the image or clip; default: 1024 and 4096"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="default: both")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--blocks", type=int, default=2, help="FLUX.2: single blocks, and half as many double blocks")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--checkpointing", default="full", choices=("none", "full"))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--compile", action="store_true", help="time both compiled, too")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, {args.threads} thread(s), LoRA rank {args.rank}, {args.repeats} interleaved repeats"
    )
    for tokens in [args.tokens] if args.tokens else [1024, 4096]:
        for dtype in [args.dtype] if args.dtype else ["fp32", "bf16"]:
            measure(argparse.Namespace(**{**vars(args), "tokens": tokens}), dtype)


if __name__ == "__main__":
    main()
