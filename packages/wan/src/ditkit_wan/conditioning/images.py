"""First and last images of a clip for image-to-video models: masked latents, CLIP tokens, or a
clean first frame.

Sources: Wan-Video/Wan2.1, wan/image2video.py and wan/first_last_frame2video.py; Wan-Video/Wan2.2,
wan/textimage2video.py.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.encoding.cache import key
from ditkit_core.families.first_frame import (
    INPUT_IMAGE,
    Outlined,
    VaeConditioner,
    column_or_own,
    image_or_own,
)
from ditkit_core.models.conditions import ClipConditioner, ClipInputs
from ditkit_wan.encoders.clip import ImageEncoder
from ditkit_wan.encoders.vae import VaeEncoder

FIRST, LAST = INPUT_IMAGE.name, "end_image"
"""Columns of the first and the last image of a clip."""


def known_frames_mask(
    is_known: Sequence[bool], height: int, width: int
) -> Float[Tensor, "4 f height width"]:
    """The mask channels of the pixel frames that the model is given.

    The first latent frame is one pixel frame, which sets all four channels. Each later one is four
    pixel frames with a channel each.

    Args:
        is_known: Whether each pixel frame is given; 4k + 1 values.
        height: Height of the latents.
        width: Width of the latents.
    """
    assert len(is_known) % 4 == 1, f"{len(is_known)} frames"
    frames = torch.tensor([is_known[0]] * 4 + list(is_known[1:]), dtype=torch.float32)
    return frames.view(-1, 4).T[:, :, None, None].repeat(1, 1, height, width)


class EndsConditioner(VaeConditioner):
    """Base of the conditioners that give a model the first or the last frame of a clip, or both, in
    `y`."""

    def __init__(self, vae: VaeEncoder | Outlined, *, clean_first: bool = False):
        """Set how a first frame is given.

        Args:
            vae: The VAE.
            clean_first: Whether `first_frame` has the first frame's latents too, which replace
                noised ones.
        """
        super().__init__(vae)
        self.clean_first = clean_first

    @property
    def settings(self) -> str:
        return "first frame without noise" if self.clean_first else ""

    def given_frames(
        self, controls: ClipInputs, first: Tensor | None, last: Tensor | None
    ) -> dict[str, Tensor]:
        """`y`: a mask of the given frames, and latents of a clip that has these frames alone;
        `first_frame` where it is clean.

        The other frames are zeros as pixels, which is grey; the VAE's latents of grey are not
        zeros.

        Args:
            controls: The clip.
            first: Pixels of its first frame, [3, 1, height, width], if it is given.
            last: Pixels of its last frame, if it is given.
        """
        frames = controls.frames
        pixels, is_known = torch.zeros(3, frames, controls.height, controls.width), [False] * frames
        for index, image in ((0, first), (frames - 1, last)):
            if image is not None:
                pixels[:, index : index + 1], is_known[index] = image, True
        latents = self.latents(pixels)
        tensors = {"y": torch.cat([known_frames_mask(is_known, *latents.shape[2:]), latents])}
        # The VAE is causal: its first latent frame is the first frame alone.
        return tensors | (
            {"first_frame": latents[:, :1].clone()}
            if self.clean_first and first is not None
            else {}
        )


class FirstLast(EndsConditioner):
    """`y`: a mask of the known frames, and latents of a clip that has these frames alone."""

    kind = "first-last"

    def __init__(self, vae: VaeEncoder | Outlined, *, both: bool, clean_first: bool = False):
        """Set which frames are known.

        Args:
            vae: The VAE.
            both: Whether the model is always given the last frame; otherwise only with an
                `end_image`.
            clean_first: As for `EndsConditioner`.
        """
        super().__init__(vae, clean_first=clean_first)
        self.both = both

    @property
    def settings(self) -> str:
        return ", ".join(filter(None, ["both ends" if self.both else "begin", super().settings]))

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The first and the last image: columns, or the clip's own frames."""
        used = [column_or_own(controls, FIRST, why="image to video")]
        if self._has_last(controls):
            used.append(column_or_own(controls, LAST, why="a last frame"))
        return tuple(dict.fromkeys(used))

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        last = image_or_own(controls, LAST, last=True) if self._has_last(controls) else None
        return self.given_frames(controls, image_or_own(controls, FIRST), last)

    def _has_last(self, controls: ClipInputs) -> bool:
        return controls.frames > 1 and (self.both or LAST in controls.files)


class ClipVision(ClipConditioner):
    """`image`: concatenated CLIP tokens of images [images · 257, 1280]; zeros in place of one image
    if there is none."""

    def __init__(
        self,
        encoder: ImageEncoder | Outlined,
        columns: Sequence[str],
        *,
        name: str = "image",
        kind: str = "clip-vision",
    ):
        """Set the columns of the images.

        Args:
            encoder: CLIP.
            columns: Columns of the images, in order; missing ones default to the clip's own frames,
                `end_image` to its last.
            name: Name of the tensor.
            kind: Name of the cache's folder.
        """
        self.encoder, self.columns, self.name, self.kind = encoder, tuple(columns), name, kind

    @cached_property
    def identity(self) -> str:
        """Digest of CLIP and of the columns of its images."""
        # "True" is of a setting that was there: caches from then stay valid.
        return key(self.encoder.identity, self.name, "True", *self.columns)

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The columns, or the clip itself in place of missing ones."""
        return tuple(
            dict.fromkeys(
                column_or_own(controls, column, why="image to video") for column in self.columns
            )
        )

    def load(self) -> None:
        self.encoder.load()

    def unload(self) -> None:
        self.encoder.unload()

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        tokens = [self.encoder.encode([image])[0]["image"] for image in self.images(controls)]
        return {
            self.name: torch.cat(tokens or [torch.zeros(self.encoder.tokens, self.encoder.dim)])
        }

    def check(self, controls: ClipInputs) -> None:
        """Read the images."""
        self.uses(controls)
        self.images(controls)

    def images(self, controls: ClipInputs) -> list[Float[Tensor, "3 1 height width"]]:
        """The images of a clip that are encoded, in order."""
        return [image_or_own(controls, column, last=column == LAST) for column in self.columns]
