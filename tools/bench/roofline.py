"""Count what a training step does on a GPU, ours and diffusers', and model its time on five GPUs.
No GPU and no weights are needed.

    uv run tools/bench/roofline.py > benchmarks/roofline.md  # a minute on one core
    uv run tools/bench/roofline.py --only wan                # the cases whose name contains this

Both run on fake tensors, and a dispatch mode counts every operation (`planner/memory_tracker.py:
Meter`). The time of an operation is that of plans (`planner/kernel_time.py`).
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import target_modules
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import ModelSpec, build_on_meta
from ditkit_core.planner.gpus import GPU, parse_gpus
from ditkit_core.planner.kernel_time import ON_HOPPER, REACHED, kernel_seconds
from ditkit_core.planner.memory_tracker import Kernel, Meter, fake_tensors
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.planner.profiler import measure
from ditkit_core.planner.reduced_model import give_memory, reduced_model
from ditkit_flux2.presets import PRESETS as FLUX2_PRESETS
from ditkit_flux2.spec import FLUX2
from ditkit_wan.presets import PRESETS as WAN_PRESETS
from ditkit_wan.spec import WAN
from step_jobs import step_job

GPUS = parse_gpus("h100,h200,rtx5090,rtx4090,rtx3090")
DEVICE = torch.device("cpu:1")
"""Under fake tensors another device than the host."""
RANK = 32

Kernels = Counter[Kernel]


@dataclass(frozen=True, kw_only=True)
class Step:
    """The kernels of a step: those of a block, by its kind, and of all else (embedding, head,
    loss)."""

    blocks: Mapping[str, tuple[int, Kernels]]
    """How many blocks of a kind there are, and what one of them runs, forward, recompute and
    backward."""
    rest: Kernels

    def seconds(self, gpu: GPU) -> float:
        """Modelled time of forward and backward."""
        blocks = sum(count * seconds_of(kernels, gpu) for count, kernels in self.blocks.values())
        return blocks + seconds_of(self.rest, gpu)

    @property
    def launches(self) -> int:
        """Operations of a step."""
        return (
            sum(count * kernels.total() for count, kernels in self.blocks.values())
            + self.rest.total()
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A model and the size of one sample."""

    name: str
    spec: ModelSpec
    arch: Any
    size: tuple[int, int, int]
    kinds: Mapping[str, tuple[str, str]]
    """Our class of a block, by its title: that of diffusers, and the argument of diffusers' model
    that counts its blocks."""


CASES = (
    Case(
        name="Wan 14B, 49 frames of 480x832 (20,280 tokens)",
        spec=WAN,
        arch=WAN_PRESETS["t2v-14b"],
        size=(49, 480, 832),
        kinds={"block": ("WanBlock", "num_layers")},
    ),
    *(
        Case(
            name=f"FLUX.2 {name}, {side}x{side} ({(side // 16) ** 2:,} tokens and 512 of text)",
            spec=FLUX2,
            arch=FLUX2_PRESETS[preset],
            size=(1, side, side),
            kinds={
                "double block": ("Flux2DoubleBlock", "num_layers"),
                "single block": ("Flux2SingleBlock", "num_single_layers"),
            },
        )
        for name, preset, side in (
            ("dev", "dev", 512),
            ("dev", "dev", 1024),
            ("klein 4B", "klein-base-4b", 512),
            ("klein 4B", "klein-base-4b", 1024),
        )
    ),
)


def job_of(case: Case, *, kernels: str = "torch", base: str = "dtype") -> StepJob:
    """Our step of a case."""
    quantize = "none" if base == "dtype" else base
    return step_job(
        case.spec,
        case.arch,
        case.size,
        rank=RANK,
        policy="full",
        kernels=kernels,
        quantize=quantize,
        compute=base,
    )


def ours(case: Case, *, kernels: str = "torch", base: str = "dtype") -> Step:
    """The step that `train` runs, by the planner's profiler; `base` is `base.compute`."""
    job = job_of(case, kernels=kernels, base=base)
    model = reduced_model(job)
    found = measure(job, model, [0] * len(model.stages()), updates=False)
    names = [type(block).__name__ for block in model.blocks()]
    every = [type(block).__name__ for block in model.full_model.blocks()]
    head = len(names) + 1

    def stage(index: int) -> Kernels:
        back = found.backward.get(index)
        return found.forward[index].kernels + (Counter() if back is None else back.kernels)

    # The second of a kind: the backward of the first block of all lacks the gradient of its input.
    blocks = {
        title: (every.count(name), stage(2 + names.index(name)))
        for title, (name, _) in case.kinds.items()
    }
    return Step(blocks=blocks, rest=stage(0) + stage(head) + found.forward[head + 1].kernels)


def theirs(case: Case, *, autocast: bool, checkpointing: bool = True) -> Step:
    """diffusers' step with adapters on the same layers, without autocast or under autocast to bf16,
    as its training scripts run it."""
    arguments = [argument for _, argument in case.kinds.values()]
    base = dict.fromkeys(arguments, 1)
    one = their_kernels(case, base, autocast=autocast, checkpointing=checkpointing)
    blocks = {}
    for title, (name, argument) in case.kinds.items():
        # What a second block of the kind adds.
        more = their_kernels(
            case, base | {argument: 2}, autocast=autocast, checkpointing=checkpointing
        )
        blocks[title] = outline(case)[0][name], more - one
    rest = one
    for _, kernels in blocks.values():
        rest = rest - kernels
    return Step(blocks=blocks, rest=rest)


def their_kernels(
    case: Case, num_blocks: Mapping[str, int], *, autocast: bool, checkpointing: bool
) -> Kernels:
    """The kernels of a step of diffusers' model with so many blocks."""
    with torch.device("meta"):
        model, inputs = MODELS[case.spec.name](case, num_blocks)
    model.requires_grad_(False)
    _inject_there(case, model)
    if checkpointing:
        model.enable_gradient_checkpointing()
    keep = model._keep_in_fp32_modules or ()

    def dtype_of(owner: nn.Module, prefix: str, leaf: str, own: nn.Parameter) -> torch.dtype:
        is_wide = own.requires_grad or any(part in keep for part in (*prefix.split("."), leaf))
        return torch.float32 if is_wide else torch.bfloat16

    with fake_tensors("cuda") as meter:
        fuse_norms(model, meter)
        give_memory(model.train(), DEVICE, dtype_of=dtype_of)
        given = {
            name: torch.empty(x.shape, dtype=x.dtype, device=DEVICE) if isinstance(x, Tensor) else x
            for name, x in inputs.items()
        }
        meter.kernels = Counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            prediction = model(**given, return_dict=False)[0]
        target = torch.empty_like(prediction, dtype=torch.float32)
        (prediction.float() - target).square().mean().backward()
        return meter.kernels


def _inject_there(case: Case, model: nn.Module) -> None:
    """LoRA on the layers that ours has by default; those of blocks that this smaller model lacks
    are left out."""
    from peft import LoraConfig, inject_adapter_in_model

    present = {name for name, _ in model.named_modules()} & outline(case)[1]
    inject_adapter_in_model(
        LoraConfig(r=RANK, lora_alpha=RANK, target_modules=sorted(present)), model
    )


@cache
def outline(case: Case) -> tuple[Counter[str], frozenset[str]]:
    """Our model's number of blocks by class, and diffusers' names of the layers that it adapts by
    default."""
    own = build_on_meta(case.spec, case.arch, Precision())
    names = case.spec.architecture.names.from_native["diffusers"]
    adapted = target_modules(own, AdapterConfig().targets, case.spec.adapters.targets)
    mirrors = frozenset(names(f"{name}.weight")[0].name.removesuffix(".weight") for name in adapted)
    return Counter(type(block).__name__ for block in own.blocks()), mirrors


def _wan(case: Case, num_blocks: Mapping[str, int]) -> tuple[nn.Module, dict[str, Any]]:
    from diffusers import WanTransformer3DModel

    arch, (frames, height, width) = case.arch, case.size
    model = WanTransformer3DModel(
        num_attention_heads=arch.heads,
        attention_head_dim=arch.head_dim,
        ffn_dim=arch.ffn_dim,
        **num_blocks,
    )
    return model, {
        "hidden_states": torch.empty(
            1, 16, (frames - 1) // 4 + 1, height // 8, width // 8, dtype=torch.bfloat16
        ),
        "timestep": torch.empty(1),
        "encoder_hidden_states": torch.empty(1, 512, 4096, dtype=torch.bfloat16),
    }


def _flux2(case: Case, num_blocks: Mapping[str, int]) -> tuple[nn.Module, dict[str, Any]]:
    from diffusers import Flux2Transformer2DModel

    tokens, arch = case.size[1] * case.size[2] // 256, case.arch
    model = Flux2Transformer2DModel(
        num_attention_heads=arch.heads,
        joint_attention_dim=arch.text_dim,
        guidance_embeds=arch.guidance,
        **num_blocks,
    )
    return model, {
        "hidden_states": torch.empty(1, tokens, 128, dtype=torch.bfloat16),
        "encoder_hidden_states": torch.empty(1, 512, arch.text_dim, dtype=torch.bfloat16),
        "timestep": torch.empty(1),
        "guidance": torch.empty(1) if arch.guidance else None,
        "img_ids": torch.empty(tokens, 4),
        "txt_ids": torch.empty(512, 4),
    }


MODELS: dict[str, Callable[[Case, Mapping[str, int]], tuple[nn.Module, dict[str, Any]]]] = {
    WAN.name: _wan,
    FLUX2.name: _flux2,
}


class FusedNorm(nn.Module):
    """An RMS norm as CUDA has it: one kernel forward and one backward. On fake devices, which are
    CPUs, torch composes it."""

    def __init__(self, meter: Meter):
        super().__init__()
        self.meter = meter

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _FusedNorm.apply(x, self.meter)
        return made


def fuse_norms(model: nn.Module, meter: Meter) -> None:
    """Replace the RMS norms of a model."""
    for owner in list(model.modules()):
        for name, child in owner.named_children():
            if isinstance(child, nn.RMSNorm):
                setattr(owner, name, FusedNorm(meter))


class _FusedNorm(torch.autograd.Function):
    """An RMS norm with a frozen weight, as memory traffic only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, meter: Meter) -> Tensor:
        ctx.save_for_backward(x)
        ctx.meter = meter
        meter.kernels[Kernel("elementwise", 0, 2 * x.nbytes)] += 1
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.meter.kernels[Kernel("elementwise", 0, 2 * x.nbytes + gradient.nbytes)] += 1
        return torch.empty_like(x), None


def seconds_of(kernels: Kernels, gpu: GPU, *kinds: str) -> float:
    """Modelled time of kernels, of some kinds only if any are named."""
    return sum(
        count * kernel_seconds(k, gpu)
        for k, count in kernels.items()
        if not kinds or k.kind in kinds
    )


def block_row(label: str, kernels: Kernels) -> list[str]:
    """A block on the first GPU."""
    gpu, cells = GPUS[0], [label]
    for kinds in (
        ("matmul_16",),
        ("matmul_int8", "matmul_fp8", "matmul_int8_scaled", "matmul_fp8_scaled"),
        ("attention", "attention_backward"),
        ("matmul_32",),
        ("elementwise", "fused", "conversion", "scales"),
    ):
        chosen = {k: count for k, count in kernels.items() if k.kind in kinds}
        amount = (
            f"{sum(k.bytes * count for k, count in chosen.items()) / 1e9:.1f} GB"
            if "elementwise" in kinds
            else f"{sum(k.flops * count for k, count in chosen.items()) / 1e12:.2f} TFLOP"
        )
        cells.append(f"{seconds_of(kernels, gpu, *kinds) * 1e3:.1f} ({amount})")
    return [*cells, f"{seconds_of(kernels, gpu) * 1e3:.1f}", f"{kernels.total()}"]


def step_row(label: str, step: Step, peer: Step) -> list[str]:
    """A step on every GPU that has its products, and how many times as fast as the peer's it is on
    each."""
    kinds = {kernel.kind for _, kernels in step.blocks.values() for kernel in kernels}
    times = [
        "-"
        if any(kind.startswith("matmul_fp8") for kind in kinds) and not gpu.fp8_flops
        else f"{step.seconds(gpu):.3g} s ({peer.seconds(gpu) / step.seconds(gpu):.2f})"
        for gpu in GPUS
    ]
    return [label, *times, f"{step.launches:,}"]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table in Markdown."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


OURS = "ours (kernels = triton, the default on GPUs)"


def page(case: Case) -> Iterator[str]:
    """The section of a case."""
    steps = {
        OURS: ours(case, kernels="triton"),
        "ours, kernels = torch": ours(case),
        **{
            f"ours, {base} computed, kernels = {kernels}": ours(case, kernels=kernels, base=base)
            for base in ("int8", "fp8")
            for kernels in ("triton", "torch")
        },
        "diffusers, LoRA in fp32": theirs(case, autocast=False),
        "diffusers, bf16 autocast": theirs(case, autocast=True),
    }
    peer = steps["diffusers, bf16 autocast"]
    yield f"\n## {case.name}\n"
    for title in case.kinds:
        yield from table(
            [
                f"one {title}, ms on {GPUS[0].name}",
                "bf16 matmul",
                "8-bit matmul",
                "attention",
                "fp32 matmul",
                "elementwise",
                "sum",
                "launches",
            ],
            [block_row(label, step.blocks[title][1]) for label, step in steps.items()],
        )
        yield ""
    yield from table(
        [
            "step (times as fast as diffusers under autocast)",
            *(gpu.name for gpu in GPUS),
            "launches",
        ],
        [step_row(label, step, peer) for label, step in steps.items()],
    )


HEAD = f"""# One training step on a GPU, counted

`uv run tools/bench/roofline.py > benchmarks/roofline.md`. **Counted and modelled on a CPU.** The shares of the model are those that one H100 reached,
where its times were compared with measured ones ([page](time_truth.md)); nothing here ran on the other GPUs.

A step is forward, loss and backward of a LoRA of rank {RANK} on the default targets, one sample, base in bf16, checkpointing `full`, eager;
without the optimizer, which is the same for all. *ours* runs in the default precision; *kernels* is `train.kernels`. Its `auto` takes
`triton` on GPUs where the kernels pass a check as a run starts: norms, rotations, gated units and parts of LoRA factors then pass over memory once. diffusers {{diffusers}} with peft {{peft}} has the same
layers adapted, once without autocast (adapters and their products in fp32), once under `torch.autocast` to bf16, as its training scripts
run. *computed* is `base.compute`, products of the frozen base in 8 bits; `-` is a GPU that has none
of that format. Assumptions:

- An operation reads each input and writes each result once, and is one launch. It takes as long as its arithmetic or its memory traffic,
  whichever is longer, and a moment to start; nothing overlaps, and the GPU never waits for the host, as when a step is replayed. Interleaved
  halves (diffusers' rotation) count as if they were dense.
- RMS norm, layer norm and attention are one fused kernel each way for both, as CUDA has them.
- Shares of the published rates (`planner/gpus.py`) that kernels reach: {", ".join(f"{kind} {reach.arithmetic:g}" for kind, reach in REACHED.items() if reach.arithmetic and not kind.endswith("_scaled"))}; on Hopper with
  scales {ON_HOPPER["matmul_int8_scaled"].arithmetic:g} of both 8-bit rates,
  of the memory's {REACHED["elementwise"].memory:g} to {REACHED["fused"].memory:g}, for matmuls {REACHED["matmul_16"].memory:g}. Consumer GPUs reach more of theirs in attention. The same shares hold for both sides.
- Memory is not looked at: FLUX.2 dev fits on none of the smaller GPUs as it is."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    wanted = parser.parse_args().only.lower()
    import diffusers
    import peft

    print(HEAD.format(diffusers=diffusers.__version__, peft=peft.__version__))
    for case in CASES:
        if wanted in case.name.lower():
            print("\n".join(page(case)), flush=True)


if __name__ == "__main__":
    main()
