"""Compare plans with memory figures that others have published.

    uv run tools/plan_published.py > benchmarks/plan_published.md

Nobody publishes everything that a plan depends on. The rest is assumed, and a note says so; nothing is tuned to meet a figure.
No GPU and no weights: every profile is a step on fake tensors.
"""

import datetime
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.memory import Budget, DevicePlan, Partition, Profile, StageCost, compose
from ditkit_core.planner.planned_step import StepJob as Job
from ditkit_core.planner.profiler import profile
from ditkit_core.run.prepare import build_on_meta
from ditkit_core.testing.specs import altered
from ditkit_core.training.config import EMAConfig, FlowConfig
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_flux2.presets import PRESETS as FLUX2_PRESETS
from ditkit_flux2.spec import FLUX2
from ditkit_wan.model.transformer import WanInputs
from ditkit_wan.presets import PRESETS as WAN_PRESETS
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN

GB, GIB, MIB = 10**9, 2**30, 2**20

TI2V_5B = WanArch(dim=3072, ffn_dim=14336, heads=24, layers=30, in_channels=48, out_channels=48)
"""Wan 2.2 TI2V-5B, which has no preset here; its VAE makes one latent pixel of 16 × 16."""
I2V_A14B = WAN_PRESETS["i2v-a14b"]
"""An expert of Wan 2.2 I2V-A14B: its inputs have 16 noised channels and 20 of the image and its mask."""

RANKS = 8
"""GPUs that the 5B runs are assumed to share weights, gradients and optimizer over."""
GATHERED = 2
"""Blocks whose whole weights FSDP has on a GPU: one at work, the next on its way."""
IN_USE = int(1.5 * GIB)
"""Bytes of each GPU that the log of the split A14B run shows in use before the model is placed there: 31.8 GiB, of them 30.3 free."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A figure and its prediction."""

    setting: str
    published: str
    """As it was written."""
    figure: float
    """Bytes; 0 where none was published."""
    predicted: float
    made_of: str
    """What the prediction adds up."""


def _item(arch: Any, latents: Sequence[int]) -> dict[str, Tensor]:
    text = torch.empty(arch.text_tokens, arch.text_dim, dtype=torch.bfloat16, device="meta")
    return {"latents": torch.empty(*latents, device="meta"), "text": text}


@cache
def _wan_full(arch: WanArch, latents: tuple[int, ...], batch: int, policy: str, *, per_token: bool) -> Profile:
    """A full fine-tune whose matmuls are in bf16."""
    spec = altered(WAN, make_inputs=_with_timestep_per_token) if per_token else WAN
    return profile(
        Job(
            spec=spec, arch=arch, adapter=AdapterConfig(method="full"), precision=Precision(),
            batch=[_item(arch, latents)] * batch, policy=policy, optim=OptimConfig(), ema=EMAConfig(), flow=FlowConfig(),
        )
    )  # fmt: skip


def _with_timestep_per_token(
    noised: Sequence[Tensor], sigma: Tensor, items: Sequence[Mapping[str, Tensor]], guidance: float
) -> WanInputs:
    tokens = noised[0][0].numel() // 4
    inputs = WAN.training.make_inputs(noised, sigma, items, guidance)
    return inputs._replace(timestep=inputs.timestep[:, None].expand(-1, tokens))


def _numbers(spec: ModelSpec, arch: Any) -> list[int]:
    """Parameters of each stage."""
    model = build_on_meta(spec, arch, Precision())
    stages: list[nn.Module] = [model.embed, *model.blocks(), model.head]
    return [sum(parameter.numel() for parameter in stage.parameters()) for stage in stages]


def _with_masters(made: Profile, numbers: Sequence[int], ranks: int) -> Profile:
    """The profile with fp32 weights, gradients and Adam's two averages in place of bf16 ones, each shared by `ranks` GPUs.

    On more than one GPU the bf16 weights of `GATHERED` blocks are there besides; the gradients of the block at work are in its own
    `backward_extra` already.
    """

    def given(cost: StageCost, count: int, gathered: int = 0) -> StageCost:
        own = 4 * count // ranks
        return replace(cost, weights=gathered, adapters=own, gradients=own, optimizer=2 * own)

    largest = max(sum(pair) for pair in pairwise(numbers[1:-1]))
    assert GATHERED == 2
    embed, *blocks, head = [
        given(cost, count, 2 * largest if index == 0 and ranks > 1 else 0)
        for index, (cost, count) in enumerate(zip((made.embed, *made.blocks, made.head), numbers, strict=True))
    ]
    return replace(made, embed=embed, blocks=tuple(blocks), head=head)


def _alone(made: Profile) -> DevicePlan:
    division = Partition(devices=(0,) * len(made.blocks))
    (plan,) = compose(made, division, [Budget(name="", total=2**60, workspace=0)])
    return plan


def _parts(plan: DevicePlan, *, masters: bool) -> str:
    """What a peak is made of; where all is trained, frozen weights are what is gathered of others' shares."""
    words = {"adapters": "weights", "weights": "gathered"} if masters else {}
    held = {words.get(name, name): size / GB for name, size in plan.purposes.items()}
    return ", ".join(f"{name} {size:.1f}" for name, size in held.items() if size >= 0.05)


def full_5b(height: int, width: int) -> Iterator[Line]:
    """Wan 2.2 TI2V-5B, full fine-tune, at a size that was not published."""
    numbers, size = _numbers(WAN, TI2V_5B), f"{height}×{width}"
    peaks = {}
    cases = (
        (37, 2, "none", 109.0),
        (37, 2, "full", 40.7),
        (121, 2, "none", 0.0),
        (121, 2, "full", 51.1),
        (121, 4, "full", 69.8),
    )
    for frames, batch, policy, figure in cases:
        latents = (48, 1 + (frames - 1) // 4, height // 16, width // 16)
        plan = _alone(_with_masters(_wan_full(TI2V_5B, latents, batch, policy, per_token=True), numbers, RANKS))
        peaks[frames, batch, policy] = plan.peak
        yield Line(
            setting=f"TI2V-5B, full fine-tune, {frames} frames of {size}, micro-batch {batch}, checkpointing {policy} [2]",
            published=f"{figure:g} GB" if figure else "out of memory", figure=figure * GB, predicted=plan.peak,
            made_of=_parts(plan, masters=True),
        )  # fmt: skip
    for words, figure, more, less in (
        ("what checkpointing saves at 37 frames, micro-batch 2", 109 - 40.7, (37, 2, "none"), (37, 2, "full")),
        ("what 121 frames add to 37, micro-batch 2, full", 51.1 - 40.7, (121, 2, "full"), (37, 2, "full")),
        ("what micro-batch 4 adds to 2 at 121 frames, full", 69.8 - 51.1, (121, 4, "full"), (121, 2, "full")),
    ):
        yield Line(
            setting=f"TI2V-5B, {size}: {words} [3]", published=f"{figure:.1f} GB", figure=figure * GB,
            predicted=peaks[more] - peaks[less], made_of="difference of two rows",
        )  # fmt: skip


def steps_1_3b() -> Iterator[Line]:
    """Wan 2.1 T2V-1.3B, 720×1280, 77 frames: all weights trained, and an adapter."""
    arch, latents = WAN_PRESETS["t2v-1.3b"], (16, 20, 90, 160)
    numbers = _numbers(WAN, arch)
    for trained in ("full fine-tune", "LoRA of rank 32"):
        peaks = {}
        for policy, figure in (("full", 26.8), ("attn_only", 28.9)):
            if trained == "full fine-tune":
                made = _with_masters(_wan_full(arch, latents, 1, policy, per_token=False), numbers, 1)
            else:
                made = _adapted(WAN, arch, _item(arch, latents), "q,k,v,o", 32, policy=policy, quantize="none")
            plan = _alone(made)
            peaks[policy] = plan.peak
            yield Line(
                setting=f"T2V-1.3B, 77 frames of 720×1280, checkpointing {policy}, as {trained} [4]", published=f"{figure} GB",
                figure=figure * GB, predicted=plan.peak, made_of=_parts(plan, masters=trained == "full fine-tune"),
            )  # fmt: skip
        yield Line(
            setting=f"T2V-1.3B: what attn_only adds to full, as {trained} [3][4]", published="2.1 GB", figure=2.06 * GB,
            predicted=peaks["attn_only"] - peaks["full"], made_of="difference of two rows",
        )  # fmt: skip


def _adapted(
    spec: ModelSpec,
    arch: Any,
    item: dict[str, Tensor],
    targets: str,
    rank: int,
    *,
    policy: str = "full",
    quantize: str = "fp8",
) -> Profile:
    """A LoRA."""
    return profile(
        Job(
            spec=spec, arch=arch, adapter=AdapterConfig(rank=rank, targets=(targets,)), precision=Precision(), batch=[item],
            policy=policy, optim=OptimConfig(), ema=EMAConfig(), flow=FlowConfig(), quantize=quantize,
        )
    )  # fmt: skip


def _divided(made: Profile, cut: int) -> tuple[DevicePlan, ...]:
    devices = tuple(int(index >= cut) for index in range(len(made.blocks)))
    return compose(made, Partition(devices=devices), [Budget(name="", total=2**60, workspace=0)] * 2)


def _adapter_bytes(made: Profile) -> int:
    """Of the adapter as a file in bf16."""
    return sum(cost.adapters for cost in (made.embed, *made.blocks, made.head)) // 2


def split_a14b() -> Iterator[Line]:
    """Wan 2.2 I2V-A14B over two GPUs."""
    item = WAN.training.empty_item(I2V_A14B, (49, 480, 832), [])
    made = _adapted(WAN, I2V_A14B, item, "q,k,v,o,ffn.0,ffn.2", 32)
    plans = _divided(made, 20)
    auxiliary = {
        model.name: sum(p.numel() * 2 for p in model.build(torch.bfloat16).parameters())
        for model in WAN.auxiliary.models(I2V_A14B, ModelPaths())
    }
    encoders = auxiliary["text encoder"] + auxiliary["VAE decoder"]
    for index, figure in enumerate((19.5, 8.4)):
        held = {name: plans[index].purposes[name] for name in ("weights", "adapters")}
        if index == 0:
            held["text encoder and VAE"] = encoders
        held["in use before"] = IN_USE
        yield Line(
            setting=f"I2V-A14B in fp8, LoRA of rank 32, split at block 20, before the step: cuda:{index} [5]", published=f"{figure} GiB",
            figure=figure * GIB, predicted=sum(held.values()), made_of=_in_gib(held),
        )  # fmt: skip
    for index, plan in enumerate(plans):
        yield Line(
            setting=f"the same at the peak of a step at 480×832×49, without the encoders: cuda:{index}", published="not published",
            figure=0, predicted=plan.peak, made_of=_in_gib({k: v for k, v in plan.purposes.items() if v > GIB / 20}),
        )  # fmt: skip
    yield Line(
        setting="its adapter as a file in bf16", published="292.5 MiB", figure=292.5 * MIB, predicted=_adapter_bytes(made),
        made_of=f"{_adapter_bytes(made) / MIB:.1f} MiB",
    )  # fmt: skip


def split_flux2() -> Iterator[Line]:
    """FLUX.2 dev over two GPUs."""
    arch = FLUX2_PRESETS["dev"]
    with torch.device("meta"):
        item = FLUX2.training.empty_item(arch, (1, 512, 512), [])
    made = _adapted(FLUX2, arch, item, "blocks", 16)
    cut = arch.double_layers + 1 + arch.single_layers // 2  # the join is a block
    plans = _divided(made, cut)
    for index, figure in enumerate((20.7, 12.6)):
        held = {name: plans[index].purposes[name] for name in ("weights", "adapters")}
        yield Line(
            setting=f"FLUX.2 dev in fp8, split at its 24th single block: cuda:{index} [6]", published=f"{figure} GB", figure=figure * GB,
            predicted=sum(held.values()), made_of=_in_gb(held),
        )  # fmt: skip
    for index, plan in enumerate(plans):
        yield Line(
            setting=f"the same at the peak of a step at 512×512: cuda:{index}", published="not published", figure=0,
            predicted=plan.peak, made_of=_in_gb({k: v for k, v in plan.purposes.items() if v > GB / 20}),
        )  # fmt: skip


def _in_gib(held: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in held.items()) + " GiB"


def _in_gb(held: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / GB:.1f}" for name, size in held.items()) + " GB"


NOTES = """
[1] GB is read as 10⁹ bytes. If the authors meant 2³⁰, as torch's memory summaries do, the ratios of those rows are 0.93 of the shown ones.
Predictions count tensors only: no CUDA context, no cuBLAS workspace, no gaps between an allocator's blocks.

[2] Not published: the number of GPUs, whether a sequence was split across them, the resolution, the optimizer, and the dtype of the weights.
Assumed: RANKS GPUs, over which FSDP shards fp32 weights, fp32 gradients and AdamW's state in fp32 (16 bytes per parameter in total), each with
samples of its own; the bf16 weights of two blocks gathered on a GPU; matmuls in bf16; a timestep for each token, as in the official code; and
the residual stream in fp32. The commands of ditkit shard nothing over ranks: the profile is ditkit's own, and the shares of a rank are computed
from it. The model is published for 704×1280. 480×832 was added after the first had come out too high, and is no more certain.

[3] A difference of two rows does not depend on optimizer, weights or sharding, if both peaks are in the same part of the step. The differences
of 5B say that their GPU had fewer tokens than 704×1280 makes. They do not agree with each other: from 37 to 121 frames the number of tokens
grows by a factor of 3.1, and the memory of full checkpointing with it. But the published peak grows by only 10.4 GB, and by 18.7 GB when the
number of samples doubles. At 37 frames the peak may have been in another part of the step, in something that no page mentions.

[4] Not published: what is trained, the optimizer, and the dtype of the weights. Assumed for the full fine-tune: one GPU, fp32 weights and
gradients, AdamW in fp32, matmuls in bf16. Assumed for the LoRA: a bf16 base, with adapters on q, k, v, o. The residual stream is in fp32 in
both; in bf16 it would keep 6.6 GB less over 30 blocks. attn_only keeps the outputs of self-attention and cross-attention, 2 × 221 MB in each
block. The published peak grows by only 2.1 GB. That suggests that with full checkpointing it was in another part of the step, while both of
ours are where the backward begins.

[5] From the log: 1.5 GiB of each GPU were in use before, and the text encoder and the VAE were on cuda:0. Both are counted in bf16, which was
not published. The log's G are GiB, because it gives a 5090 31.8. Here embedding, modulation tables and head stay in fp32, adapters are trained
in fp32, and the head is on the last GPU. The published run took an optimizer step within 32 GB with activations offloaded, which is not planned
here.

[6] Not published: in which part of a run it was measured, the rank, and what else was in memory. Assumed: weights and a LoRA of rank 16 on
every linear layer of the blocks, before the step. Here everything outside the blocks is not quantized, and its modulations stay in fp32
(2.7 GiB); that is on cuda:0. Our head is on the last GPU.
"""


def main() -> int:
    """Print a page in Markdown."""
    print("# Plans against published figures\n")
    print(
        f"`uv run tools/plan_published.py`, torch {torch.__version__.partition('+')[0]}, {datetime.date.today():%Y-%m-%d}. Nothing was measured here: "
        "the planner made the predictions on fake tensors, and others published the figures in their pull requests and pages. The numbers in "
        "brackets are notes below the table, because most settings were published only in part.\n"
    )
    print(
        "| setting | published [1] | predicted | predicted / published | parts of the prediction, in GB unless stated |\n|---|---|---|---|---|"
    )
    for lines in (full_5b(704, 1280), full_5b(480, 832), steps_1_3b(), split_a14b(), split_flux2()):
        for line in lines:
            in_gib = "GiB" in line.made_of
            predicted = f"{line.predicted / (GIB if in_gib else GB):.1f} {'GiB' if in_gib else 'GB'}"
            if "MiB" in line.made_of:
                predicted = f"{line.predicted / MIB:.1f} MiB"
            ratio = f"{line.predicted / line.figure:.2f}" if line.figure else ""
            print(f"| {line.setting} | {line.published} | {predicted} | {ratio} | {line.made_of} |", flush=True)
    print(NOTES.replace("RANKS", str(RANKS)).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
