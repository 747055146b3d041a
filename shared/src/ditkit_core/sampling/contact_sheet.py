"""Several images or clips side by side in one image."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

GAP = 4
"""Width of the white gap between two images, in pixels."""
SHEET_FRAMES = 6
"""Frames of a clip in a contact sheet, at most."""
SHEET_SIDE = 320
"""Longer side of a frame in a contact sheet, at most, in pixels."""


def grid(images: Sequence[Float[Tensor, "3 _ _"]], *, columns: int = 0) -> Float[Tensor, "3 height width"]:
    """Arrange images row by row, each centred in a cell of the size of the largest one.

    Args:
        images: At least one, values in [0, 1].
        columns: Images per row; 0 makes the grid about square.

    Returns:
        The grid on a white background, values in [0, 1].
    """
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


def evenly_spaced(clip: Float[Tensor, "3 frames height width"]) -> Float[Tensor, "3 few height width"]:
    """At most `SHEET_FRAMES` frames of a clip, evenly spaced, with the first and the last."""
    count = min(SHEET_FRAMES, clip.shape[1])
    return clip[:, [round(i * (clip.shape[1] - 1) / max(count - 1, 1)) for i in range(count)]]


def contact_sheet(clips: Sequence[Float[Tensor, "3 _ _ _"]]) -> Float[Tensor, "3 height width"]:
    """Arrange clips as rows with their frames side by side; large frames are scaled down.

    Args:
        clips: At least one, each of at most `SHEET_FRAMES` frames, values in [0, 1].

    Returns:
        The sheet on a white background, values in [0, 1].
    """
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
    return functional.interpolate(image[None], size, mode="bilinear", antialias=True, align_corners=False)[0]
