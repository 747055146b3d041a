"""What to sample: the `[sample]` section, its prompts, and the requests for the family's
sampler."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from ditkit_core.data.buckets import bucket_sizes, nearest_size
from ditkit_core.data.dataset import Sample
from ditkit_core.data.media.clip import available, media_kind, probe
from ditkit_core.data.media.crop import CENTRE
from ditkit_core.data.media.files import status
from ditkit_core.data.references import ReferenceSize, encoded_sizes
from ditkit_core.errors import UserError, argument
from ditkit_core.io.files import local_path
from ditkit_core.models.conditions import ClipInputs, Column, alternatives_of, named_columns
from ditkit_core.models.encoders import GenerationRequest
from ditkit_core.sampling.config import SampleConfig

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
    """The clip with this caption, from which a model may take the first frame; None for a prompt of
    the user."""
    start_seconds: float = 0.0
    crop: tuple[float, float] = CENTRE
    """Where the clip is cropped, and what is aligned with it."""
    own_frames: int = 0
    """Frames of the clip in training; 0 without a clip."""

    def fitted(
        self, columns: Sequence[Column], fps: float, warn: Callable[[str], None] | None
    ) -> "SamplePrompt":
        """This prompt, shortened to the clip's trained length if the clip or a condition video has
        too few frames for the sample.

        `warn` is called with one line then.
        """
        if self.clip is None or self.frames <= self.own_frames:
            return self
        last = round(self.start_seconds * fps) + self.frames
        videos = [
            self.files[column.name]
            for column in columns
            if column.kind == "video" and column.name in self.files
        ]
        for path in (self.clip, *map(Path, videos)):
            there = (
                last if media_kind(path) == "image" else available(path, fps, at_most=last).frames
            )
            if there < last:
                if warn is not None:
                    warn(
                        f"sample.frames = {self.frames}: {path} has {there} frames at {fps:g} fps, "
                        f"and {last} would be needed; the "
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
            crop=self.crop,
        )


def control_files(config: SampleConfig, columns: Sequence[Column]) -> dict[str, str]:
    """`sample.controls` as a mapping from column to path or text, checked against the model's
    condition columns."""
    columns_by_name = {name: meant[0] for name, meant in named_columns(columns).items()}
    files: dict[str, str] = {}
    for entry in config.controls:
        name, equals, value = entry.partition("=")
        if not equals or not value:
            raise UserError(
                f"{argument('sample.controls')}: {entry!r} is not column=path; write "
                f"{name or 'input_image'}=FILE"
            )
        if name not in columns_by_name:
            close = difflib.get_close_matches(name, columns_by_name, n=1)
            hint = (
                f"did you mean {close[0]!r}"
                if close
                else f"it has {', '.join(columns_by_name) or 'none'}"
            )
            raise UserError(
                f"{argument('sample.controls')}: {name!r} is no column of this model; {hint}"
            )
        # Compared by the column's own name: two aliases of one column are a repetition too.
        if columns_by_name[name].name in files:
            raise UserError(
                f"{argument('sample.controls')}: {name!r} is given twice; leave one of them out"
            )
        if columns_by_name[name].kind != "text":
            value = str(local_path(value))
            if status(Path(value)) is None:
                raise UserError(
                    f"{argument('sample.controls')}: {name} = {value} does not exist; correct the "
                    f"path"
                )
        files[columns_by_name[name].name] = value
    for column in columns:
        if column.name in files and (
            twice := next((other for other in column.alternative_to if other in files), "")
        ):
            raise UserError(
                f"{argument('sample.controls')}: {column.name} and {twice} give the same "
                f"condition; leave one of them out"
            )
    return files


def choose_prompts(
    config: SampleConfig,
    samples: Iterable[Sample],
    *,
    size: tuple[int, int, int],
    size_step: int,
    columns: Sequence[Column] = (),
    shape_reference: int = 0,
) -> list[SamplePrompt]:
    """What to sample: the prompts, or without prompts the captions of the first samples that differ
    in caption or references.

    Args:
        samples: The dataset's samples; only read if there are no prompts.
        size: Frames, height and width of training, used for those that the section leaves at 0.
        columns: The model's condition columns. With any, samples that share a caption count as
            different, and each keeps its own number of frames unless `frames` is set.
        shape_reference: `DataSpec.shape_reference`.
    """
    references = tuple(local_path(reference) for reference in config.references)
    for reference in references:
        if status(reference) is None:
            raise UserError(
                f"{argument('sample.references')}: {reference} does not exist; correct the path"
            )
    frames, height, width = size
    # An edit should have the shape of the image that it edits, with about as many pixels as in
    # training.
    if references and not config.height and not config.width:
        info = probe(references[shape_reference])
        sizes = bucket_sizes(height, width, step=size_step, max_aspect=_MAX_ASPECT)
        height, width = nearest_size(info.height, info.width, sizes)
    files = control_files(config, columns)
    plain = SamplePrompt(
        prompt="",
        references=references,
        files=files,
        frames=config.frames or frames,
        height=config.height or height,
        width=config.width or width,
    )
    if config.prompts:
        return [replace(plain, prompt=prompt) for prompt in config.prompts]
    replaced = alternatives_of(columns, files)
    prompts_by_key: dict[tuple[str, tuple[Path, ...], str], SamplePrompt] = {}
    for sample in samples:
        prompt = replace(
            plain, prompt=sample.captions[0], references=references or sample.references
        )
        if not references:
            prompt = replace(
                prompt, height=config.height or sample.height, width=config.width or sample.width
            )
        if columns:
            sample_controls = {
                name: value for name, value in sample.controls.items() if name not in replaced
            }
            frames = config.frames or sample.frames
            prompt = replace(
                prompt,
                clip=sample.media,
                files={**sample_controls, **files},
                frames=frames,
                own_frames=sample.frames,
            )
            prompt = replace(prompt, start_seconds=sample.start_seconds, crop=sample.crop)
        # Windows of one file share caption and references: a preview of each would show the same.
        prompts_by_key.setdefault(
            (prompt.prompt, prompt.references, sample.id if columns else ""), prompt
        )
    return list(prompts_by_key.values())[: config.captions]


Shape = tuple[tuple[int, int, int], tuple[tuple[int, int], ...]]
"""Frames, height and width of a clip, and height and width of each of its references."""


def shape_of(
    clip: Sample | SamplePrompt, columns: Sequence[Column], reference_size: ReferenceSize | None
) -> Shape:
    """The shape of a clip that is trained or sampled. A condition that is a latent frame in front
    of it counts as a reference."""
    sizes: list[tuple[int, int]] = []
    if clip.references:
        assert reference_size is not None, "checked"
        sizes += encoded_sizes(clip.references, reference_size)
    files = clip.controls if isinstance(clip, Sample) else clip.files
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
