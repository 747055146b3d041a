"""Pictures side by side in one."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

GAP = 4
"""Pixels of white between two pictures."""
SHEET_FRAMES = 6
"""Frames of a clip in a contact sheet, at most."""
SHEET_SIDE = 320
"""Longer side of a frame in a contact sheet, at most, in pixels."""


def grid(pictures: Sequence[Float[Tensor, "3 _ _"]], *, columns: int = 0) -> Float[Tensor, "3 height width"]:
    """Lay pictures out row by row, each in the middle of a cell as large as the largest of them.

    Args:
        pictures: At least one, values in [0, 1].
        columns: How many lie side by side; 0 makes rows and columns about as many.
    """
    columns = columns or math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    height, width = max(p.shape[1] for p in pictures), max(p.shape[2] for p in pictures)
    whole = torch.ones(3, rows * (height + GAP) - GAP, columns * (width + GAP) - GAP)
    for number, picture in enumerate(pictures):
        row, column = divmod(number, columns)
        top = row * (height + GAP) + (height - picture.shape[1]) // 2
        left = column * (width + GAP) + (width - picture.shape[2]) // 2
        whole[:, top : top + picture.shape[1], left : left + picture.shape[2]] = picture
    return whole


def evenly_spaced(clip: Float[Tensor, "3 frames height width"]) -> Float[Tensor, "3 few height width"]:
    """The frames of a clip that stand for it: the first, the last, and between them as many as a contact sheet shows."""
    count = min(SHEET_FRAMES, clip.shape[1])
    return clip[:, [round(i * (clip.shape[1] - 1) / max(count - 1, 1)) for i in range(count)]]


def contact_sheet(clips: Sequence[Float[Tensor, "3 _ _ _"]]) -> Float[Tensor, "3 height width"]:
    """Clips as rows, their frames side by side, made smaller where they are large.

    Args:
        clips: At least one, each of at most `SHEET_FRAMES` frames, values in [0, 1].
    """
    columns = max(clip.shape[1] for clip in clips)
    cells: list[Tensor] = []
    for clip in clips:
        frames = [_smaller(frame) for frame in clip.detach().float().cpu().unbind(1)]
        cells += [*frames, *(torch.ones_like(frames[0]) for _ in range(columns - len(frames)))]
    return grid(cells, columns=columns)


def _smaller(picture: Float[Tensor, "3 _ _"]) -> Float[Tensor, "3 _ _"]:
    height, width = picture.shape[1:]
    longer = max(height, width)
    if longer <= SHEET_SIDE:
        return picture
    size = tuple(max(1, round(side * SHEET_SIDE / longer)) for side in (height, width))
    return functional.interpolate(picture[None], size, mode="bilinear", antialias=True, align_corners=False)[0]
