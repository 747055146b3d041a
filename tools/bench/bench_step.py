"""Time one training step of ours against diffusers': same weights, inputs, adapter and
checkpointing, one process, interleaved.

    # the grid of the project's target, on this CPU
    uv run tools/bench/bench_step.py
    # the same for another family
    uv run tools/bench/bench_step.py --model flux2
    uv run tools/bench/bench_step.py --tokens 1024 --dtype bf16 --repeats 15
    # 4 blocks of Wan 14B's width, 20,280 tokens
    uv run tools/bench/bench_step.py --device cuda
    # 2 + 4 blocks of FLUX.2 dev's width, 512x512 and 1024x1024
    uv run tools/bench/bench_step.py --device cuda --model flux2
    # all blocks of a published model, twice in memory
    uv run tools/bench/bench_step.py --device cuda --model flux2 --preset klein-base-4b
    # next to other work: pairs of steps by processor time
    uv run tools/bench/bench_step.py --tokens 1024 --clock processor --repeats 15

A step is forward, loss, backward of a LoRA (Wan: q, k, v, o; FLUX.2: those of both streams, and
both layers of a single block; other families: every linear layer of the blocks); no optimizer,
which is the same for both. diffusers' LoRA is in fp32 as peft makes it, in bf16 also under autocast, which
is how training scripts run it: the products of the LoRA are in bf16 then. Prints medians, ratios
(on a CPU also of the least processor time, for a machine that is not quiet), peaks, and the floor:
the time our step spends inside matmuls and attention, below which nothing can
go without changing the arithmetic. A step for which memory is short gets a dash.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

import diffusers_models
from device_clock import (
    by_kind,
    interleaved,
    launches,
    mebibytes,
    milliseconds,
    peak_bytes,
    started_on,
    unless_out_of_memory,
)
from ditkit_core.engine.ac_schedule import parse_schedule
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision, parse_dtype
from ditkit_core.weights.quantize import compute_in_8_bits, linears_of_blocks, replace_layer

MATMULS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_dot_product",
    "aten::mkldnn_linear",
)
Predict = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Ours and diffusers' model with equal weights and adapters, each as a closure from fixed
    inputs to the prediction."""

    ours: nn.Module
    theirs: nn.Module
    predict: Callable[[BlockEngine], Tensor]
    their_predict: Predict
    target: Tensor
    shape: str


def wan_arch(args: argparse.Namespace) -> Any:
    """The published model's architecture, or that of a slice."""
    from ditkit_wan.presets import PRESETS, WanArch

    text = {"text_dim": 128, "text_tokens": 16} if args.tiny else {}
    if args.preset:
        return replace(
            PRESETS[args.preset],
            **(
                {"dim": args.width, "heads": args.width // 128, "layers": 1, **text}
                if args.tiny
                else {}
            ),
        )
    ffn_dim = {5120: 13824}.get(args.width, 4 * args.width)
    return WanArch(
        dim=args.width, ffn_dim=ffn_dim, heads=args.width // 128, layers=args.blocks, **text
    )


def wan_pair(args: argparse.Namespace, dtype: torch.dtype) -> Pair:
    """Wan blocks; the model's text is attended to across."""
    from ditkit_wan.model.inputs import WanInputs
    from ditkit_wan.model.transformer import WanTransformer
    from ditkit_wan.spec import WAN

    size, device, arch = WAN_SIZES[args.tokens], args.device, wan_arch(args)
    torch.manual_seed(0)
    with device, diffusers_models.default_dtype(dtype if args.preset else torch.float32):
        theirs = diffusers_models.wan(arch)
        ours = WanTransformer(arch, Precision(matmul=dtype))
    diffusers_models.share_weights(
        ours, theirs, WAN.architecture.names, WAN.precision.keep_fp32, dtype
    )
    diffusers_models.share_adapters(
        ours, theirs, WAN.architecture.names, ("q,k,v,o",), WAN.adapters.targets, args.rank
    )
    latents, target = torch.randn(2, 1, arch.out_channels, *size).to(device)
    text = torch.randn(1, arch.text_tokens, arch.text_dim).to(device, dtype)
    timestep = torch.tensor([731.25], device=device)
    return Pair(
        ours=ours.train(),
        theirs=theirs.train(),
        predict=lambda engine: torch.stack(
            ours(WanInputs(list(latents), timestep, list(text)), engine)
        ),
        # what its training scripts do: the model's dtype in, the prediction in fp32 for the loss
        their_predict=lambda: theirs(
            hidden_states=latents.to(dtype),
            timestep=timestep,
            encoder_hidden_states=text,
            return_dict=False,
        )[0],
        target=target,
        shape=f"blocks {arch.layers} tokens {args.tokens}",
    )


def flux2_arch(args: argparse.Namespace) -> Any:
    """The published model's architecture, or that of a slice."""
    from ditkit_flux2.presets import PRESETS, Flux2Arch

    text = {"text_tokens": 16} if args.tiny else {}
    slice_of_it = {
        "dim": args.width, "heads": args.width // 128, "double_layers": max(1, args.blocks // 2),
        "single_layers": args.blocks,
        "text_dim": 5 * args.width // 2, **text,
    }  # fmt: skip
    if args.preset:
        return replace(PRESETS[args.preset], **(slice_of_it if args.tiny else {}))
    return Flux2Arch(**slice_of_it, guidance=False)


def flux2_pair(args: argparse.Namespace, dtype: torch.dtype) -> Pair:
    """Half as many double as single blocks, or those of a published model; 512 rows of text next to
    the image's tokens."""
    from ditkit_flux2.model.inputs import Flux2Inputs
    from ditkit_flux2.model.rope import token_positions
    from ditkit_flux2.model.transformer import Flux2Transformer
    from ditkit_flux2.spec import FLUX2

    grid, device, arch = FLUX2_SIZES[args.tokens], args.device, flux2_arch(args)
    num_text = arch.text_tokens
    torch.manual_seed(0)
    with device, diffusers_models.default_dtype(dtype if args.preset else torch.float32):
        theirs = diffusers_models.flux2(arch)
        ours = Flux2Transformer(arch, Precision(matmul=dtype))
    diffusers_models.share_weights(
        ours, theirs, FLUX2.architecture.names, FLUX2.precision.keep_fp32, dtype
    )
    targets = ("img_attn.q", "img_attn.k", "img_attn.v", "img_attn.proj", "txt_attn.q",
        "txt_attn.k", "txt_attn.v", "txt_attn.proj",
               "linear1", "linear2")  # fmt: skip
    diffusers_models.share_adapters(
        ours, theirs, FLUX2.architecture.names, targets, FLUX2.adapters.targets, args.rank
    )
    latents, target = torch.randn(2, 1, 128, 1, *grid).to(device)
    text = torch.randn(1, num_text, arch.text_dim).to(device, dtype)
    sigma = torch.tensor([0.73125], device=device)
    guidance = torch.tensor([3.5], device=device) if arch.guidance else None
    positions = token_positions(num_text, grid, [], device)

    def their_predict() -> Tensor:
        rows = latents.flatten(2).transpose(1, 2).to(dtype)
        out = theirs(
            hidden_states=rows, encoder_hidden_states=text, timestep=sigma, guidance=guidance,
            img_ids=positions[num_text:],
            txt_ids=positions[:num_text], return_dict=False,
        )[0]  # fmt: skip
        return out.transpose(1, 2).unflatten(-1, (1, *grid))

    return Pair(
        ours=ours.train(),
        theirs=theirs.train(),
        predict=lambda engine: torch.stack(
            ours(Flux2Inputs(list(latents), sigma, guidance, list(text), [[]]), engine)
        ),
        their_predict=their_predict,
        target=target,
        shape=f"blocks {arch.double_layers}+{arch.single_layers} tokens {args.tokens}+{num_text}",
    )


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A family whose package runs diffusers' transformer on our inputs, and how it is cut."""

    spec: str
    text: int
    """Rows of the caption, as usual a caption has."""
    published: int
    """Width of the published model."""
    fields: Callable[[int, int], dict[str, Any]]
    """From width and blocks to fields of the architecture."""


def _heads(width: int, blocks: int) -> dict[str, int]:
    return {"dim": width, "heads": width // 128, "layers": blocks}


def _krea2_text(heads: int) -> dict[str, int]:
    return {
        "text_dim": 128 * heads, "text_heads": heads, "text_kv_heads": heads,
        "text_mlp_dim": 346 * heads, "layerwise_blocks": 1, "refiner_blocks": 1,
    }  # fmt: skip


SLICES = {
    "flux3": Slice(
        spec="ditkit_flux3.spec:FLUX3",
        text=160,
        published=3072,
        fields=lambda width, blocks: (
            _heads(width, blocks) | {"tower_layers": 1, "text_dim": 20 * width // 3}
        ),
    ),
    "krea2": Slice(
        spec="ditkit_krea2.spec:KREA2",
        text=75,
        published=6144,
        fields=lambda width, blocks: (
            _heads(width, blocks)
            | _krea2_text(max(1, width // 192))
            | {
                "kv_heads": max(1, width // 512),
                "mlp_dim": 8 * width // 3,
            }
        ),
    ),
    "ltx": Slice(
        spec="ditkit_ltx.spec:LTX",
        text=128,
        published=2048,
        fields=lambda width, blocks: _heads(width, blocks) | {"heads": width // 64},
    ),
    "qwen": Slice(spec="ditkit_qwen.spec:QWEN", text=75, published=4096, fields=_heads),
    "qwenimage": Slice(
        spec="ditkit_qwenimage.spec:QWENIMAGE", text=75, published=3072, fields=_heads
    ),
    "zimage": Slice(
        spec="ditkit_zimage.spec:ZIMAGE",
        text=75,
        published=3840,
        fields=lambda width, blocks: _heads(width, blocks) | {"refiner_layers": 1},
    ),
}


def sliced_pair(args: argparse.Namespace, dtype: torch.dtype) -> Pair:
    """A family of `SLICES`: image or clip next to a caption, without references."""
    family, device = SLICES[args.model], args.device
    spec = resolve_name(family.spec)
    theirs_of = resolve_name(f"{family.spec.partition('.')[0]}.verify:DIFFUSERS")
    arch = spec.architecture.presets[args.preset or next(iter(spec.architecture.presets))]
    if args.tiny or not args.preset:
        arch = replace(arch, **family.fields(args.width, args.blocks))
    torch.manual_seed(0)
    with device, diffusers_models.default_dtype(dtype if args.preset else torch.float32):
        ours = spec.architecture.build(arch, Precision(matmul=dtype))
        theirs = diffusers_models.made(theirs_of, arch)
    names = spec.architecture.names
    diffusers_models.share_weights(ours, theirs, names, spec.precision.keep_fp32, dtype)
    diffusers_models.share_adapters(
        ours, theirs, names, ("blocks",), spec.adapters.targets, args.rank
    )
    # Of one pixel, for the channels and what else an item has.
    empty = spec.training.empty_item(arch, (1, 64, 64), ())
    patch = 2 if args.model in ("krea2", "qwenimage", "zimage") else 1
    # a clip of four frames where an image has 32 and 64 pixels on a side
    frames = WAN_SIZES[args.tokens][0] if args.model == "ltx" else 1
    height, width = (side * patch // math.isqrt(frames) for side in FLUX2_SIZES[args.tokens])
    grid = (frames, height, width)
    channels, columns = len(empty["latents"]), empty["text"].shape[1]
    latents, target = torch.randn(2, channels, *grid).to(device)
    item = {"latents": latents, "text": torch.randn(family.text, columns).to(device, dtype)}
    if "seconds" in empty:
        item["seconds"] = torch.arange(frames, device=device) / 3
    sigma = torch.tensor([0.73125], device=device)
    inputs = spec.training.make_inputs([latents], sigma, [spec.training.assemble(item)], 1.0)
    return Pair(
        ours=ours.train(),
        theirs=theirs.train(),
        predict=lambda engine: ours(inputs, engine)[0],
        their_predict=lambda: theirs_of.run(theirs, inputs),
        target=target,
        shape=f"blocks {args.blocks} tokens {args.tokens}+{family.text}",
    )


PAIRS = {"wan": wan_pair, "flux2": flux2_pair} | dict.fromkeys(SLICES, sliced_pair)
WAN_SIZES = {
    64: (1, 16, 16),
    256: (1, 32, 32),
    1024: (4, 32, 32),
    4096: (4, 64, 64),
    20280: (13, 60, 104),
    75600: (21, 90, 160),
}
FLUX2_SIZES = {64: (8, 8), 256: (16, 16), 1024: (32, 32), 4096: (64, 64)}
"""Sizes of latents by their number of tokens."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A step of each model as a closure that returns the loss."""

    ours: Callable[[], Tensor]
    theirs: Callable[[], Tensor]
    autocast: Callable[[], Tensor]
    """diffusers' under autocast to the matmuls' dtype."""


def steps_of(
    args: argparse.Namespace, pair: Pair, dtype: torch.dtype, *, kernels: str = "torch"
) -> Steps:
    """The steps, ours with the kernels of `train.kernels`."""
    engine = BlockEngine(policy=args.checkpointing, kernels=kernels)
    if args.checkpointing != "none":
        pair.theirs.enable_gradient_checkpointing()

    def finish(model: nn.Module, predict: Predict) -> Tensor:
        try:
            loss = (predict().float() - pair.target).square().mean()
            loss.backward()
        finally:  # also where memory is short
            for parameter in model.parameters():
                parameter.grad = None
        return loss.detach()

    def autocast() -> Tensor:
        with torch.autocast(args.device.type, dtype):
            return pair.their_predict()

    return Steps(
        ours=lambda: finish(pair.ours, lambda: pair.predict(engine)),
        theirs=lambda: finish(pair.theirs, pair.their_predict),
        autocast=lambda: finish(pair.theirs, autocast),
    )


@contextmanager
def computed_in(model: Any, kind: str) -> Iterator[None]:
    """Inside the block the frozen matrices of a model's blocks are `int8` or `fp8`, and their codes
    are multiplied."""
    layers = {name: model.get_submodule(name) for name in linears_of_blocks(model)}
    # No adapter, and not kept in fp32.
    frozen = {
        n: x
        for n, x in layers.items()
        if not x.weight.requires_grad and x.weight.dtype == torch.bfloat16
    }
    for name, layer in frozen.items():
        replace_layer(model, name, kind)
        made = model.get_submodule(name)
        made.set_weight(layer.weight.float())
        made.bias = layer.bias
    compute_in_8_bits(model, kind)
    try:
        yield
    finally:
        for name, layer in frozen.items():
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, layer)


def floor_share(step: Callable[[], Tensor], device: torch.device) -> float:
    """Share of a step that is spent inside matmuls and attention."""
    if device.type == "cuda":
        _, taken = by_kind(launches(step, device))
        return (
            sum(taken[kind] for kind in taken if kind.startswith(("matmul", "attention")))
            / taken.total()
        )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    rows = profile.key_averages()
    total = sum(row.self_cpu_time_total for row in rows)
    return sum(row.self_cpu_time_total for row in rows if row.key.startswith(MATMULS)) / total


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one step; None where memory was short."""

    loss: float | None
    seconds: float | None = None
    peak: int | None = None
    processor: float | None = None
    """The least seconds of processor time, on a CPU: other programs, which a step waits for, do not
    count."""


def measured(
    steps: Mapping[str, Callable[[], Tensor]], repeats: int, device: torch.device
) -> dict[str, Row]:
    """Loss, median of interleaved times and peak of each step."""
    losses = {
        name: unless_out_of_memory(lambda step=step: float(step())) for name, step in steps.items()
    }
    alive = {name: steps[name] for name, loss in losses.items() if loss is not None}
    processor: dict[str, list[float]] = {name: [] for name in alive}

    def counted(name: str) -> None:
        began = time.process_time()
        alive[name]()
        processor[name].append(time.process_time() - began)

    counting = [partial(counted, name) for name in alive]
    times = dict(zip(alive, interleaved(counting, repeats, device), strict=True))
    peaks = {
        name: unless_out_of_memory(lambda step=step: peak_bytes(step, device))
        for name, step in alive.items()
    }
    return {
        name: Row(
            loss=loss,
            seconds=statistics.median(times[name]) if name in times else None,
            peak=peaks.get(name),
            processor=min(processor[name])
            if device.type == "cpu" and processor.get(name)
            else None,
        )
        for name, loss in losses.items()
    }


def in_pairs(steps: Steps, repeats: int) -> str:
    """Medians of both steps' processor time, and the median and quartiles of their ratio in pairs
    that follow each other. Which one is first alternates."""
    taken: dict[str, list[float]] = {"ours": [], "diffusers": []}
    order = [("ours", steps.ours), ("diffusers", steps.theirs)]
    for _, step in order:
        step()
    for _ in range(repeats):
        for name, step in order:
            began = time.process_time()
            step()
            taken[name].append(time.process_time() - began)
        order.reverse()
    ratios = torch.tensor(taken["ours"]) / torch.tensor(taken["diffusers"])
    low, middle, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    times = ", ".join(f"{name} {milliseconds(statistics.median(x))}" for name, x in taken.items())
    return f"{times} of processor time; ratio in pairs {middle:.3f} ({low:.3f} to {high:.3f})"


def ratio(row: Row, of: Row) -> str:
    """The ratio of two times; a dash where one is missing."""
    return "-" if row.seconds is None or of.seconds is None else f"{row.seconds / of.seconds:.3f}"


def measure(args: argparse.Namespace, dtype_name: str) -> None:
    """Measure one size in one dtype, and print it."""
    dtype = parse_dtype(dtype_name)
    pair = unless_out_of_memory(lambda: PAIRS[args.model](args, dtype))
    title = args.preset or f"{args.model} width {args.width}"
    shape = f"{title} {pair.shape if pair else f'tokens {args.tokens}'} {dtype_name} {args.checkpointing}"
    if pair is None:
        print(f"{shape}: out of memory", flush=True)
        return
    steps = steps_of(args, pair, dtype)
    if args.clock == "processor":
        print(f"{shape}: {in_pairs(steps, args.repeats)}", flush=True)
        return
    wanted = {"ours": steps.ours, "diffusers": steps.theirs}
    if dtype != torch.float32:
        wanted["diffusers in autocast"] = steps.autocast
    found = measured(wanted, args.repeats, args.device)
    ours, theirs = found["ours"], found["diffusers"]
    share = None if ours.seconds is None else floor_share(steps.ours, args.device)
    floor = (
        "-"
        if share is None or theirs.seconds is None or ours.seconds is None
        else f"{ours.seconds * share / theirs.seconds:.3f}"
    )
    times = ", ".join(f"{name} {milliseconds(row.seconds)}" for name, row in found.items())
    ratios = ", ".join(
        f"{ratio(ours, row)} of {name}" for name, row in found.items() if row is not ours
    )
    if ours.processor and theirs.processor:
        ratios += f", {ours.processor / theirs.processor:.3f} of its least processor time"
    peaks = ", ".join(f"{name} {mebibytes(row.peak)}" for name, row in found.items())
    losses = " / ".join("-" if row.loss is None else f"{row.loss:.5f}" for row in found.values())
    print(
        f"{shape}: {times}; ratio {ratios}, floor/diffusers {floor} (matmul+SDPA are "
        f"{'-' if share is None else f'{share:.0%}'} of ours); peak {peaks}; losses {losses}",
        flush=True,
    )


def check_preset(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with one line where the preset is none of the model, or has a size of its own."""
    specs = {"wan": "ditkit_wan.spec:WAN", "flux2": "ditkit_flux2.spec:FLUX2"}
    specs |= {name: family.spec for name, family in SLICES.items()}
    archs: Mapping[str, Any] = resolve_name(specs[args.model]).architecture.presets
    # Others have conditions, which a step here does not make.
    names = [
        name
        for name, arch in archs.items()
        if args.model != "wan" or (arch.in_channels == 16 and not arch.vace_layers)
    ]
    if args.preset not in names:
        parser.error(f"--preset {args.preset} is none of --model {args.model}: {', '.join(names)}")
    if args.width or args.blocks:
        parser.error(
            "--preset has a width and a number of blocks of its own: leave out --width and --blocks"
        )


def configured(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments, with what depends on the device filled in, and lists of all `sizes` and
    `dtypes`; `tokens` is the first size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(PAIRS), default="wan")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--tokens",
        type=int,
        choices=sorted(WAN_SIZES),
        help="of the image or clip; default: two sizes; on a GPU 20,280 for Wan",
    )
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="default: both; on a GPU bf16")
    parser.add_argument(
        "--width",
        type=int,
        help="default: 768; on a GPU the published one, of Wan 14B and FLUX.2 dev",
    )
    parser.add_argument(
        "--blocks",
        type=int,
        help="FLUX.2: single blocks, and half as many double blocks; default: 2; on a GPU 4",
    )
    parser.add_argument(
        "--preset",
        default="",
        help="a published model in place of width and blocks, such as klein-base-4b or t2v-1.3b",
    )
    parser.add_argument("--rank", type=int, help="default: 16; on a GPU 32")
    parser.add_argument(
        "--checkpointing",
        default="full",
        help="ours, as `train.checkpointing` has it; diffusers' is on unless this is none",
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--clock",
        default="wall",
        choices=("wall", "processor"),
        help="processor: of a CPU, in pairs, without autocast, peaks and floor; for a busy machine",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a look at whether everything runs: small and fast, and worth nothing",
    )
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    args.device = started_on(args.device)
    args.sizes = [args.tokens] if args.tokens else [1024, 4096]
    args.dtypes = [args.dtype] if args.dtype else ["fp32", "bf16"]
    usual = {"width": 768, "blocks": 2, "rank": 16}
    if args.tiny:
        args.sizes, usual, args.repeats = [64], {"width": 128, "blocks": 1, "rank": 4}, 1
    elif args.device.type == "cuda":
        if args.model == "wan" and not args.tokens:
            args.sizes = [20280]
        args.dtypes = [args.dtype or "bf16"]
        published = {name: family.published for name, family in SLICES.items()}
        usual = {
            "width": ({"wan": 5120, "flux2": 6144} | published)[args.model],
            "blocks": 4,
            "rank": 32,
        }
    try:
        parse_schedule(args.checkpointing)
    except UserError as error:
        parser.error(str(error))
    if args.clock == "processor" and args.device.type != "cpu":
        parser.error("--clock processor is for --device cpu: a GPU works on its own time")
    if args.preset:
        check_preset(parser, args)
    for name, value in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.tokens = args.sizes[0]
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = configured(arguments)
    where = (
        torch.cuda.get_device_name(args.device)
        if args.device.type == "cuda"
        else f"{args.threads} thread(s)"
    )
    print(
        f"torch {torch.__version__}, {where}, LoRA rank {args.rank}, {args.repeats} interleaved "
        f"repeats",
        flush=True,
    )
    for count in args.sizes:
        for dtype in args.dtypes:
            measure(argparse.Namespace(**{**vars(args), "tokens": count}), dtype)


if __name__ == "__main__":
    main()
