"""Training items of FLUX.2 to the model's inputs."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count

import torch
from torch import Tensor

from ditkit_flux2.model.transformer import Flux2Inputs
from ditkit_flux2.presets import Flux2Arch


def _references(item: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Latents of the reference images of an item, in order."""
    for index in count():
        if (name := f"reference.{index}") not in item:
            return
        yield item[name]


def make_inputs(
    noised: Sequence[Tensor], sigma: Tensor, items: Sequence[Mapping[str, Tensor]], guidance: float
) -> Flux2Inputs:
    """Noised latents and training items to the model's inputs."""
    device = noised[0].device
    return Flux2Inputs(
        latents=noised,
        sigma=sigma,
        guidance=torch.full_like(sigma, guidance),
        text=[item["text"].to(device) for item in items],
        references=[[reference.to(device) for reference in _references(item)] for item in items],
    )


def num_tokens(item: Mapping[str, Tensor]) -> int:
    """Rows of text, and one token for each latent pixel of the target and of every reference."""
    return len(item["text"]) + sum(latents[0].numel() for latents in (item["latents"], *_references(item)))


def empty_item(arch: Flux2Arch, size: tuple[int, int, int], references: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    """An empty training item as the cache would have it, on the default device."""

    def latents(height: int, width: int) -> Tensor:
        return torch.empty(arch.in_channels, 1, height // 16, width // 16)

    text = torch.empty(arch.text_tokens, arch.text_dim, dtype=torch.bfloat16)
    edited = {f"reference.{index}": latents(*reference) for index, reference in enumerate(references)}
    return {"latents": latents(*size[1:]), "text": text, **edited}
