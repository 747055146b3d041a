"""Distillation to few steps with teacher, critic and student over one base (DMD2), at toy size: `uv
run tools/demo/distillation_study.py`.

The base is the toy model, trained on samples of two signs for each caption. Teacher is the base
itself, critic and student are two sets of values of one LoRA over it. It prints how far samples are
from the data while the student learns. `--plan` prints what the same needs for Wan 14B, by the
planner. benchmarks/distillation.md explains both.

Source of the method: Yin et al., DMD2, arXiv:2405.14867, without its GAN loss.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core import Execution, LoraConfig, UserError, plan
from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import initialise, inject, trainable_parameters
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.loading.model import Model
from ditkit_core.nn.lora import without_adapters
from ditkit_core.nn.parameters import copy_values
from ditkit_core.testing.toy import TOY, ToyArch
from ditkit_core.testing.world import make_model
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.flow_matching import NoisedBatch, sigma_at, velocity_errors
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_step import StepContext, training_step

ARCH = ToyArch(dim=48, heads=3, depth=2)
LEVELS = (1.0, 0.5)
"""Noise levels of the student's steps."""
CRITIC_STEPS = 3
"""Steps of the critic for each of the student; the paper has 5."""
BATCH, CHECKED = 32, 512
FLOW = FlowConfig(shifting="none")
Items = Sequence[Mapping[str, Tensor]]


def data(count: int, random: torch.Generator) -> list[dict[str, Tensor]]:
    """Samples: every token of one is plus or minus its caption's vector, with a little noise. The
    mean of both signs is no sample."""
    captions = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1))
    vectors = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    items = []
    for caption in torch.randint(4, (count,), generator=random).tolist():
        sign = 2 * int(torch.randint(2, (), generator=random)) - 1
        latents = sign * vectors[caption, :, None, None, None] + 0.15 * torch.randn(
            4, 1, 2, 2, generator=random
        )
        items.append({"latents": latents, "text": captions[caption]})
    return items


def distance(samples: Sequence[Tensor], items: Items) -> float:
    """Energy distance between samples and data, each with its caption; 0 for equal
    distributions."""
    ours, theirs = (
        torch.stack(
            [
                torch.cat([x.flatten(), 3 * item["text"].flatten()])
                for x, item in zip(some, items, strict=True)
            ]
        )
        for some in (samples, [item["latents"] for item in items])
    )
    pairs = len(ours) * (len(ours) - 1)

    def mean(x: Tensor, y: Tensor) -> Tensor:
        apart = torch.cdist(x, y)
        # the caption at a place is the same in both
        return (apart.sum() - apart.diagonal().sum()) / pairs

    return float(2 * mean(ours, theirs) - mean(ours, ours) - mean(theirs, theirs))


@dataclass
class Role:
    """Values of the one adapter, with the state of their optimizer."""

    values: dict[str, Tensor]
    optimizer: NamedOptimizer

    @classmethod
    def of(cls, model: Model, lr: float) -> "Role":
        """A role that begins with the adapter as it is."""
        values = {name: parameter.detach().clone() for name, parameter in model.trainable.items()}
        return cls(values, NamedOptimizer(model.trainable, OptimConfig(lr=lr, betas=(0.5, 0.95))))

    @contextmanager
    def played(self, model: Model) -> Iterator[None]:
        """Inside the block the model has this role's values, which change with it."""
        copy_values(model.trainable, self.values)
        yield
        for name, parameter in model.trainable.items():
            self.values[name].copy_(parameter.detach())


def predicted(model: Model, noised: Sequence[Tensor], sigma: Tensor, items: Items) -> list[Tensor]:
    """The clean samples that a model predicts; keeps nothing for a backward."""
    with torch.no_grad():
        velocities = model(noised, sigma, items)
    return [x - level * v for x, level, v in zip(noised, sigma, velocities, strict=True)]


def noised_at(clean: Sequence[Tensor], sigma: Tensor) -> list[Tensor]:
    """Samples at noise levels, with fresh noise."""
    return [
        (1 - level) * x + level * torch.randn_like(x) for level, x in zip(sigma, clean, strict=True)
    ]


def steps_of(model: Model, items: Items, number: int) -> list[Tensor]:
    """What the model predicts after its first steps; before them, nothing."""
    clean = [torch.zeros_like(item["latents"]) for item in items]
    for level in LEVELS[:number]:
        sigma = torch.full((len(items),), level)
        clean = predicted(model, noised_at(clean, sigma), sigma, items)
    return clean


def euler(model: Model, items: Items, number: int) -> list[Tensor]:
    """Samples of as many steps along the model's velocity."""
    x = [torch.randn_like(item["latents"]) for item in items]
    levels = torch.linspace(1, 0, number + 1)
    for level, following in pairwise(levels):
        with torch.no_grad():
            velocities = model(x, level.expand(len(items)), items)
        x = [a + (following - level) * v for a, v in zip(x, velocities, strict=True)]
    return x


def train_base(module: nn.Module, steps: int, random: torch.Generator) -> None:
    """Train all weights on the data."""
    model = Model(module, BlockEngine(), TOY, {})
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    for step in range(steps):
        items = data(BATCH, random)
        sigma = sigma_at(torch.rand(BATCH, generator=random), FLOW).float()
        noise = [torch.randn(item["latents"].shape, generator=random) for item in items]
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - step / steps)
        optimizer.zero_grad()
        velocity_errors(model, NoisedBatch.of(TOY, items, sigma, noise), 1.0).mean().backward()
        optimizer.step()


def adapted(module: Any) -> Model:
    """The frozen model with one adapter, which does nothing yet."""
    module.requires_grad_(False)
    inject(module, AdapterConfig(rank=16, targets=("*",)), TOY.adapters.targets)
    initialise(module, 0, device_of=lambda name: torch.device("cpu"))
    return Model(module.eval(), BlockEngine(policy="full"), TOY, trainable_parameters(module))


def student_batch(
    model: Model, critic: Role, student: Role, items: Items, step: int
) -> tuple[NoisedBatch, Tensor]:
    """A micro-batch of the student, and the weights of its losses: an ordinary one, whose targets
    are made by the models without a backward.

    The prediction is moved by the difference between what critic and teacher make of it at a random
    level, over the size of the teacher's correction.
    """
    number = step % len(LEVELS)
    sigma, level = torch.full((len(items),), LEVELS[number]), torch.rand(len(items)) * 0.96 + 0.02
    with student.played(model):
        clean = steps_of(model, items, number)
        noise = [torch.randn_like(x) for x in clean]
        noised = [(1 - s) * x + s * eps for s, x, eps in zip(sigma, clean, noise, strict=True)]
        sample = predicted(model, noised, sigma, items)
    seen = noised_at(sample, level)
    with critic.played(model):
        fake = predicted(model, seen, level, items)
    with without_adapters(model.module):
        real = predicted(model, seen, level, items)
    targets = []
    for x, level_of_x, before, ours, theirs in zip(noised, sigma, sample, fake, real, strict=True):
        moved = before - (ours - theirs) / (before - theirs).abs().mean().clamp(min=1e-3)
        targets.append((x - moved) / level_of_x)
    batch = NoisedBatch.of(
        TOY, [{**item, "latents": x} for item, x in zip(items, clean, strict=True)], sigma, noise
    )
    return batch._replace(targets=targets), sigma**2 / 2


def distil(steps: int, base_steps: int, every: int) -> None:
    """Train base, critic and student, and print how far samples are from the data."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    module = make_model(TOY, ARCH)
    train_base(module, base_steps, random)
    model = adapted(module)
    checked = data(CHECKED, random)
    with without_adapters(module):
        rows = {
            f"teacher, {number} steps": distance(euler(model, checked, number), checked)
            for number in (32, 8, 2)
        }
    print("| samples | energy distance to the data |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value:.3f} |")
    print(
        f"\n| student's steps | critic's loss | energy distance of {len(LEVELS)} steps "
        f"|\n|---|---|---|",
        flush=True,
    )
    critic, student, losses = Role.of(model, 1e-3), Role.of(model, 5e-4), list[float]()
    for step in range(steps + 1):
        if step % every == 0:
            with student.played(model):
                found = distance(steps_of(model, checked, len(LEVELS)), checked)
            loss = f"{sum(losses) / len(losses):.3f}" if losses else ""
            print(f"| {step} | {loss} | {found:.3f} |", flush=True)
            losses.clear()
        for index in range(CRITIC_STEPS):
            items = data(BATCH, random)
            with student.played(model):
                samples = steps_of(model, items, len(LEVELS))
            batch = Batch(
                ids=[f"{step} {index} {i}" for i in range(BATCH)],
                items=[{**item, "latents": x} for item, x in zip(items, samples, strict=True)],
            )
            with critic.played(model):
                context = StepContext(step=step * CRITIC_STEPS + index, seed=0, flow=FLOW)
                losses.append(
                    training_step(
                        model, [batch], critic.optimizer, context, lr=1e-3, clip_norm=1.0
                    ).loss
                )
        targeted, weights = student_batch(model, critic, student, data(BATCH, random), step)
        with student.played(model):
            student.optimizer.zero_grad()
            (velocity_errors(model, targeted, 1.0) * weights).mean().backward()
            student.optimizer.step(5e-4 * (1 - step / (steps + 1)))


LONG, SHORT = (81, 480, 832), (49, 480, 832)
"""Frames, height and width of a clip."""
PLANS = (
    (LONG, "rtx4090", "none"),
    (LONG, "rtx4090", "fp8"),
    (LONG, "rtx6000ada", "none"),
    (LONG, "h100", "none"),
    (SHORT, "rtx4090", "none"),
    (SHORT, "rtx4090", "fp8"),
)
"""Clip, GPU (of 24, 48 and 80 GB) and format of the base; fp8 is also multiplied so."""
STUDENT_STEPS, PAPER_CRITIC_STEPS, GUIDED = 4, 5, 2
"""Steps of the student; steps of the critic for each update of the student; forwards of a teacher
with guidance."""


def print_plans() -> None:
    """Print memory and time of Wan 14B with three roles over one base, as the planner has them."""
    from ditkit_wan import WAN  # type: ignore[import-untyped,unused-ignore]

    print(
        "| clip | GPU | base | policy | streamed blocks | peak, GiB | available, GiB | host, GiB | "
        "update of one adapter, s | cycle, s |\n"
        "|---|---|---|---|---|---|---|---|---|---|"
    )
    for size, gpus, quantize in PLANS:
        print(
            f"| {'×'.join(map(str, size))} | {gpus} | {planned_row(WAN, gpus, size, quantize)} |",
            flush=True,
        )


def planned_row(spec: Any, gpus: str, size: tuple[int, int, int], quantize: Any) -> str:
    """The other cells of a row."""
    adapter, compute = LoraConfig(r=32), "dtype" if quantize == "none" else quantize
    execution = Execution(checkpointing="full", quantize=quantize, compute=compute)
    alone = plan(spec, "t2v-14b", gpus, adapter, execution=execution, size=size)
    # The critic's values and its optimizer's state; its gradients exist in its own updates alone,
    # like the student's.
    critic = sum(alone.devices[0].purposes[purpose] for purpose in ("adapters", "optimizer"))
    execution = replace(execution, reserve=(critic / 2**30,))
    try:
        step = plan(spec, "t2v-14b", gpus, adapter, execution=execution, size=size, fit=True)
    except UserError as error:
        return str(error)
    (device,), execution = step.devices, step.job.execution
    costs = step.profile.stages
    share = sum(cost.flops_forward for cost in costs) / sum(
        cost.flops_forward + cost.flops_backward for cost in costs
    )
    forward = step.seconds * share
    # The student stops after a random one of its steps.
    critics = PAPER_CRITIC_STEPS * (step.seconds + (STUDENT_STEPS + 1) / 2 * forward)
    student = step.seconds + ((STUDENT_STEPS + 1) / 2 + 1 + GUIDED) * forward
    cells = (
        "bf16" if execution.quantize == "none" else execution.quantize,
        execution.schedule,
        len(step.placement.streamed),
        f"{(device.peak + critic) / 2**30:.1f}",
        f"{(device.budget.available + critic) / 2**30:.1f}",
        f"{step.host / 2**30:.1f}",
        f"{step.seconds:.1f}",
        f"{critics + student:.0f}",
    )
    return " | ".join(map(str, cells))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plan", action="store_true", help="what Wan 14B needs on GPUs of 24, 48 and 80 GB"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--base-steps", type=int, default=1200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.plan:
        print_plans()
    else:
        distil(options.steps, options.base_steps, max(1, options.steps // 6))


if __name__ == "__main__":
    main()
