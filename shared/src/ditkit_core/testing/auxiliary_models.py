"""Checks of any package's VAE and text encoder: their memory, and the effect of tiles on a VAE's
results."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.models.tiling import Tiles, in_tiles
from ditkit_core.planner.memory_tracker import MemoryTracker
from ditkit_core.weights import frozen


def num_parameters(module: nn.Module) -> int:
    """Number of parameters of a module; a shared one is counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def live(model: nn.Module, work: Callable[[], Any]) -> int:
    """Peak of bytes of CPU tensors during `work`, including the model's weights."""
    with MemoryTracker() as tracker:
        tracker.track(model, "weights")
        work()
    return tracker.peak[torch.device("cpu")]


def check_tiles(
    untiled: Any, tiled: Any, clip: Float[Tensor, "channels frames height width"], *, patch: Any
) -> None:
    """Compare the effect of tiles on encoding and decoding with the effect of tiles that are
    misplaced by one latent.

    A VAE's receptive field is larger than the overlap, so tiles change every number a little. One
    latent is the smallest possible misplacement.

    Args:
        untiled: The family's media encoder, loaded, without tiles.
        tiled: The same encoder with tiles.
        clip: Pixels of a clip larger than one tile.
        patch: pytest's `monkeypatch`.
    """
    latents = untiled.encode([clip])[0]["latents"]
    pixels = untiled.decode(latents)

    def distances() -> list[float]:
        results = tiled.encode([clip])[0]["latents"], tiled.decode(latents)
        assert [result.shape for result in results] == [latents.shape, pixels.shape]
        return [
            float((one - other).abs().mean())
            for one, other in zip(results, (latents, pixels), strict=True)
        ]

    honest = distances()
    patch.setattr(frozen, "in_tiles", _one_latent_off)
    misplaced = distances()
    assert all(0 < one < other / 3 for one, other in zip(honest, misplaced, strict=True)), (
        honest,
        misplaced,
    )


def _one_latent_off(
    work: Callable[[Tensor], Tensor], clip: Tensor, tiles: Tiles, *, pixels: int, scale: Fraction
) -> Tensor:
    """As `in_tiles`, with each tile's result moved down by one latent, which is `scale` pixels of a
    decoded clip."""
    step = max(1, int(scale))
    return in_tiles(lambda part: work(part).roll(step, -2), clip, tiles, pixels=pixels, scale=scale)
