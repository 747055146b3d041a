"""Writes samples as files: an image or a video each, and all of them in one image."""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from ditkit_core.data.media.clip import write_image, write_video
from ditkit_core.errors import UserError
from ditkit_core.io.files import write_text
from ditkit_core.io.run_dir import sample_list
from ditkit_core.models.encoders import GenerationRequest, Sampler
from ditkit_core.sampling.denoise import DenoiserStage, generate
from ditkit_core.sampling.shares import ALONE, RenderedSample, SampleShares


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """One sample, and the prompt that its file is named after."""

    number: int
    """Index of the prompt, from 0."""
    prompt: str
    job: GenerationRequest


@dataclass(frozen=True, kw_only=True)
class SampleFiles:
    """Where samples are written, and how their files are named."""

    folder: Path
    stem: str
    """First part of the file names."""
    fps: float
    images: int = 1

    def path(self, request: PromptRequest, suffix: str) -> Path:
        """The file of one sample; the seed is part of its name where a prompt has several."""
        seed = f"-seed-{request.job.seed}" if self.images > 1 else ""
        name = f"{self.stem}-{request.number}-{prompt_slug(request.prompt)}{seed}{suffix}"
        return self.folder / name


def render_samples(
    stages: Sequence[DenoiserStage],
    sampler: Sampler,
    requests: Sequence[PromptRequest],
    to: SampleFiles,
    on_step: Callable[[], bool | None],
    shares: SampleShares = ALONE,
) -> list[Path]:
    """Generate samples, one file each, and all of them in one image: a contact sheet of videos, a
    row for each, or a grid of images.

    STEM.json next to them lists what was generated: for each file its prompt, its seed and how the
    VAE decoded it; and which image shows all. Each rank writes the files of its own samples, and
    the first one that list and that image.

    Args:
        stages: The transformers that take the steps, with the weights to sample with.
        on_step: Called after each step of each sample; True ends all of them there, on all ranks.

    Returns:
        The files, in the order of the requests, the contact sheet or the grid last; on ranks other
        than the first, the files of their own. Empty if `on_step` ended them: then there is no
        STEM.json either.
    """
    local_indices, rendered = shares.local_indices(len(requests)), list[RenderedSample]()
    num_remaining = len(local_indices)
    with closing(
        generate(sampler, [requests[index].job for index, _ in local_indices], stages, on_step)
    ) as results:
        for (index, counts), pixels in zip(local_indices, results, strict=False):
            num_remaining -= 1
            if counts:
                rendered.append(_rendered(pixels, requests[index], to, sampler.decoder.decoded))
    if shares.ranks.any(num_remaining > 0):
        return []
    samples = shares.gathered(rendered, len(requests))
    files = [to.folder / sample.about["file"] for sample in samples]
    if files and shares.ranks.is_first:
        files += _overview([sample.frames for sample in samples], to)
        write_text(
            to.folder / f"{to.stem}.json",
            sample_list([sample.about for sample in samples], files[-1].name),
        )
    return files


def _rendered(
    pixels: Tensor, request: PromptRequest, to: SampleFiles, decoded: str
) -> RenderedSample:
    """Write one sample, and keep what the list and the image of all need of it."""
    file = write_sample(pixels, request, partial(to.path, request), to.fps)
    about = {
        "file": file.name,
        "prompt": request.prompt,
        "seed": request.job.seed,
        "decoded": decoded,
    }
    # not all frames: clips are long
    return RenderedSample(about, evenly_spaced(pixels).float().cpu())


def _overview(clips: Sequence[Tensor], to: SampleFiles) -> list[Path]:
    """One image of every run of prompts: the report embeds it, and a reader compares steps by it.
    None of a single image."""
    if any(clip.shape[1] > 1 for clip in clips):
        path, image = to.folder / f"{to.stem}-sheet.png", contact_sheet(clips)
    elif len(clips) > 1:
        columns = to.images if to.images > 1 else 0
        path = to.folder / f"{to.stem}-grid.png"
        image = grid([clip[:, 0] for clip in clips], columns=columns)
    else:
        return []
    write_image(path, image)
    return [path]


def write_sample(
    pixels: Float[Tensor, "3 frames height width"],
    request: PromptRequest,
    path_with: Callable[[str], Path],
    fps: float,
) -> Path:
    """Write one sample: a PNG if it has one frame, else an MP4.

    Args:
        path_with: The file's path by its suffix.
        fps: Frames per second of a clip with all the frames that were asked for.
    """
    # Checked here: as an image, NaN would silently become black.
    if not pixels.isfinite().all():
        raise UserError(
            f"the sample of {request.prompt!r} is not finite: the weights are broken, or the "
            f"adapter is"
        )
    if pixels.shape[1] == 1:
        path = path_with(".png")
        write_image(path, pixels[:, 0])
        return path
    path = path_with(".mp4")
    # Some models only generate a part of a clip's frames: slower playback keeps the length of the
    # clip.
    write_video(path, pixels, fps * pixels.shape[1] / request.job.frames)
    return path


def prompt_slug(prompt: str) -> str:
    """A prompt as part of a file name, on any file system."""
    # ASCII only and at most 40 characters: Windows limits paths, and case-insensitive file systems
    # merge names.
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:40].rstrip("-") or "sample"


GAP = 4
"""Width of the white gap between two images, in pixels."""
SHEET_FRAMES = 6
"""Frames of a clip in a contact sheet, at most."""
SHEET_SIDE = 320
"""Longer side of a frame in a contact sheet, at most, in pixels."""


def grid(
    images: Sequence[Float[Tensor, "3 _ _"]], *, columns: int = 0
) -> Float[Tensor, "3 height width"]:
    """Arrange images (at least one) row by row on white, each centred in a cell of the size of the
    largest one; 0 columns: about square."""
    columns = columns or math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    # Cells of one size: prompts may have different aspect ratios, and columns should still line up.
    height, width = max(p.shape[1] for p in images), max(p.shape[2] for p in images)
    canvas = torch.ones(3, rows * (height + GAP) - GAP, columns * (width + GAP) - GAP)
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        top = row * (height + GAP) + (height - image.shape[1]) // 2
        left = column * (width + GAP) + (width - image.shape[2]) // 2
        canvas[:, top : top + image.shape[1], left : left + image.shape[2]] = image
    return canvas


def evenly_spaced(
    clip: Float[Tensor, "3 frames height width"],
) -> Float[Tensor, "3 few height width"]:
    """At most `SHEET_FRAMES` frames of a clip, evenly spaced, with the first and the last."""
    count = min(SHEET_FRAMES, clip.shape[1])
    return clip[:, [round(i * (clip.shape[1] - 1) / max(count - 1, 1)) for i in range(count)]]


def contact_sheet(clips: Sequence[Float[Tensor, "3 _ _ _"]]) -> Float[Tensor, "3 height width"]:
    """Arrange clips, each of at most `SHEET_FRAMES` frames, as rows on white with their frames side
    by side; large frames are scaled down."""
    columns = max(clip.shape[1] for clip in clips)
    cells: list[Tensor] = []
    for clip in clips:
        frames = [_smaller(frame) for frame in clip.detach().float().cpu().unbind(1)]
        # White cells fill the rows of shorter clips, so that every clip starts a new row.
        cells += [*frames, *(torch.ones_like(frames[0]) for _ in range(columns - len(frames)))]
    return grid(cells, columns=columns)


def _smaller(image: Float[Tensor, "3 _ _"]) -> Float[Tensor, "3 _ _"]:
    height, width = image.shape[1:]
    longer = max(height, width)
    if longer <= SHEET_SIDE:
        return image
    size = tuple(max(1, round(side * SHEET_SIDE / longer)) for side in (height, width))
    return functional.interpolate(
        image[None], size, mode="bilinear", antialias=True, align_corners=False
    )[0]
