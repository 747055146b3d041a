"""Reads images and videos of a clip's columns, and the clip's own frames, at the size and the
frames of the clip."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ditkit_core.data.media.clip import media_kind, read_clip
from ditkit_core.data.media.crop import Crop
from ditkit_core.errors import UserError
from ditkit_core.families.first_frame import ANY_RATE, column_image
from ditkit_core.models.conditions import ClipInputs


def missing_condition(controls: ClipInputs, columns: Sequence[str], why: str) -> UserError:
    """The error for a clip or sample that lacks a condition of the model.

    Args:
        controls: The clip, or the sample to generate.
        columns: One of them is enough.
        why: Purpose of the image, for the message.
    """
    whose = controls.clip or "a sample"
    one = "that column" if len(columns) == 1 else "one of the columns"
    remedy = (
        f"add {one}"
        if controls.clip
        else f"give {one} in sample.controls, or with --control {columns[0]}=…"
    )
    return UserError(f"{whose} has no {' and no '.join(columns)}, {why}; {remedy}")


def video(
    controls: ClipInputs, column: str, *, frames: int = 0
) -> Float[Tensor, "3 frames height width"]:
    """The video of a column at the clip's frame rate, from the clip's first frame on, cropped to
    its size where the clip is; pixels in [-1, 1].

    An image is repeated for all frames.

    Args:
        controls: The clip.
        column: Name of the video's column.
        frames: Number of frames; 0 means as many as the clip has.

    Raises:
        UserError: If it cannot be read, or is shorter than the clip.
    """
    path, frames = Path(controls.files[column]), frames or controls.frames
    if media_kind(path) == "image":
        return column_image(controls, column, is_aligned=True).expand(-1, frames, -1, -1)
    return read_clip(
        path,
        frames=frames,
        fps=controls.fps or ANY_RATE,
        height=controls.height,
        width=controls.width,
        start_seconds=controls.start_seconds,
        is_mirrored=controls.is_mirrored,
        crop=Crop(*controls.crop),
    )


def fitted(
    path: Path, height: int, width: int, *, canvas: float
) -> Float[Tensor, "3 1 height width"]:
    """An image scaled to fit and centred on a canvas; pixels in [-1, 1].

    Args:
        path: A still image.
        height: Height of the canvas in pixels.
        width: Width of it.
        canvas: Value of its pixels: 1 is white, as VACE takes its references, -1 is black, as
            Animate does.

    Raises:
        UserError: If it cannot be read as a still image.
    """
    from ditkit_core.data.media import image as still

    if media_kind(path) != "image":
        raise UserError(f"{path} is a video; a reference is an image: extract a frame of it")
    pixels = (
        torch.from_numpy(np.ascontiguousarray(still.read_image(path))).permute(2, 0, 1).float()
        / 127.5
        - 1
    )
    scale = min(height / pixels.shape[1], width / pixels.shape[2])
    size = tuple(max(1, int(length * scale)) for length in pixels.shape[1:])
    if size != pixels.shape[1:]:
        pixels = F.interpolate(pixels[None], size=size, mode="bilinear", align_corners=False)[0]
    picture = torch.full((3, 1, height, width), canvas)
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    picture[:, 0, top : top + size[0], left : left + size[1]] = pixels
    return picture
