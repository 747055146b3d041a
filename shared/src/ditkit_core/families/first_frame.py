"""The image that a clip begins with: read from its column or from the clip itself, and as clean
latents in front of the noised ones, for models whose tokens have noise levels of their own."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ditkit_core.data.media.clip import read_clip
from ditkit_core.data.media.crop import CENTRE, Crop
from ditkit_core.encoding.cache import key
from ditkit_core.errors import UserError
from ditkit_core.families.vae import DiffusersVae
from ditkit_core.io.console import NullProgress
from ditkit_core.models.conditions import ClipConditioner, ClipInputs, Column

INPUT_IMAGE = Column(
    name="input_image",
    kind="image",
    aliases=("first_image", "start_image"),
    moment="begin",
    doc="The image that the clip begins with; defaults to the clip's first frame where the model needs one.",
)

_FRAMES = (INPUT_IMAGE.name, "end_image")
"""Columns of images that are frames of their clip, and so are cropped like it (`data.crops`);
others show a subject in a picture of its own, which is cropped to its centre."""
ANY_RATE = 1.0
"""Frame rate at which a single frame is read: only its start time matters."""


def column_image(
    controls: ClipInputs, column: str, *, is_aligned: bool = False
) -> Float[Tensor, "3 1 height width"]:
    """The image of a column, or the first frame of its video, cropped to the clip's size; pixels in
    [-1, 1].

    Args:
        controls: The clip.
        column: Name of the image's column.
        is_aligned: Whether it is cropped where the clip is; the first and the last frame always
            are.

    Raises:
        UserError: If it cannot be read.
    """
    path = Path(controls.files[column])
    return read_clip(
        path,
        frames=1,
        fps=ANY_RATE,
        height=controls.height,
        width=controls.width,
        is_mirrored=controls.is_mirrored,
        crop=Crop(*controls.crop) if is_aligned or column in _FRAMES else CENTRE,
    )


def own_frame(controls: ClipInputs, *, last: bool = False) -> Float[Tensor, "3 1 height width"]:
    """The first or the last frame of the clip's training window.

    Raises:
        UserError: If it cannot be read.
    """
    assert controls.clip is not None
    # Frames are 1 / fps apart, so the last one starts a frame before the window's end.
    after = (controls.frames - 1) / controls.fps if last and controls.frames > 1 else 0.0
    return read_clip(
        controls.clip,
        frames=1,
        fps=controls.fps or ANY_RATE,
        height=controls.height,
        width=controls.width,
        start_seconds=controls.start_seconds + after,
        is_mirrored=controls.is_mirrored,
        crop=Crop(*controls.crop),
    )


def image_or_own(
    controls: ClipInputs, column: str, *, last: bool = False
) -> Float[Tensor, "3 1 height width"]:
    """The image of a column if the clip has one, otherwise the clip's first or last frame."""
    return (
        column_image(controls, column)
        if column in controls.files
        else own_frame(controls, last=last)
    )


def column_or_own(controls: ClipInputs, column: str, *, why: str) -> str:
    """The source that `image_or_own` reads: the column, or "" for the clip itself.

    Args:
        controls: The clip.
        column: Name of the column.
        why: Purpose of the image, for the message.

    Raises:
        UserError: If the clip has no such column and there is no clip.
    """
    if column in controls.files:
        return column
    if controls.clip is None:
        raise UserError(
            f"{why} needs an image: set it in sample.controls, or with --control {column}=FILE"
        )
    return ""


class Outlined:
    """A stand-in for an encoder when conditions are only checked: it returns zeros in the shape of
    the latents."""

    identity = "nothing"
    tokens, dim = 1, 1

    def __init__(self, channels: int, strides: tuple[int, int]):
        """Stand in for a VAE.

        Args:
            channels: Channels of its latents.
            strides: Frames per latent frame, and pixels per latent pixel.
        """
        self.channels, self.strides = channels, strides

    def load(self) -> None:
        """There are no weights."""

    def unload(self) -> None:
        """There are no weights."""

    def encode(
        self,
        items: Sequence[Float[Tensor, "3 frames height width"]],
        advance: Callable[[float], None] = NullProgress.advance,
    ) -> list[dict[str, Tensor]]:
        """`latents` [channels, 1 + k, height / stride, width / stride], and one token of an
        `image`."""
        (item,) = items
        _, frames, height, width = item.shape
        of_frames, of_pixels = self.strides
        size = (1 + (frames - 1) // of_frames, height // of_pixels, width // of_pixels)
        return [
            {
                "latents": torch.zeros(self.channels, *size),
                "image": torch.zeros(self.tokens, self.dim),
            }
        ]


class VaeConditioner(ClipConditioner):
    """Base of the conditioners that encode with the VAE."""

    def __init__(self, vae: DiffusersVae | Outlined):
        """Use a VAE, which is loaded and freed with this conditioner."""
        self.vae = vae

    @cached_property
    def identity(self) -> str:
        """Digest of the VAE and of how it is used."""
        return key(self.vae.identity, self.kind, self.settings)

    @property
    def settings(self) -> str:
        """Other settings that change the result."""
        return ""

    def load(self) -> None:
        self.vae.load()

    def unload(self) -> None:
        self.vae.unload()

    def latents(
        self, pixels: Float[Tensor, "3 frames height width"]
    ) -> Float[Tensor, "channels f h w"]:
        """Normalised latents of a clip, on the CPU."""
        return self.vae.encode([pixels])[0]["latents"]

    def check(self, controls: ClipInputs) -> None:
        """Read the files by the code that encodes them, with zeros in place of latents.

        Raises:
            UserError: If a file cannot be read.
        """
        if self.uses(controls):
            # The encoding code itself, so that a check cannot accept what encoding would refuse.
            outlined = copy(self)
            outlined.vae = Outlined(self.vae.channels, self.vae.strides)
            outlined.condition(controls)


class FirstFrame(VaeConditioner):
    """`first_frame`: clean latents of the first image; without it, the model generates from text
    alone."""

    kind = "first-frame"
    optional = True

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The image, or the clip itself; nothing for a sample that is generated from text."""
        if INPUT_IMAGE.name in controls.files:
            return (INPUT_IMAGE.name,)
        return () if controls.clip is None else ("",)

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        return {"first_frame": self.latents(image_or_own(controls, INPUT_IMAGE.name))}


def first_frame_of(
    item: Mapping[str, Tensor], latents: Float[Tensor, "channels frames height width"]
) -> Float[Tensor, "channels 1 height width"] | None:
    """Latents of a sample's first frame, if it has one. An image has none: there would be nothing
    left to learn."""
    return item.get("first_frame") if latents.shape[1] > 1 else None


def first_frame_mask(item: Mapping[str, Tensor]) -> Float[Tensor, "1 frames 1 1"] | None:
    """A loss mask: 1 where the velocity is trained, 0 on a given first frame; None without one."""
    latents = item["latents"]
    if first_frame_of(item, latents) is None:
        return None
    return F.pad(
        latents.new_ones(1, latents.shape[1] - 1, 1, 1, dtype=torch.float32), (0, 0, 0, 0, 1, 0)
    )
