"""What the programs share that train the tiny base of a demo that teaches a motion: clips, updates,
and how good a VAE is."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.data.media.synthetic import COLOURS, SHAPES
from ditkit_core.families.demo_motions import (
    DIRECTIONS,
    FRAMES,
    NEW,
    SIDE,
    TRAVEL,
    Scene,
    motion_caption,
    moving,
)

OFFSET = 10.0
"""Largest distance between a path and the image's centre, in pixels."""


def orthogonalized(update: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """About the nearest matrix with singular values 1, by five Newton-Schulz steps.

    Source: https://kellerjordan.github.io/posts/muon, whose coefficients these are.
    """
    wide = update if update.shape[0] <= update.shape[1] else update.T
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (2.0315 * gram @ gram - 4.7750 * gram) @ wide
    return wide if update.shape[0] <= update.shape[1] else wide.T


class Optimizer:
    """Orthogonalised updates for some parameters, Adam for the others."""

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        rates: tuple[float, float],
    ):
        self.matrices, self.rates = list(matrices), rates
        self.momenta = [torch.zeros_like(matrix) for matrix in matrices]
        self.adam = torch.optim.Adam(list(others), betas=(0.9, 0.98))

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update, with the learning rates times a factor; gradients are gone afterwards."""
        for matrix, momentum in zip(self.matrices, self.momenta, strict=True):
            assert matrix.grad is not None
            momentum.lerp_(matrix.grad, 0.05)
            update = orthogonalized(matrix.grad.lerp(momentum, 0.95).flatten(1))
            matrix.sub_(
                update.view_as(matrix),
                alpha=self.rates[0] * factor * 0.2 * max(update.shape) ** 0.5,
            )
            matrix.grad = None
        for group in self.adam.param_groups:
            group["lr"] = self.rates[1] * factor
        self.adam.step()
        self.adam.zero_grad()


def schedule(step: int, steps: int) -> float:
    """Factor of the learning rate: 50 steps of warm-up, then half a cosine to 1 %."""
    return min(1.0, (step + 1) / 50) * max(0.01, 0.5 + 0.5 * math.cos(math.pi * step / steps))


@dataclass
class Log:
    """Prints the average loss and the time every hundred steps."""

    stage: str
    steps: int
    total: float = 0.0
    began: float = 0.0

    def add(self, step: int, loss: Tensor, measure: Callable[[], str]) -> None:
        """Count a step, from 0; `measure` says more every 500 steps and at the end."""
        self.began = self.began or time.monotonic()
        self.total += float(loss.detach())
        last = step + 1 == self.steps
        if (step + 1) % 100 == 0 or last:
            more = measure() if (step + 1) % 500 == 0 or last else ""
            minutes = (time.monotonic() - self.began) / 60
            print(
                f"{self.stage} {step + 1}/{self.steps}, {minutes:.1f} min, loss "
                f"{self.total / 100:.4f} {more}",
                flush=True,
            )
            self.total = 0.0


def pixels(frames: np.ndarray) -> Float[Tensor, "... 3 frames height width"]:
    """Painted frames as the VAE takes them, in [-1, 1]."""
    return (
        torch.from_numpy(np.round(frames).astype(np.float32) / 127.5 - 1)
        .movedim(-1, -4)
        .contiguous()
    )


def corners(
    random: np.random.Generator, count: int, size: int
) -> Float[Tensor, "batch 3 frames size size"]:
    """Clips of shapes that move in any of eight directions and reach into the upper left corner of
    that size."""
    clips = []
    for _ in range(count):
        angle = random.integers(8) * math.pi / 4
        way = np.round([math.sin(angle), math.cos(angle)])
        velocity = random.uniform(0.95, 1.05) * TRAVEL / (FRAMES - 1) * way
        start = random.uniform(-14, size + 14, 2) - velocity * random.uniform(-1, FRAMES)
        scene = Scene(
            colour=str(random.choice(list(COLOURS))),
            shape=str(random.choice(SHAPES)),
            start=(start[0], start[1]),
            velocity=(velocity[0], velocity[1]),
        )
        clips.append(scene.paint(SIDE, SIDE, range(FRAMES))[:, :size, :size])
    return pixels(np.stack(clips))


def held_out_clips() -> Float[Tensor, "40 3 frames side side"]:
    """Clips as the demo's, the new motion included, along paths of their own."""
    random = np.random.default_rng(999)
    scenes = [
        moving(
            str(random.choice(list(COLOURS))),
            str(random.choice(SHAPES)),
            way,
            random.uniform(-OFFSET, OFFSET) / 2,
        )
        for way in list(DIRECTIONS) * 8
    ]
    return pixels(np.stack([scene.paint(SIDE, SIDE, range(FRAMES)) for scene in scenes]))


def psnr(vae: Any, clips: Float[Tensor, "batch 3 frames height width"]) -> float:
    """Decibels between clips and what the VAE decodes from their latents, at 8 bits; the average of
    clips."""
    with torch.no_grad():
        made = torch.cat(
            [vae.decode(vae.encode(clip[None]).latent_dist.mode()).sample for clip in clips]
        )
    levels = ((made.clamp(-1, 1) + 1) * 127.5).round() - (clips + 1) * 127.5
    return float((-10 * (levels / 255).square().flatten(1).mean(1).log10()).mean())


def latents_of_base(
    vae: Any, clips_each: int
) -> tuple[Float[Tensor, "clips channels frames height width"], list[str]]:
    """Latents of clips of the known motions, not normalised, and their captions: `clips_each` of
    each look and motion."""
    random, latents, captions = np.random.default_rng(1), [], []
    looks = [(c, s, way) for way in DIRECTIONS if way != NEW for c in COLOURS for s in SHAPES]
    for look in looks * clips_each:
        scene = moving(*look, random.uniform(-OFFSET, OFFSET))
        with torch.no_grad():
            latents.append(
                vae.encode(pixels(scene.paint(SIDE, SIDE, range(FRAMES)))[None]).latent_dist.mode()[
                    0
                ]
            )
        captions.append(motion_caption(*look))
    return torch.stack(latents), captions
