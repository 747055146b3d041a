"""Compare plans with memory and times that others have published.

    uv run tools/bench/plan_published.py > benchmarks/plan_published.md

Nobody publishes everything that a plan depends on. The rest is assumed, and a note says so; nothing
is tuned to meet a figure. No GPU and no weights: every profile is a step on fake tensors.
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

from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import ModelSpec, build_on_meta
from ditkit_core.planner.gpus import parse_gpus
from ditkit_core.planner.memory import Budget, DevicePlan, Partition, Profile, StageCost, compose
from ditkit_core.planner.planned_step import Size, StepJob
from ditkit_core.planner.profiler import profile
from ditkit_core.planner.step_time import step_seconds
from ditkit_core.planner.workload import Workload
from ditkit_core.testing.specs import altered
from ditkit_flux2.presets import PRESETS as FLUX2_PRESETS
from ditkit_flux2.spec import FLUX2
from ditkit_wan.model.inputs import WanInputs
from ditkit_wan.presets import PRESETS as WAN_PRESETS
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN
from step_jobs import step_job

GB, GIB, MIB = 10**9, 2**30, 2**20

TI2V_5B = replace(WAN_PRESETS["ti2v-5b"], token_times=False)
"""Its timesteps are put in below, one for each token, as the official code has them: ours has one
for each kind of token."""
I2V_A14B = WAN_PRESETS["i2v-a14b"]
T2V_1_3B, T2V_14B = WAN_PRESETS["t2v-1.3b"], WAN_PRESETS["t2v-14b"]
DEV, KLEIN_9B = FLUX2_PRESETS["dev"], FLUX2_PRESETS["klein-base-9b"]

RANKS = 8
"""GPUs that the 5B runs are assumed to share weights, gradients and optimizer over."""
GATHERED = 2
"""Blocks whose whole weights FSDP has on a GPU: one at work, the next on its way."""
MIDDLE_OF_DEV = DEV.double_layers + 1 + DEV.single_layers // 2
"""The block of FLUX.2 dev that a second GPU begins with: its 24th single block; the join is a
block."""
IN_USE = int(1.5 * GIB)
"""Bytes of each GPU that the log of the split A14B run shows in use before the model is placed
there: 31.8 GiB, of them 30.3 free."""


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


@cache
def _all_weights(
    arch: WanArch, size: Size, batch: int, policy: str, *, fast: bool = False
) -> Profile:
    """A full fine-tune whose matmuls are in bf16."""
    spec = WAN
    if arch is TI2V_5B:
        spec = altered(WAN, make_inputs=_with_timestep_per_token)
        # Its VAE makes one latent pixel of 16 × 16, twice the stride of models without timesteps
        # for tokens.
        size = size[0], size[1] // 2, size[2] // 2
    return profile(step_job(spec, arch, size, rank=0, batch=batch, policy=policy, fast=fast))


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
    """The profile with fp32 weights, gradients and Adam's two averages in place of bf16 ones, each
    shared by `ranks` GPUs.

    On more than one GPU the bf16 weights of `GATHERED` blocks are there besides; the gradients of
    the block at work are in its own `backward_extra` already.
    """

    def given(cost: StageCost, count: int, gathered: int = 0) -> StageCost:
        own = 4 * count // ranks
        return replace(cost, weights=gathered, adapters=own, gradients=own, optimizer=2 * own)

    largest = max(sum(pair) for pair in pairwise(numbers[1:-1]))
    assert GATHERED == 2
    embed, *blocks, head = [
        given(cost, count, 2 * largest if index == 0 and ranks > 1 else 0)
        for index, (cost, count) in enumerate(
            zip((made.embed, *made.blocks, made.head), numbers, strict=True)
        )
    ]
    return replace(made, embed=embed, blocks=tuple(blocks), head=head)


def _alone(made: Profile) -> DevicePlan:
    division = Partition(devices=(0,) * len(made.blocks))
    (plan,) = compose(made, division, [Budget(name="", total=2**60, workspace=0)])
    return plan


def _parts(plan: DevicePlan, *, masters: bool) -> str:
    """What a peak is made of; where all is trained, frozen weights are what is gathered of others'
    shares."""
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
        made = _all_weights(TI2V_5B, (frames, height, width), batch, policy)
        plan = _alone(_with_masters(made, numbers, RANKS))
        peaks[frames, batch, policy] = plan.peak
        yield Line(
            setting=f"TI2V-5B, full fine-tune, {frames} frames of {size}, micro-batch {batch}, checkpointing {policy} [2]",
            published=f"{figure:g} GB" if figure else "out of memory", figure=figure * GB,
            predicted=plan.peak,
            made_of=_parts(plan, masters=True),
        )  # fmt: skip
    for words, figure, more, less in (
        (
            "what checkpointing saves at 37 frames, micro-batch 2",
            109 - 40.7,
            (37, 2, "none"),
            (37, 2, "full"),
        ),
        (
            "what 121 frames add to 37, micro-batch 2, full",
            51.1 - 40.7,
            (121, 2, "full"),
            (37, 2, "full"),
        ),
        (
            "what micro-batch 4 adds to 2 at 121 frames, full",
            69.8 - 51.1,
            (121, 4, "full"),
            (121, 2, "full"),
        ),
    ):
        yield Line(
            setting=f"TI2V-5B, {size}: {words} [3]", published=f"{figure:.1f} GB",
            figure=figure * GB,
            predicted=peaks[more] - peaks[less], made_of="difference of two rows",
        )  # fmt: skip


def steps_1_3b() -> Iterator[Line]:
    """Wan 2.1 T2V-1.3B, 77 frames, all weights: at the size that was published, and at that of the
    data which its recipe prepares."""
    numbers = _numbers(WAN, T2V_1_3B)
    for height, width, fast in ((720, 1280, False), (480, 832, False), (480, 832, True)):
        size = f"77 frames of {height}×{width}{', precision.preset = fast' if fast else ''}"
        peaks = {}
        for policy, figure in (("full", 26.82), ("attn_only", 28.88)):
            made = _all_weights(T2V_1_3B, (77, height, width), 1, policy, fast=fast)
            plan = _alone(_with_masters(made, numbers, 1))
            peaks[policy] = plan.peak
            yield Line(
                setting=f"T2V-1.3B, {size}, checkpointing {policy}, full fine-tune [4]",
                published=f"{figure} GB",
                figure=figure * GB, predicted=plan.peak, made_of=_parts(plan, masters=True),
            )  # fmt: skip
        yield Line(
            setting=f"T2V-1.3B, {size}: what attn_only adds to full [3][4]", published="2.06 GB",
            figure=2.06 * GB,
            predicted=peaks["attn_only"] - peaks["full"], made_of="difference of two rows",
        )  # fmt: skip


def _divided(made: Profile, cut: int) -> tuple[DevicePlan, ...]:
    devices = tuple(int(index >= cut) for index in range(len(made.blocks)))
    return compose(
        made, Partition(devices=devices), [Budget(name="", total=2**60, workspace=0)] * 2
    )


def _adapter_bytes(made: Profile) -> int:
    """Of the adapter as a file in bf16."""
    return sum(cost.adapters for cost in (made.embed, *made.blocks, made.head)) // 2


def split_a14b() -> Iterator[Line]:
    """Wan 2.2 I2V-A14B over two GPUs."""
    job = step_job(
        WAN,
        I2V_A14B,
        (49, 480, 832),
        targets=("q,k,v,o,ffn.0,ffn.2",),
        policy="full",
        quantize="fp8",
    )
    made = profile(job)
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
            setting=f"I2V-A14B in fp8, LoRA of rank 32, split at block 20, before the step: cuda:{index} [5]",
            published=f"{figure} GiB",
            figure=figure * GIB, predicted=sum(held.values()), made_of=_in_gib(held),
        )  # fmt: skip
    for index, plan in enumerate(plans):
        yield Line(
            setting=f"the same at the peak of a step at 480×832×49, without the encoders: cuda:{index}",
            published="not published",
            figure=0,
            predicted=plan.peak,
            made_of=_in_gib({k: v for k, v in plan.purposes.items() if v > GIB / 20}),
        )
    yield Line(
        setting="its adapter as a file in bf16", published="292.5 MiB", figure=292.5 * MIB,
        predicted=_adapter_bytes(made),
        made_of=f"{_adapter_bytes(made) / MIB:.1f} MiB",
    )  # fmt: skip


def split_flux2() -> Iterator[Line]:
    """FLUX.2 dev over two GPUs."""
    made = profile(
        step_job(
            FLUX2, DEV, (1, 512, 512), rank=16, targets=("blocks",), policy="full", quantize="fp8"
        )
    )
    plans = _divided(made, MIDDLE_OF_DEV)
    for index, figure in enumerate((20.7, 12.6)):
        held = {name: plans[index].purposes[name] for name in ("weights", "adapters")}
        yield Line(
            setting=f"FLUX.2 dev in fp8, split at its 24th single block: cuda:{index} [6]",
            published=f"{figure} GB", figure=figure * GB,
            predicted=sum(held.values()), made_of=_in_gb(held),
        )  # fmt: skip
    for index, plan in enumerate(plans):
        yield Line(
            setting=f"the same at the peak of a step at 512×512: cuda:{index}",
            published="not published",
            figure=0,
            predicted=plan.peak,
            made_of=_in_gb({k: v for k, v in plan.purposes.items() if v > GB / 20}),
        )


def _in_gib(held: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in held.items()) + " GiB"


def _in_gb(held: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / GB:.1f}" for name, size in held.items()) + " GB"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A step that others have timed."""

    setting: str
    source: str
    seconds: float
    """As published; 0 where only a rate was."""
    gpus: str
    job: StepJob
    cut: int = 0
    """The block that a second GPU begins with."""
    streamed: bool = False
    """Whether the weights of all blocks are in host memory."""
    rate: float = 0.0
    """TFLOP/s of a GPU, as published in place of seconds."""
    reason: str = ""
    """What a plan does not have that the step had."""

    def planned(self) -> tuple[float, float, float]:
        """Planned seconds, TFLOP of the step, and the TFLOP/s of one GPU at its peak."""
        made, gpus = profile(self.job), parse_gpus(self.gpus)
        blocks = range(len(made.blocks))
        division = Partition(
            devices=tuple(int(0 < self.cut <= index) for index in blocks),
            streamed=frozenset(blocks if self.streamed else ()),
        )
        work = Workload(execution=self.job.execution)
        work_done = sum(stage.flops_forward + stage.flops_backward for stage in made.stages)
        return step_seconds(made, division, gpus, work), work_done / 1e12, gpus[0].bf16_flops / 1e12

    def row(self) -> str:
        """A line of the table."""
        seconds, done, peak = self.planned()
        published = self.seconds or done / self.rate
        implied = done / published
        share = f" ({implied / peak:.0%})" if self.job.execution.compute == "dtype" else ""
        figure = f"{self.seconds:g} s" if self.seconds else f"{self.rate:g} TFLOP/s"
        return (
            f"| {self.setting} | {self.source} | {figure} | {done:,.0f} | {implied:,.0f}{share} | "
            f"{seconds:.3g} s | {seconds / published:.2f} | {self.reason} |"
        )


def speeds() -> Iterator[Speed]:
    """Steps whose size is known, or follows from their memory. What peers run are torch's
    operations, unless their kernels are known."""

    def peers(spec: ModelSpec, arch: Any, size: Size, **others: Any) -> StepJob:
        return step_job(spec, arch, size, **({"policy": "full", "kernels": "torch"} | others))

    for height, width in ((720, 1280), (480, 832)):
        for policy, seconds in (("full", 4.19), ("attn_only", 3.75)):
            yield Speed(
                setting=f"Wan 1.3B, all weights, {height}×{width}×77, {policy}, H100 [4]",
                source="FastVideo #1410", seconds=seconds, gpus="h100",
                job=peers(WAN, T2V_1_3B, (77, height, width), rank=0, policy=policy),
                reason="the size is none of this time's: more than the GPU's peak" if height == 720
                else "FlashAttention 2, of which Hopper reaches less than of cuDNN's: `attn_only` saves a forward that ran at 410 TFLOP/s",
            )  # fmt: skip
    for arch, name in ((T2V_1_3B, "1.3B"), (T2V_14B, "14B")):
        for policy, gpu, seconds, reason in {
            "1.3B": (
                ("none", "H100", 1.407, ""),
                (
                    "full",
                    "H100",
                    2.099,
                    (
                        "each layer waits for its own weights, which are copied when it needs them; "
                        "here they come a block ahead"
                    ),
                ),
                ("full", "L40S", 4.459, ""),
            ),
            "14B": (("full", "H100", 7.162, ""), ("full", "L40S", 21.77, "")),
        }[name]:
            yield Speed(
                setting=f"Wan {name}, LoRA 16, 352×640×81 [7], {policy}, weights streamed, {gpu}",
                source="SimpleTuner's sweep", seconds=seconds,
                gpus=gpu, job=peers(WAN, arch, (81, 352, 640), rank=16, policy=policy),
                streamed=True, reason=reason,
            )  # fmt: skip
    yield Speed(
        setting="Wan 14B, all weights, 37,440 tokens (480×832×93), H100, tensors over 2 GPUs, tokens over 4",
        source="Megatron-Bridge", seconds=0.0,
        rate=326, gpus="h100", job=peers(WAN, T2V_14B, (93, 480, 832), rank=0, policy="none"),
        reason="a GPU alone is planned: nothing is exchanged, and matrices are not cut in two",
    )  # fmt: skip
    yield Speed(
        setting="Wan I2V-A14B in fp8, LoRA 32, 480×832×49, full+offload, RTX 5090",
        source="DiffSynth #1436", seconds=44.7, gpus="rtx5090",
        job=peers(WAN, I2V_A14B, (49, 480, 832), policy="full+offload", quantize="fp8"),
        reason="torch's `save_on_cpu` copies to memory that is not page-locked, and the GPU waits; here copies overlap",
    )  # fmt: skip
    yield Speed(
        setting="FLUX.2 klein 9B, LoRA 32, 1024×1024, full, H200", source="a user of ai-toolkit",
        seconds=0.84, gpus="h200",
        job=peers(FLUX2, KLEIN_9B, (1, 1024, 1024)),
    )  # fmt: skip
    for program, seconds, stored, computed, kernels in (
        ("ai-toolkit", 2.85, "fp8", "dtype", "torch"),
        ("musubi-tuner", 2.22, "fp8", "dtype", "torch"),
        ("DiffSynth", 2.69, "fp8", "dtype", "torch"),
        ("OneTrainer", 1.75, "fp8", "fp8", "triton"),
        ("OneTrainer", 0.95, "int8", "int8", "triton"),
    ):
        does = "computed" if computed != "dtype" else "stored"
        yield Speed(
            setting=f"FLUX.2 dev, {stored} {does}, LoRA 16, 512×512, full, split over 2 RTX 5090",
            source=f"genno's split of {program}",
            seconds=seconds,
            gpus="2xrtx5090",
            cut=MIDDLE_OF_DEV,
            job=peers(
                FLUX2,
                DEV,
                (1, 512, 512),
                rank=16,
                quantize=stored,
                compute=computed,
                kernels=kernels,
            ),
        )


NOTES = """
[1] GB is read as 10⁹ bytes. If the authors meant 2³⁰, as torch's memory summaries do, the ratios of those rows are 0.93 of the shown ones.
Predictions count tensors only: no CUDA context, no cuBLAS workspace, no gaps between an allocator's blocks.

[2] Not published: the number of GPUs, whether a sequence was split across them, the resolution, the optimizer, and the dtype of the weights.
Assumed: RANKS GPUs, over which FSDP shards fp32 weights, fp32 gradients and AdamW's state in fp32 (16 bytes per parameter in total), each with
samples of its own; the bf16 weights of two blocks gathered on a GPU; matmuls in bf16; a timestep for each token, as in the official code; and
the residual stream in fp32. The profile is ditkit's own, and the shares of a rank are computed from it. The model is published for 704×1280.
The differences [3] suggest 480×832. That is weak: several free choices, fitted to five numbers.

[3] A difference of two rows does not depend on optimizer, weights or sharding, if both peaks are in the same part of the step. The differences
of 5B say that their GPU had fewer tokens than 704×1280 makes. They do not agree with each other: from 37 to 121 frames the number of tokens
grows by a factor of 3.1, and the memory of full checkpointing with it. But the published peak grows by only 10.4 GB, and by 18.7 GB when the
number of samples doubles. At 37 frames the peak may have been in another part of the step, in something that no page mentions.

[4] Published as 720×1280, 72,000 tokens. **That cannot be the size of these figures**: at their times it would be more than the GPU's
peak of 989 TFLOP/s (second table), and the forward that attn_only saves would have run at twice the peak. In that branch the command's height and width
reach only the samples of validation; training takes the size of the prepared latents, and the recipe prepares 480×832×77, 31,200 tokens. At
31,200 tokens the times are ordinary. That 72,000 is wrong is arithmetic, that 31,200 is right an inference. Our own steps at a true 72,000
tokens took 9.5 and 7.8 s on an H100 ([page](time_truth.md)). Not published: the optimizer and the dtype of the weights. Assumed: one GPU, fp32
weights and gradients, AdamW in fp32, matmuls in bf16. `fast` has the residual stream in bf16, to which that code casts it at the end of each block; these rows were added
after the others had come out too high.

[5] From the log: 1.5 GiB of each GPU were in use before, and the text encoder and the VAE were on cuda:0. Both are counted in bf16, which was
not published. The log's G are GiB, because it gives a 5090 31.8. Here embedding, modulation tables and head stay in fp32, adapters are trained
in fp32, and the head is on the last GPU. The published run took an optimizer step within 32 GB with activations offloaded, which is not planned
here.

[6] Not published: in which part of a run it was measured, the rank, and what else was in memory. Assumed: weights and a LoRA of rank 16 on
every linear layer of the blocks, before the step. Here everything outside the blocks is not quantized, and its modulations stay in fp32
(2.7 GiB); that is on cuda:0. Our head is on the last GPU.

[7] Published as 832×480 with 81 frames, but the dataset's configuration says an area of 480² pixels, which 352×640 has, 18,480 tokens. The
published 71.9 GiB without checkpointing are those of about as many, not of the 32,760 that 480×832 would make.

Times of no known size are left out: FastVideo #584, Automodel #2403 (no number of frames), SVI #49 (81 frames of about 480p on an
H200 in 2.05 + 5.9 s, which at 480×832 would be 802 TFLOP/s), DiffSynth #658 and #738, diffusion-pipe #152 and #400.
"""


def main() -> int:
    """Print a page in Markdown."""
    print("# Plans against published figures\n")
    print(
        f"`uv run tools/bench/plan_published.py`, torch {torch.__version__.partition('+')[0]}, "
        f"{datetime.date.today():%Y-%m-%d}. Nothing was measured here: the planner made the "
        "predictions on fake tensors, and others published the figures in their pull requests and "
        "pages. The numbers in brackets are notes below the tables, because most settings were "
        "published only in part.\n\n## Memory\n"
    )
    print(
        "| setting | published [1] | predicted | predicted / published | parts of the prediction, "
        "in GB unless stated |\n|---|---|---|---|---|"
    )
    for lines in (full_5b(704, 1280), full_5b(480, 832), steps_1_3b(), split_a14b(), split_flux2()):
        for line in lines:
            in_gib = "GiB" in line.made_of
            predicted = (
                f"{line.predicted / (GIB if in_gib else GB):.1f} {'GiB' if in_gib else 'GB'}"
            )
            if "MiB" in line.made_of:
                predicted = f"{line.predicted / MIB:.1f} MiB"
            ratio = f"{line.predicted / line.figure:.2f}" if line.figure else ""
            print(
                f"| {line.setting} | {line.published} | {predicted} | {ratio} | {line.made_of} |",
                flush=True,
            )
    print(
        "\n## Seconds of a step\n\nThe planned arithmetic over the published time is the rate that "
        "the figure implies, next to it the share of the GPU's published rate in "
        "bf16. The plan launches every operation, as these programs do, with the shares that an "
        "H100 reached of its published rates ([page](time_truth.md)). A ratio "
        "beyond 1.5 either way has its reason in the last column.\n"
    )
    print(
        "| step | source | published | TFLOP | TFLOP/s that it implies | planned | planned / "
        "published | why |\n|---|---|---|---|---|---|---|---|"
    )
    for speed in speeds():
        print(speed.row(), flush=True)
    print(NOTES.replace("RANKS", str(RANKS)).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
