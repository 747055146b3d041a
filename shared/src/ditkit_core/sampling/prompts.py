"""Drawing samples: prompts through the trained model under the family's scheduler and VAE, to mp4 or png."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ditkit_core.config.field import setting
from ditkit_core.data.buckets import bucket_sizes, nearest_size
from ditkit_core.data.dataset import Sample
from ditkit_core.data.media.clip import available, media_kind, probe, status
from ditkit_core.data.references import ReferenceSize, encoded_sizes
from ditkit_core.errors import UserError
from ditkit_core.models.conditions import ClipInputs, Column, alternatives_of, named_columns
from ditkit_core.models.encoders import GenerationRequest
from ditkit_core.models.spec import SampleDefaults

_MAX_ASPECT = 8.0
"""Of what is drawn in the shape of a reference."""


@dataclass(frozen=True, kw_only=True)
class SamplePrompt:
    """What one prompt asks for, at the size that it is drawn."""

    prompt: str
    references: tuple[Path, ...]
    """Pictures to edit, in order."""
    frames: int
    height: int
    width: int
    files: Mapping[str, str] = field(default_factory=dict)
    """What the model is conditioned by: by column a path, or a text."""
    clip: Path | None = None
    """The clip whose caption it is, from which a model may take its first frame; None for a prompt."""
    start_seconds: float = 0.0
    """Where the clip begins."""
    own_frames: int = 0
    """Frames of the clip as it is trained; 0 where there is none."""

    def fitted(self, columns: Sequence[Column], fps: float, warn: Callable[[str], None] | None) -> "SamplePrompt":
        """The scene, as long as the clip is trained if the file or a video that goes with it has fewer frames than are to be drawn.

        Args:
            columns: What the model is conditioned by.
            fps: Frames per second of clips.
            warn: Told so in one line.
        """
        if self.clip is None or self.frames <= self.own_frames:
            return self
        last = round(self.start_seconds * fps) + self.frames
        videos = [self.files[each.name] for each in columns if each.kind == "video" and each.name in self.files]
        for path in (self.clip, *map(Path, videos)):
            there = last if media_kind(path) == "image" else available(path, fps, at_most=last).frames
            if there < last:
                if warn is not None:
                    warn(
                        f"sample.frames = {self.frames}: {path} has {there} frames at {fps:g} fps, and {last} would be needed; drawn "
                        f"are the {self.own_frames} that the clip is trained with"
                    )
                return replace(self, frames=self.own_frames)
        return self

    def controls(self, fps: float) -> ClipInputs:
        """What conditioners are given, at so many frames per second."""
        return ClipInputs(
            clip=self.clip, start_seconds=self.start_seconds, files=self.files, frames=self.frames, height=self.height,
            width=self.width, fps=fps if self.frames > 1 else 0.0,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The `[sample]` section: what is drawn when training ends, and by the sample command."""

    prompts: tuple[str, ...] = setting((), resume="free")
    """What to draw; empty draws the captions of the first `captions` samples, from their own references."""
    captions: int = setting(2, resume="free")
    """How many of the dataset's captions to draw when there are no prompts; 0 draws nothing."""
    references: tuple[str, ...] = setting((), resume="free", holds="path")
    """Pictures to edit: every prompt is drawn from all of them."""
    controls: tuple[str, ...] = setting((), resume="free", holds="path")
    """What every prompt is drawn with, as column=path: `input_image=cat.png` for a model that starts from a picture. Without prompts,
    what goes with the clips whose captions are drawn is used."""
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
    """Frames to draw; 0 means as many as in training, 1 draws a png. What goes with a clip must be as long."""
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
    device: str = setting("", resume="free")
    """Where previews are drawn, in a process of their own, while training goes on: `cuda:1`, a device that does not train, or `cpu`.
    Empty draws them on the devices that train, and training waits."""

    def __post_init__(self) -> None:
        least = {"images": 1} | dict.fromkeys(
            ("captions", "steps", "guidance", "shift", "frames", "height", "width", "every_steps"), 0
        )
        for name, value in least.items():
            if not getattr(self, name) >= value:
                raise UserError(f"sample.{name} = {getattr(self, name)} must be at least {value}")

        if not re.fullmatch("|cpu|cuda(:[0-9]{1,3})?", self.device, re.ASCII):
            raise UserError(
                f"sample.device = {self.device!r} must be a device that does not train, as cuda:1, or cpu; empty draws previews where the "
                "model is trained"
            )

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

    def files(self, columns: Sequence[Column]) -> dict[str, str]:
        """`controls`, checked against what the model is conditioned by.

        Raises:
            UserError: If one is no column=path of this model, its file is not there, or another says the same.
        """
        known = {name: meant[0] for name, meant in named_columns(columns).items()}
        files: dict[str, str] = {}
        for given in self.controls:
            name, equals, value = given.partition("=")
            if not equals or not value:
                raise UserError(f"sample.controls: {given!r} is not column=path; write {name or 'input_image'}=FILE")
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}" if close else f"it has {', '.join(known) or 'none'}"
                raise UserError(f"sample.controls: {name!r} is no column of this model; {hint}")
            if known[name].name in files:
                raise UserError(f"sample.controls: {name!r} is given twice; leave one of them out")
            if known[name].kind != "text":
                value = str(Path(value).expanduser())
                if status(Path(value)) is None:
                    raise UserError(f"sample.controls: {name} = {value} does not exist; correct the path")
            files[known[name].name] = value
        for column in columns:
            if column.name in files and (twice := next((other for other in column.instead_of if other in files), "")):
                raise UserError(
                    f"sample.controls: {column.name} and {twice} say the same in two ways; leave one of them out"
                )
        return files

    def scenes(
        self,
        samples: Iterable[Sample],
        *,
        size: tuple[int, int, int],
        size_step: int,
        columns: Sequence[Column] = (),
    ) -> list[SamplePrompt]:
        """What to draw: the prompts, or in their place the first samples that differ in caption or references.

        Args:
            samples: The dataset's; only looked at if there are no prompts.
            size: Frames, height and width of training, where the section leaves them open.
            size_step: The model's.
            columns: What the model is conditioned by; samples that differ in it are different, and each is drawn as long as it is
                unless `frames` says otherwise.

        Raises:
            UserError: If `controls` are not the model's, or a reference whose shape is wanted cannot be read.
        """
        frames, height, width = size
        references = tuple(Path(reference).expanduser() for reference in self.references)
        if references and not self.height and not self.width:
            info = probe(references[0])
            sizes = bucket_sizes(height, width, step=size_step, max_aspect=_MAX_ASPECT)
            height, width = nearest_size(info.height, info.width, sizes)

        files = self.files(columns)
        replaced = alternatives_of(columns, files)

        def scene(
            prompt: str, pictures: tuple[Path, ...], own_height: int, own_width: int, **of_clip: Any
        ) -> SamplePrompt:
            return SamplePrompt(
                **{"files": files, "frames": self.frames or frames, **of_clip},
                prompt=prompt,
                references=pictures,
                height=self.height or own_height,
                width=self.width or own_width,
            )

        if self.prompts:
            return [scene(prompt, references, height, width) for prompt in self.prompts]
        found: dict[tuple[str, tuple[Path, ...], str], SamplePrompt] = {}
        for sample in samples:
            pictures = references or sample.references
            size_of = (height, width) if references else (sample.height, sample.width)
            which = (sample.captions[0], pictures, sample.id if columns else "")
            of_clip: dict[str, Any] = {}
            if columns:
                own = {name: value for name, value in sample.controls.items() if name not in replaced}
                of_clip = {
                    "clip": sample.media, "start_seconds": sample.start_seconds, "files": {**own, **files},
                    "frames": self.frames or sample.frames, "own_frames": sample.frames,
                }  # fmt: skip
            found.setdefault(which, scene(sample.captions[0], pictures, *size_of, **of_clip))
        return list(found.values())[: self.captions]


Shape = tuple[tuple[int, int, int], tuple[tuple[int, int], ...]]
"""Frames, height and width of a clip, and height and width of each of its references."""


def shape_of(
    clip: Sample | SamplePrompt,
    files: Mapping[str, str],
    columns: Sequence[Column],
    reference_size: ReferenceSize | None,
) -> Shape:
    """The shape of a clip that is trained or drawn. What is a latent frame in front of it counts as a reference of its size.

    Args:
        clip: The clip.
        files: What goes with it.
        columns: What the model is conditioned by.
        reference_size: As in `ModelSpec`.
    """
    sizes: list[tuple[int, int]] = []
    if clip.references:
        assert reference_size is not None, "checked"
        sizes += encoded_sizes(clip.references, reference_size)
    in_front = sum(column.in_front and column.name in files for column in columns)
    return (clip.frames, clip.height, clip.width), (*sizes, *[(clip.height, clip.width)] * in_front)


def requests_of(
    scene: SamplePrompt,
    config: SampleConfig,
    *,
    conditions: Mapping[str, Tensor],
    negative: Mapping[str, Tensor] | None,
    references: Sequence[Tensor],
) -> list[GenerationRequest]:
    """What is generated for one prompt: as many samples as the section says, each with a seed of its own.

    Args:
        scene: The prompt.
        config: The `[sample]` section, resolved.
        conditions: The encoded tensors of its text, and of what else the model is conditioned on.
        negative: The same with the negative prompt; None if guidance does without.
        references: Latents of its reference images.
    """
    return [
        GenerationRequest(
            conditions=conditions,
            negative=negative,
            references=references,
            frames=scene.frames,
            height=scene.height,
            width=scene.width,
            steps=config.steps,
            guidance=config.guidance,
            shift=config.shift,
            seed=seed,
        )
        for seed in range(config.seed, config.seed + config.images)
    ]
