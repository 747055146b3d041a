"""Loss masks in the cache: at the size of their clip's latents, from 0 to 1. The weight of the rest
is applied when they are read."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.nn import functional

from ditkit_core.data.masks import MASK, at_latent_size, read_mask
from ditkit_core.data.media.crop import Crop
from ditkit_core.models.conditions import ClipConditioner, ClipInputs

LOSS_WEIGHTS = "loss_weights"
"""Tensor of a training item: the weight of the squared error at each place of its latents,
broadcast over channels."""


class MaskEncoder(ClipConditioner):
    """Reads the mask of a clip, and averages it over the pixels of each latent; a `Conditioner`
    without weights."""

    kind = MASK.name

    def __init__(self, media_identity: str, grids: Mapping[tuple[int, int, int], tuple[int, ...]]):
        """Encode for the VAE of this identity, whose latents have these grids by the frames, height
        and width of their clip."""
        self.identity, self._grids = media_identity, grids

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The column of the mask, if the clip has one."""
        return (MASK.name,) if MASK.name in controls.files else ()

    def check(self, controls: ClipInputs) -> None:
        """As `Conditioner.check`; the clip has a mask."""
        _read(controls)

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        """`mask` [1, frames, height, width] on the grid of the clip's latents; reads its file."""
        grid = self._grids[controls.frames, controls.height, controls.width]
        return {MASK.name: at_latent_size(_read(controls), grid)}


def _read(controls: ClipInputs) -> Tensor:
    return read_mask(
        Path(controls.files[MASK.name]),
        frames=controls.frames,
        fps=controls.fps,
        height=controls.height,
        width=controls.width,
        start_seconds=controls.start_seconds,
        is_mirrored=controls.is_mirrored,
        crop=Crop(*controls.crop),
    )


def weighted(item: Mapping[str, Tensor], mask: Tensor, outside: float) -> dict[str, Tensor]:
    """A training item with the loss weights of a mask: 1 where it is white, and `outside` where it
    is black.

    Latent frames that are put in front of the clip's (VACE's reference images) are outside.
    """
    in_front = item["latents"].shape[1] - mask.shape[1]
    padded = functional.pad(mask, (0, 0, 0, 0, in_front, 0))
    return {**item, LOSS_WEIGHTS: outside + (1 - outside) * padded}
