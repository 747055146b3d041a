"""A toy of two experts, and the folder with everything that its commands need."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toy_world import World

from ditkit_core.commands import cli
from ditkit_core.models.encoders import Denoiser, GenerationRequest
from ditkit_core.models.spec import Expert, SampleDefaults
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, ToyInputs, ToySampler, official_name
from ditkit_core.testing.world import make_model

BOUNDARY = 0.875
TWO = ToyArch(depth=1)
EXPERTS = (
    Expert(name="high_noise", part="transformer", min_sigma=BOUNDARY, max_sigma=1.0, guidance=4.0),
    Expert(name="low_noise", part="transformer_2", min_sigma=0.0, max_sigma=BOUNDARY, guidance=3.0),
)
STEPS = 10
"""Steps that are sampled: levels 1.0 and 0.9 are the high-noise expert's."""


class Watching(ToySampler):
    """Remembers which weights took each step, under which guidance; its history of velocities is a
    scheduler's state."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.steps: list[tuple[int, float, Tensor, float]] = []

    def denoise(self, job: GenerationRequest) -> Generator[float, Denoiser, Tensor]:
        latents = torch.randn(
            4, 1, job.height // 4, job.width // 4, generator=torch.Generator().manual_seed(job.seed)
        )
        history = torch.zeros_like(latents)
        for step in range(job.steps):
            level = 1 - step / job.steps
            denoiser = yield level
            weight: Any = denoiser.model.embed.patch.weight
            # A model that is kept over a `yield` stays in memory with the next.
            weight = weight.detach().clone()
            self.steps.append((job.seed, level, weight, denoiser.guidance))
            velocity = denoiser(
                ToyInputs([latents], torch.tensor([level]), [job.conditions["text"]])
            )[0]
            latents = latents - (velocity + 0.5 * history) / job.steps
            history = velocity
        return latents


class TwoExperts(World):
    """A world whose checkpoint is a pair of experts of different weights."""

    def __init__(self, folder: Path, captions: int = 2):
        super().__init__(folder, captions)
        self.sampler = Watching()
        self.spec = altered(
            self.spec,
            presets={"one": ToyArch(), "two": TWO},
            experts=lambda arch: EXPERTS if arch == TWO else (),
            sampler=lambda *_: self.sampler,
            sample_defaults=lambda arch: SampleDefaults(steps=STEPS, guidance=2.0),
        )
        state = {
            official_name(name): t.contiguous()
            for name, t in make_model(TOY, TWO).state_dict().items()
        }
        self.base = {"high_noise": state, "low_noise": {name: t * 0.9 for name, t in state.items()}}
        for name, tensors in self.base.items():
            save_file(tensors, folder / f"toy_{name}.safetensors")

    def run(self, command: str, *flags: str) -> int:
        given = {flag for flag in flags if flag.startswith("--")}
        settings = {
            "--model.preset": "two", "--model.dtype": "fp32",
            "--data.folder": str(self.folder / "clips"),
            "--model.transformer": str(self.folder / "toy_high_noise.safetensors"),
            "--adapter.dropout": "0.1",
            "--model.transformer_2": str(self.folder / "toy_low_noise.safetensors"),
            "--adapter.rank": "2",
            "--data.height": "16", "--data.width": "16", "--data.frames": "1",
            "--log.tensorboard": "false",
            "--encode.cache": str(self.folder / "cache"), "--log.every_steps": "1",
            "--sample.captions": str(self.captions),
            "--optim.lr": "1e-2",
        }  # fmt: skip
        common = [part for pair in settings.items() if pair[0] not in given for part in pair]
        return cli.run(self.spec, command, [*common, *flags])

    def exported(self, run: str, expert: str) -> dict[str, Tensor]:
        """The adapter that a run of both hands over."""
        return load_file(self.folder / run / "exports" / f"{run}_{expert}.safetensors")
