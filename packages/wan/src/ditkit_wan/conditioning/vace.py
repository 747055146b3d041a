"""Conditions of VACE besides text: a video to keep or regenerate in parts, a mask of these parts,
and reference images.

Source: Wan-Video/Wan2.1, wan/vace.py.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from ditkit_core.families.first_frame import VaeConditioner
from ditkit_core.models.conditions import ClipInputs
from ditkit_wan.conditioning.media import fitted, video

VIDEO, MASK = "vace_video", "vace_video_mask"
REFERENCES = ("vace_reference_image", "vace_reference_image_2", "vace_reference_image_3")
"""Columns of the reference images, in order."""
_STRIDE = 8


def mask_channels(mask: Float[Tensor, "frames height width"]) -> Float[Tensor, "64 f h w"]:
    """A mask in pixels folded into 8 × 8 channels at the size of latents; each latent frame takes
    the nearest pixel frame."""
    frames, height, width = mask.shape
    folded = rearrange(mask, "t (h p) (w q) -> 1 (p q) t h w", p=_STRIDE, q=_STRIDE)
    size = ((frames + 3) // 4, height // _STRIDE, width // _STRIDE)
    return F.interpolate(folded, size=size, mode="nearest-exact")[0]


class Vace(VaeConditioner):
    """`vace` [96, references + f, h, w]: latents of the kept part and of the regenerated part, and
    the mask; and `vace_reference`.

    Without a video all pixels are grey, and without a mask everything is regenerated. References
    are latent frames in front.
    """

    kind = "vace"

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The columns of video, mask and references that exist; "" without any, which is a
        condition too."""
        return tuple(
            column for column in (VIDEO, MASK, *REFERENCES) if column in controls.files
        ) or ("",)

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        size = (controls.frames, controls.height, controls.width)
        pixels = video(controls, VIDEO) if VIDEO in controls.files else torch.zeros(3, *size)
        mask = torch.ones(size)
        if MASK in controls.files:
            mask = ((video(controls, MASK)[0] + 1) / 2).clamp(0, 1)
        # a pixel is kept or regenerated; the mask itself stays grey, as in the official code
        chosen = (mask > 0.5).float()
        kept_latents = self.latents(pixels * (1 - chosen))
        regenerated = self.latents(pixels * chosen)
        context = torch.cat([kept_latents, regenerated, mask_channels(mask)])
        images = [
            fitted(Path(controls.files[column]), controls.height, controls.width, canvas=1.0)
            for column in REFERENCES
            if column in controls.files
        ]
        images = [image.flip(-1) for image in images] if controls.is_mirrored else images
        if not images:
            return {"vace": context}
        references = torch.cat([self.latents(image) for image in images], dim=1)
        in_front = context.new_zeros(len(context), *references.shape[1:])
        in_front[: len(references)] = references
        return {"vace": torch.cat([in_front, context], dim=1), "vace_reference": references}
