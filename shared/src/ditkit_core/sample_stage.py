"""Drawing samples: prompts through the trained model under the family's scheduler and VAE, to mp4 or png."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ditkit_core.buckets import bucket_sizes, nearest_size
from ditkit_core.dataset import Sample
from ditkit_core.errors import UserError
from ditkit_core.grid import grid
from ditkit_core.media import probe, write_image, write_video
from ditkit_core.model import Engine, SampleDefaults, SampleJob, Sampler
from ditkit_core.settings import setting

_MAX_ASPECT = 8.0
"""Of what is drawn in the shape of a reference."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What one prompt asks for, at the size that it is drawn."""

    prompt: str
    references: tuple[Path, ...]
    """Pictures to edit, in order."""
    frames: int
    height: int
    width: int


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The `[sample]` section: what is drawn when training ends, and by the sample command."""

    prompts: tuple[str, ...] = setting((), resume="free")
    """What to draw; empty draws the captions of the first `captions` samples, from their own references."""
    captions: int = setting(2, resume="free")
    """How many of the dataset's captions to draw when there are no prompts; 0 draws nothing."""
    references: tuple[str, ...] = setting((), resume="free")
    """Pictures to edit: every prompt is drawn from all of them."""
    images: int = setting(1, resume="free")
    """How many to draw of each prompt, with the seeds `seed`, `seed` + 1, …; of more than one picture a grid is written too."""
    negative: str = setting("", resume="free")
    """Negative prompt of classifier-free guidance."""
    guidance: float = setting(0.0, resume="free")
    """Strength of guidance; 1 does without (classifier-free guidance takes twice the time), 0 means the model's own."""
    steps: int = setting(0, resume="free")
    """Steps of the scheduler; 0 means the model's own."""
    shift: float = setting(0.0, resume="free")
    """Noise-level shift of the scheduler; 0 means the checkpoint's own."""
    frames: int = setting(0, resume="free")
    """Frames to draw; 0 means as many as in training, 1 draws a png."""
    height: int = setting(0, resume="free")
    """Height in pixels; 0 means that of training, and beside a width of 0 the shape of the first reference."""
    width: int = setting(0, resume="free")
    """Width in pixels; 0 as for the height."""
    seed: int = setting(0, resume="free")
    """Seed of the initial noise."""
    vae_tiling: bool = setting(False, resume="free")
    """Whether the VAE decodes overlapping tiles that are blended: takes less memory, and seams may show."""
    every_steps: int = setting(0, resume="free")
    """Optimizer steps between two previews: the same pictures drawn while training goes on, the first before it. 0 draws at the end
    alone."""

    def __post_init__(self) -> None:
        least = {"images": 1} | dict.fromkeys(
            ("captions", "steps", "guidance", "shift", "frames", "height", "width", "every_steps"), 0
        )
        for name, value in least.items():
            if not getattr(self, name) >= value:
                raise UserError(f"sample.{name} = {getattr(self, name)} must be at least {value}")

    def check(self, *, frame_step: int, size_step: int, takes_references: bool) -> None:
        """Refuse what the model cannot draw.

        Args:
            frame_step: The model's; 0 if it draws still images alone.
            size_step: The model's.
            takes_references: Whether the model edits pictures.

        Raises:
            UserError: Naming the nearest size that it can draw.
        """
        if not frame_step and self.frames > 1:
            raise UserError(f"sample.frames = {self.frames}: this model draws still images; set 1, or 0")
        if frame_step and self.frames and (self.frames - 1) % frame_step:
            near = max(1, round((self.frames - 1) / frame_step) * frame_step + 1)
            raise UserError(f"sample.frames = {self.frames}: frames are 1 + a multiple of {frame_step}; try {near}")
        for key, size in (("height", self.height), ("width", self.width)):
            if size % size_step:
                near = max(size_step, round(size / size_step) * size_step)
                raise UserError(f"sample.{key} = {size} must be a multiple of {size_step}; try {near}")
        if self.references and not takes_references:
            raise UserError("sample.references: this model draws from text alone; leave it empty")

    def resolved(self, defaults: SampleDefaults, warn: Callable[[str], None]) -> "SampleConfig":
        """The section with the model's own values where it leaves them open.

        Args:
            defaults: How the model's authors draw.
            warn: Told, in one line, of a setting that this model does not use.
        """
        guidance = self.guidance or defaults.guidance
        if defaults.guided_by == "nothing" and guidance != defaults.guidance:
            warn(f"sample.guidance = {self.guidance:g} is not used: this is a distilled model, which draws without")
            guidance = defaults.guidance
        if defaults.guided_by != "negative" and self.negative:
            warn("sample.negative is not used: this model is not guided by a negative prompt; leave it empty")
        return replace(self, steps=self.steps or defaults.steps, guidance=guidance)

    def uses_negative(self, defaults: SampleDefaults) -> bool:
        """Whether guidance, resolved, calls the model with the negative prompt too."""
        return defaults.guided_by == "negative" and self.guidance > 1

    def scenes(self, samples: Iterable[Sample], *, size: tuple[int, int, int], size_step: int) -> list[Scene]:
        """What to draw: the prompts, or in their place the first samples that differ in caption or references.

        Args:
            samples: The dataset's; only looked at if there are no prompts.
            size: Frames, height and width of training, where the section leaves them open.
            size_step: The model's.

        Raises:
            UserError: If a reference whose shape is wanted cannot be read.
        """
        frames, height, width = size
        references = tuple(Path(reference).expanduser() for reference in self.references)
        if references and not self.height and not self.width:
            info = probe(references[0])
            sizes = bucket_sizes(height, width, step=size_step, max_aspect=_MAX_ASPECT)
            height, width = nearest_size(info.height, info.width, sizes)

        def scene(prompt: str, pictures: tuple[Path, ...], own_height: int, own_width: int) -> Scene:
            return Scene(
                prompt=prompt,
                references=pictures,
                frames=self.frames or frames,
                height=self.height or own_height,
                width=self.width or own_width,
            )

        if self.prompts:
            return [scene(prompt, references, height, width) for prompt in self.prompts]
        found: dict[tuple[str, tuple[Path, ...]], Scene] = {}
        for sample in samples:
            pictures = references or sample.references
            size_of = (height, width) if references else (sample.height, sample.width)
            found.setdefault((sample.captions[0], pictures), scene(sample.captions[0], pictures, *size_of))
        return list(found.values())[: self.captions]


def draw_samples(
    model: Any,
    run: Engine,
    sampler: Sampler,
    scenes: Sequence[Scene],
    config: SampleConfig,
    *,
    conditions: Callable[[str], Mapping[str, Tensor]],
    references: Callable[[Sequence[Path]], Sequence[Tensor]],
    negative: Mapping[str, Tensor] | None,
    fps: float,
    folder: Path,
    stem: str,
    on_step: Callable[[], None],
) -> list[Path]:
    """Draw each scene as often as the section says, one file each, and a grid of all pictures if there are several.

    Args:
        model: The model, with the weights to draw with; put into eval mode and back.
        run: The engine for its forward.
        sampler: The family's.
        scenes: What to draw.
        config: The `[sample]` section, resolved.
        conditions: A text to its encoded tensors.
        references: Pictures to their latents.
        negative: The negative prompt's encoded tensors; None if guidance does without.
        fps: Frames per second of the files.
        folder: Where to.
        stem: First part of the files' names.
        on_step: Called after each step of each sample.

    Returns:
        The files, in the order of the scenes; the grid last.
    """
    files: list[Path] = []
    pictures: list[Tensor] = []
    training = model.training
    model.eval()
    try:
        for number, scene in enumerate(scenes):
            wanted, latents = conditions(scene.prompt), references(scene.references)
            for seed in range(config.seed, config.seed + config.images):
                job = SampleJob(
                    conditions=wanted, negative=negative, references=latents, frames=scene.frames, height=scene.height,
                    width=scene.width, steps=config.steps, guidance=config.guidance, shift=config.shift, seed=seed,
                )  # fmt: skip
                with torch.no_grad():
                    pixels = sampler.decode(sampler.denoise(model, run, job, on_step))
                if not pixels.isfinite().all():
                    raise UserError(
                        f"the sample of {scene.prompt!r} is not finite: the weights are broken, or the adapter is"
                    )
                name = f"{stem}-{number}-{_slug(scene.prompt)}" + (f"-seed-{seed}" if config.images > 1 else "")
                if pixels.shape[1] == 1:
                    pictures.append(pixels[:, 0])
                    files.append(folder / f"{name}.png")
                    write_image(files[-1], pixels[:, 0])
                else:
                    files.append(folder / f"{name}.mp4")
                    write_video(files[-1], pixels, fps)
    finally:
        model.train(training)
        sampler.release()
    if len(pictures) > 1:
        files.append(folder / f"{stem}-grid.png")
        write_image(files[-1], grid(pictures, columns=config.images if config.images > 1 else 0))
    return files


def _slug(prompt: str) -> str:
    """A prompt as part of a file name, on any file system."""
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:40].rstrip("-") or "sample"
