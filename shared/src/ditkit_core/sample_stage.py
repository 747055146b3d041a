"""Drawing samples: prompts through the trained model under the family's scheduler and VAE, to mp4 or png."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.media import write_image, write_video
from ditkit_core.model import Engine, SampleJob, Sampler
from ditkit_core.settings import setting


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The `[sample]` section: what is drawn when training ends, and by the sample command."""

    prompts: tuple[str, ...] = setting((), resume="free")
    """What to draw; empty draws the captions of the first `captions` samples."""
    captions: int = setting(2, resume="free")
    """How many of the dataset's captions to draw when there are no prompts; 0 draws nothing."""
    negative: str = setting("", resume="free")
    """Negative prompt of classifier-free guidance."""
    guidance: float = setting(5.0, resume="free")
    """Strength of classifier-free guidance; 1 does without, at half the time."""
    steps: int = setting(30, resume="free")
    """Steps of the scheduler."""
    shift: float = setting(0.0, resume="free")
    """Noise-level shift of the scheduler; 0 means the checkpoint's own."""
    frames: int = setting(0, resume="free")
    """Frames to draw; 0 means as many as in training, 1 draws a png."""
    height: int = setting(0, resume="free")
    """Height in pixels; 0 means that of training."""
    width: int = setting(0, resume="free")
    """Width in pixels; 0 means that of training."""
    seed: int = setting(0, resume="free")
    """Seed of the initial noise."""

    def __post_init__(self) -> None:
        if self.steps < 1 or min(self.captions, self.frames, self.height, self.width, self.shift) < 0:
            raise UserError("sample.steps must be at least 1; captions, frames, height, width and shift at least 0")

    def check(self, *, frame_step: int, size_step: int) -> None:
        """Refuse sizes that the model cannot draw.

        Raises:
            UserError: Naming the nearest size that it can.
        """
        if self.frames and (self.frames - 1) % frame_step:
            near = max(1, round((self.frames - 1) / frame_step) * frame_step + 1)
            raise UserError(f"sample.frames = {self.frames}: frames are 1 + a multiple of {frame_step}; try {near}")
        for key, size in (("height", self.height), ("width", self.width)):
            if size % size_step:
                near = max(size_step, round(size / size_step) * size_step)
                raise UserError(f"sample.{key} = {size} must be a multiple of {size_step}; try {near}")

    def chosen(self, captions: Sequence[str]) -> tuple[str, ...]:
        """The prompts, or the first captions in their place."""
        return self.prompts or tuple(dict.fromkeys(captions))[: self.captions]


def draw_samples(
    model: Any,
    run: Engine,
    sampler: Sampler,
    prompts: Sequence[str],
    conditions: Callable[[str], Mapping[str, Tensor]],
    config: SampleConfig,
    *,
    size: tuple[int, int, int],
    fps: float,
    folder: Path,
    stem: str,
    on_step: Callable[[], None],
) -> list[Path]:
    """Draw one file per prompt.

    Args:
        model: The model, with the weights to draw with; put into eval mode and back.
        run: The engine for its forward.
        sampler: The family's.
        prompts: What to draw.
        conditions: A text to its encoded tensors.
        config: The `[sample]` section.
        size: (frames, height, width) where the section leaves them to training.
        fps: Frames per second of the files.
        folder: Where to.
        stem: First part of the files' names.
        on_step: Called after each step of each sample.

    Returns:
        The files, in the order of the prompts.
    """
    chosen = (config.frames, config.height, config.width)
    frames, height, width = (own or trained for own, trained in zip(chosen, size, strict=True))
    negative = conditions(config.negative) if config.guidance > 1 else None
    files = []
    training = model.training
    model.eval()
    try:
        for number, prompt in enumerate(prompts):
            job = SampleJob(
                conditions=conditions(prompt), negative=negative, frames=frames, height=height, width=width,
                steps=config.steps, guidance=config.guidance, shift=config.shift, seed=config.seed,
            )  # fmt: skip
            with torch.no_grad():
                pixels = sampler.decode(sampler.denoise(model, run, job, on_step))
            if not pixels.isfinite().all():
                raise UserError(f"the sample of {prompt!r} is not finite: the weights are broken, or the adapter is")
            path = folder / f"{stem}-{number}-{_slug(prompt)}"
            if pixels.shape[1] == 1:
                files.append(path.with_name(f"{path.name}.png"))
                write_image(files[-1], pixels[:, 0])
            else:
                files.append(path.with_name(f"{path.name}.mp4"))
                write_video(files[-1], pixels, fps)
    finally:
        model.train(training)
    return files


def _slug(prompt: str) -> str:
    """A prompt as part of a file name, on any file system."""
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:40].rstrip("-") or "sample"
