"""Conditions of Animate besides text: a reference image, poses, a face, and for replacement a
background and a mask.

Sources: Wan-Video/Wan2.2, wan/animate.py; aigc-apps/VideoX-Fun, scripts/wan2.2/train_animate.py.
"""

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, UInt8
from torch import Tensor

from ditkit_core.data.media.crop import CENTRE
from ditkit_core.encoding.cache import key
from ditkit_core.families.first_frame import VaeConditioner, column_or_own, own_frame
from ditkit_core.models.conditions import ClipConditioner, ClipInputs
from ditkit_wan.conditioning.control import REFERENCE
from ditkit_wan.conditioning.images import ClipVision
from ditkit_wan.conditioning.media import fitted, missing_condition, video

POSE, FACE = "animate_pose_video", "animate_face_video"
BACKGROUND, MASK = "animate_inpaint_video", "animate_mask_video"
_WHY = "animation"


def reference_image(controls: ClipInputs) -> Float[Tensor, "3 1 height width"]:
    """The reference image, scaled to fit and centred on black; without one, the clip's first frame.
    Pixels in [-1, 1].

    Raises:
        UserError: If it cannot be read as a still image.
    """
    if REFERENCE not in controls.files:
        return own_frame(controls)
    pixels = fitted(Path(controls.files[REFERENCE]), controls.height, controls.width, canvas=-1.0)
    return pixels.flip(-1) if controls.is_mirrored else pixels


def mask_channels(
    mask: Float[Tensor, "frames height width"], stride: int
) -> Float[Tensor, "4 f h w"]:
    """A mask in pixels at the size of latents: the first frame in all four channels, then one
    channel for each of four frames.

    Args:
        mask: 1 where the model is given the pixel, 4k + 1 frames.
        stride: Pixels to a row or column of latents.
    """
    height, width = mask.shape[1:]
    small = F.interpolate(mask[:, None], size=(height // stride, width // stride), mode="nearest")[
        :, 0
    ]
    return rearrange(
        torch.cat([small[:1].expand(4, -1, -1), small[1:]]), "(f c) h w -> c f h w", c=4
    )


class Subject(VaeConditioner):
    """`y` [20, 1 + f, h, w] and `animate_reference`: a mask and latents of the reference image,
    then of what is given of the clip.

    Nothing is given of it, which is grey pixels as in image to video; or its background, where the
    mask is black.
    """

    kind = "animate"

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The image or the clip itself, and background and mask if there are any.

        Raises:
            UserError: If there is no image, or one of background and mask.
        """
        used = [column for column in (BACKGROUND, MASK) if column in controls.files]
        if len(used) == 1:
            (lacking,) = {BACKGROUND, MASK} - set(used)
            why = "and a character is replaced by background and mask together"
            raise missing_condition(controls, [lacking], why)
        return (column_or_own(controls, REFERENCE, why=_WHY), *used)

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        self.uses(controls)
        reference = self.latents(reference_image(controls))
        size = (controls.frames, controls.height, controls.width)
        pixels, mask = torch.zeros(3, *size), torch.zeros(size)
        if MASK in controls.files:
            pixels = video(controls, BACKGROUND)
            mask = 1 - ((video(controls, MASK)[0] + 1) / 2).clamp(0, 1)
        latents = self.latents(pixels)
        front = torch.cat([torch.ones(4, *reference.shape[1:]), reference])
        clip = torch.cat([mask_channels(mask, self.vae.strides[1]), latents])
        return {"y": torch.cat([front, clip], 1), "animate_reference": reference}


def _required(controls: ClipInputs, column: str, use: str) -> tuple[str]:
    if column not in controls.files:
        raise missing_condition(controls, [column], use)
    return (column,)


class BodyPoses(VaeConditioner):
    """`pose`: latents of a video of the body's poses."""

    kind = "animate-pose"

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        return _required(controls, POSE, "which this model moves by")

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        return {"pose": self.latents(video(controls, POSE))}


class Faces(ClipConditioner):
    """`face` [3, frames, size, size]: pixels of the face at each frame, as bytes; the model's
    motion encoder reads them in each step."""

    kind = "face"

    def __init__(self, size: int):
        """Set height and width of the pictures."""
        self.size = size

    @cached_property
    def identity(self) -> str:
        """There are no weights."""
        return key(self.kind, f"{self.size} pixels, bytes")

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        return _required(controls, FACE, "which this model takes expressions from")

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        return {"face": self._bytes(controls)}

    def check(self, controls: ClipInputs) -> None:
        """Read the video."""
        self.uses(controls)
        self._bytes(controls)

    def _bytes(self, controls: ClipInputs) -> UInt8[Tensor, "3 frames size size"]:
        # Cut out of the clip already, so that it is not cropped where the clip is.
        square = replace(controls, height=self.size, width=self.size, crop=CENTRE)
        pixels = video(square, FACE)
        return ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


class SubjectVision(ClipVision):
    """`image`: CLIP tokens of the reference image as the VAE gets it."""

    def images(self, controls: ClipInputs) -> list[Float[Tensor, "3 1 height width"]]:
        """The reference image."""
        return [reference_image(controls)]
