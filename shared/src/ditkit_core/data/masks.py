"""Loss masks: the file that says where a sample is learnt, found by column, by folder or next to
the clip, and read as the clip is."""

import re
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.data.media.clip import available, media_kind, read_clip
from ditkit_core.data.media.crop import CENTRE, Crop
from ditkit_core.data.side_names import Names
from ditkit_core.errors import UserError
from ditkit_core.models.conditions import Column

MASK = Column(
    name="mask",
    kind="video",
    aliases=("mask_path",),
    doc="White where the sample is learnt, black where its loss has the weight train.mask_weight: a video, or one image for all frames.",
)
"""A column of every model. It conditions none, so it is not one of `DataSpec.columns`."""

_NEXT_TO = re.compile(r"(.+)-mask(?:label)?", re.IGNORECASE)
"""Name of a mask next to its clip; `-masklabel` is OneTrainer's."""


def clip_of_mask(name: str, clips: Names) -> str | None:
    """The clip that a mask next to it belongs to (`cat` of `cat-mask`), by names without extension;
    None if it is no mask."""
    match = _NEXT_TO.fullmatch(name)
    return clips.find(match[1]) if match else None


def checked_mask(mask: Path, media: Path, size: tuple[int, int]) -> Path:
    """The mask (a readable image or video, long enough), if it can be laid over its clip, whose
    file has this height and width."""
    if media_kind(media) == "image" and media_kind(mask) == "video":
        raise UserError(
            f"mask {mask} is a video, but {media} is an image; convert the mask to an image"
        )
    _, height, width = available(mask, 1.0, at_most=1)
    # Both are cropped in the same way within their own frame, so that they fit only with one aspect
    # ratio, up to a pixel's rounding.
    if abs(height * size[1] - width * size[0]) > max(height, width, *size):
        raise UserError(
            f"mask {mask} has {width} x {height} pixels and {media} {size[1]} x {size[0]}, another "
            "aspect ratio, so that they do not align; make the mask as large as its clip"
        )
    return mask


def read_mask(
    path: Path,
    *,
    frames: int,
    fps: float,
    height: int,
    width: int,
    start_seconds: float,
    is_mirrored: bool = False,
    crop: Crop = CENTRE,
) -> Float[Tensor, "frames height width"]:
    """The mask of a clip from 0 (black) to 1 (white), with the frames, the size and the crop of
    `read_clip`; an image is repeated."""
    read = partial(
        read_clip,
        path,
        height=height,
        width=width,
        as_stored=True,
        is_mirrored=is_mirrored,
        crop=crop,
    )
    if media_kind(path) == "image":
        pixels = read(frames=1, fps=0.0).expand(-1, frames, -1, -1)
    else:
        pixels = read(frames=frames, fps=fps, start_seconds=start_seconds)
    return (pixels.mean(0) / 2 + 0.5).clamp(0, 1)


def at_latent_size(
    mask: Float[Tensor, "frames height width"], grid: tuple[int, ...]
) -> Float[Tensor, "1 latent_frames latent_height latent_width"]:
    """The mean of the mask over the pixels that each latent of a grid (frames, height, width)
    stands for.

    Video VAEs encode the first frame alone and then groups of equal length, so the first latent
    frame has the mask of the first frame.
    """
    frames, height, width = grid
    areas = torch.nn.functional.adaptive_avg_pool2d(mask[:, None], (height, width))[:, 0]
    if frames == 1:
        return areas[:1][None]
    later = areas[1:].reshape(frames - 1, -1, height, width).mean(1)
    return torch.cat([areas[:1], later])[None]
