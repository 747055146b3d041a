"""What to sample: the `[sample]` section, its prompts, and the requests for the family's sampler."""

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
from ditkit_core.data.media.clip import available, media_kind, probe
from ditkit_core.data.media.files import status
from ditkit_core.data.references import ReferenceSize, encoded_sizes
from ditkit_core.errors import UserError
from ditkit_core.models.conditions import ClipInputs, Column, alternatives_of, named_columns
from ditkit_core.models.encoders import GenerationRequest
from ditkit_core.models.spec import SampleDefaults

_MAX_ASPECT = 8.0
"""Largest ratio of the sides of a sample that takes the shape of a reference."""


@dataclass(frozen=True, kw_only=True)
class SamplePrompt:
    """One prompt with its conditions, at the size of its samples."""

    prompt: str
    references: tuple[Path, ...]
    """Images to edit, in order."""
    frames: int
    height: int
    width: int
    files: Mapping[str, str] = field(default_factory=dict)
    """The model's other conditions: maps each column to a path or a text."""
    clip: Path | None = None
    """The clip with this caption, from which a model may take the first frame; None for a prompt of the user."""
    start_seconds: float = 0.0
    """Start of the clip in its file."""
    own_frames: int = 0
    """Frames of the clip in training; 0 without a clip."""

    def fitted(self, columns: Sequence[Column], fps: float, warn: Callable[[str], None] | None) -> "SamplePrompt":
        """This prompt, shortened to the clip's trained length if the clip or a condition video has too few frames for the sample.

        Args:
            columns: The model's condition columns.
            fps: Frames per second of clips.
            warn: Called with one line if the prompt is shortened.
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
                        f"sample.frames = {self.frames}: {path} has {there} frames at {fps:g} fps, and {last} would be needed; the "
                        f"sample gets the {self.own_frames} frames that the clip is trained with"
                    )
                return replace(self, frames=self.own_frames)
        return self

    def controls(self, fps: float) -> ClipInputs:
        """The input of the conditioners, at this number of frames per second."""
        return ClipInputs(
            clip=self.clip,
            start_seconds=self.start_seconds,
            files=self.files,
            frames=self.frames,
            height=self.height,
            width=self.width,
            fps=fps if self.frames > 1 else 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The `[sample]` section: the samples that are generated when training ends, and by the sample command."""

    prompts: tuple[str, ...] = setting((), resume="free")
    """Prompts to sample. If empty, the captions of the first `captions` samples are used, with their own references."""
    captions: int = setting(2, resume="free")
    """Number of the dataset's captions to sample when there are no prompts; 0 generates no samples."""
    references: tuple[str, ...] = setting((), resume="free", holds="path")
    """Images to edit; every prompt is sampled with all of them."""
    controls: tuple[str, ...] = setting((), resume="free", holds="path")
    """Extra conditions of every prompt, as column=path: `input_image=cat.png` for a model that starts from an image. Without prompts,
    each caption is sampled with the conditions of its own clip."""
    images: int = setting(1, resume="free")
    """Number of samples per prompt, with the seeds `seed`, `seed` + 1, …; more than one image is also shown in a grid."""
    negative: str = setting("", resume="free")
    """Negative prompt of classifier-free guidance."""
    guidance: float = setting(0.0, resume="free")
    """Guidance strength; 1 turns guidance off (classifier-free guidance takes twice the time), 0 means the model's default."""
    steps: int = setting(0, resume="free")
    """Steps of the scheduler; 0 means the model's default."""
    shift: float = setting(0.0, resume="free")
    """Noise-level shift of the scheduler; 0 means the checkpoint's default."""
    frames: int = setting(0, resume="free")
    """Frames per sample; 0 means as many as in training, 1 writes a PNG. Condition videos must have as many frames."""
    height: int = setting(0, resume="free")
    """Height in pixels; 0 means that of training; if the width is 0 as well, the shape of the first reference."""
    width: int = setting(0, resume="free")
    """Width in pixels; 0 works as for the height."""
    seed: int = setting(0, resume="free")
    """Seed of the initial noise."""
    vae_tiling: bool = setting(False, resume="free")
    """Whether the VAE decodes overlapping tiles and blends them: takes less memory, but seams may be visible."""
    every_steps: int = setting(0, resume="free")
    """Optimizer steps between two previews, which sample the same prompts during training, the first before it starts. 0 samples at the
    end only."""
    device: str = setting("", resume="free")
    """Device that generates previews in a separate process while training continues: `cuda:1`, a device that does not train, or `cpu`.
    Empty generates them on the devices that train, and training waits."""

    def __post_init__(self) -> None:
        least = {"images": 1} | dict.fromkeys(
            ("captions", "steps", "guidance", "shift", "frames", "height", "width", "every_steps"), 0
        )
        for name, value in least.items():
            if not getattr(self, name) >= value:
                raise UserError(f"sample.{name} = {getattr(self, name)} must be at least {value}")

        if not re.fullmatch("|cpu|cuda(:[0-9]{1,3})?", self.device, re.ASCII):
            raise UserError(
                f"sample.device = {self.device!r} must be a device that does not train, such as cuda:1, or cpu; if it is empty, previews "
                "are generated on the devices that train"
            )

    def check(self, *, frame_step: int, size_step: int, takes_references: bool) -> None:
        """Refuse settings that the model cannot sample with.

        Args:
            frame_step: Frames per latent frame of the model; 0 if it only generates images.
            size_step: The model's step of height and width, in pixels.
            takes_references: Whether the model edits images.

        Raises:
            UserError: If a size is impossible, naming the nearest possible one, or if references are not used.
        """
        if not frame_step and self.frames > 1:
            raise UserError(f"sample.frames = {self.frames}: this model generates images; set 1, or 0")
        if frame_step and self.frames and (self.frames - 1) % frame_step:
            near = max(1, round((self.frames - 1) / frame_step) * frame_step + 1)
            raise UserError(f"sample.frames = {self.frames}: frames are 1 + a multiple of {frame_step}; try {near}")
        # Refused and not rounded: a sample of another size than asked for would go unnoticed.
        for key, size in (("height", self.height), ("width", self.width)):
            if size % size_step:
                near = max(size_step, round(size / size_step) * size_step)
                raise UserError(f"sample.{key} = {size} must be a multiple of {size_step}; try {near}")
        if self.references and not takes_references:
            raise UserError("sample.references: this model takes no reference images; leave it empty")

    def resolved(self, defaults: SampleDefaults, warn: Callable[[str], None]) -> "SampleConfig":
        """The section with the model's defaults for unset values.

        Args:
            defaults: The settings of the model's authors.
            warn: Called with one line for each setting that this model does not use.
        """
        guidance = self.guidance or defaults.guidance
        if defaults.guided_by == "nothing" and guidance != defaults.guidance:
            warn(f"sample.guidance = {self.guidance:g} is not used: this is a distilled model, which samples without")
            guidance = defaults.guidance
        if defaults.guided_by != "negative" and self.negative:
            warn("sample.negative is not used: this model is not guided by a negative prompt; leave it empty")
        return replace(self, steps=self.steps or defaults.steps, guidance=guidance)

    def uses_negative(self, defaults: SampleDefaults) -> bool:
        """Whether sampling also calls the model with the negative prompt; the section must be resolved."""
        return defaults.guided_by == "negative" and self.guidance > 1

    def files(self, columns: Sequence[Column]) -> dict[str, str]:
        """`controls` as a mapping from column to path or text, checked against the model's condition columns.

        Raises:
            UserError: If an entry is not column=path of this model, its file does not exist, or another entry gives the same condition.
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
            # Compared by the column's own name: two aliases of one column are a repetition too.
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
                    f"sample.controls: {column.name} and {twice} give the same condition; leave one of them out"
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
        """What to sample: the prompts, or without prompts the captions of the first samples that differ in caption or references.

        Args:
            samples: The dataset's samples; only read if there are no prompts.
            size: Frames, height and width of training, used for those that the section leaves at 0.
            size_step: The model's step of height and width, in pixels.
            columns: The model's condition columns. With any, samples that share a caption count as different, and each keeps its own
                number of frames unless `frames` is set.

        Raises:
            UserError: If `controls` do not fit the model, or a reference whose shape is needed cannot be read.
        """
        frames, height, width = size
        references = tuple(Path(reference).expanduser() for reference in self.references)
        # An edit should have the shape of the image that it edits, with about as many pixels as in training.
        if references and not self.height and not self.width:
            info = probe(references[0])
            sizes = bucket_sizes(height, width, step=size_step, max_aspect=_MAX_ASPECT)
            height, width = nearest_size(info.height, info.width, sizes)

        files = self.files(columns)
        replaced = alternatives_of(columns, files)

        def sample_prompt(
            prompt: str, images: tuple[Path, ...], own_height: int, own_width: int, **clip_fields: Any
        ) -> SamplePrompt:
            return SamplePrompt(
                **{"files": files, "frames": self.frames or frames, **clip_fields},
                prompt=prompt,
                references=images,
                height=self.height or own_height,
                width=self.width or own_width,
            )

        if self.prompts:
            return [sample_prompt(prompt, references, height, width) for prompt in self.prompts]
        found: dict[tuple[str, tuple[Path, ...], str], SamplePrompt] = {}
        for sample in samples:
            images = references or sample.references
            own_size = (height, width) if references else (sample.height, sample.width)
            # Windows of one file share caption and references: a preview of each would show the same.
            which = (sample.captions[0], images, sample.id if columns else "")
            clip_fields: dict[str, Any] = {}
            if columns:
                own = {name: value for name, value in sample.controls.items() if name not in replaced}
                clip_fields = {
                    "clip": sample.media,
                    "start_seconds": sample.start_seconds,
                    "files": {**own, **files},
                    "frames": self.frames or sample.frames,
                    "own_frames": sample.frames,
                }
            found.setdefault(which, sample_prompt(sample.captions[0], images, *own_size, **clip_fields))
        return list(found.values())[: self.captions]


Shape = tuple[tuple[int, int, int], tuple[tuple[int, int], ...]]
"""Frames, height and width of a clip, and height and width of each of its references."""


def shape_of(
    clip: Sample | SamplePrompt,
    files: Mapping[str, str],
    columns: Sequence[Column],
    reference_size: ReferenceSize | None,
) -> Shape:
    """The shape of a clip that is trained or sampled. A condition that is a latent frame in front of it counts as a reference.

    Args:
        clip: The clip.
        files: Its condition files, by column.
        columns: The model's condition columns.
        reference_size: As in `ModelSpec`.
    """
    sizes: list[tuple[int, int]] = []
    if clip.references:
        assert reference_size is not None, "checked"
        sizes += encoded_sizes(clip.references, reference_size)
    in_front = sum(column.in_front and column.name in files for column in columns)
    return (clip.frames, clip.height, clip.width), (*sizes, *[(clip.height, clip.width)] * in_front)


def requests_of(
    prompt: SamplePrompt,
    config: SampleConfig,
    *,
    conditions: Mapping[str, Tensor],
    negative: Mapping[str, Tensor] | None,
    references: Sequence[Tensor],
) -> list[GenerationRequest]:
    """The requests for one prompt: `sample.images` of them, with consecutive seeds.

    Args:
        prompt: The prompt.
        config: The `[sample]` section, resolved.
        conditions: The encoded tensors of its text and of the model's other conditions.
        negative: The same with the negative prompt; None if guidance does not use it.
        references: Latents of its reference images.
    """
    return [
        GenerationRequest(
            conditions=conditions,
            negative=negative,
            references=references,
            frames=prompt.frames,
            height=prompt.height,
            width=prompt.width,
            steps=config.steps,
            guidance=config.guidance,
            shift=config.shift,
            seed=seed,
        )
        for seed in range(config.seed, config.seed + config.images)
    ]
