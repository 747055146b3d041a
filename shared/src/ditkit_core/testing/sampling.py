"""Latents of a sample, which tests compare with the latents of other programs."""

from collections.abc import Callable

from torch import Tensor

from ditkit_core.models.encoders import DecodedBy, GenerationRequest, Sampler
from ditkit_core.models.protocol import Engine, StagedModel
from ditkit_core.sampling.denoise import generate, single_stage


class _Undecoded:
    """A decoder that leaves latents as they are."""

    decoded = ""

    def decode(self, latents: Tensor, seed: int = 0) -> Tensor:
        return latents

    def unload(self) -> None:
        pass


def generate_latents(
    sampler: Sampler,
    job: GenerationRequest,
    model: StagedModel,
    engine: Engine,
    on_step: Callable[[], None] = lambda: None,
) -> Tensor:
    """Latents of one sample of one model: what `generate` decodes."""
    (latents,) = generate(
        DecodedBy(sampler.denoise, _Undecoded()), [job], single_stage(model, engine), on_step
    )
    return latents
