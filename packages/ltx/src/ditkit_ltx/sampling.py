"""Samples that begin with an image."""

from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor

from ditkit_core.families.euler import EulerSampler
from ditkit_core.families.first_frame import first_frame_of
from ditkit_core.models.encoders import Denoiser, GenerationRequest


class FirstFrameSampler(EulerSampler):
    """An `EulerSampler` that keeps a first frame that is given."""

    def __init__(self, *args: Any, noise: float, **options: Any):
        """As `EulerSampler`.

        Args:
            noise: How much noise the first frame gets at noise level 1; it falls with the square of
                the level. The model is told level 0 all the same.
        """
        super().__init__(*args, **options)
        self._noise = noise

    def changes(
        self, conditions: Mapping[str, Tensor], sigma: Tensor, random: torch.Generator
    ) -> dict[str, Tensor]:
        """The first frame with the noise of this step, if it gets any."""
        first = conditions.get("first_frame")
        if first is None or not self._noise:
            return {}
        noise = torch.randn(first.shape, generator=random).to(first)
        return {"first_frame": first + self._noise * sigma.float() ** 2 * noise}

    def denoise(self, job: GenerationRequest) -> Generator[float, Denoiser, Tensor]:
        """As of the protocol; the sample's first latent frame is the image's, without noise."""
        latents = yield from super().denoise(job)
        if (first := first_frame_of(job.conditions, latents)) is not None:
            latents[:, :1] = first
        return latents
