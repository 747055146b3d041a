"""What encoders hold, and what tiles change in what a VAE gives: for any package's VAE and text encoder."""

from collections.abc import Callable
from fractions import Fraction
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.models.tiling import Tiles, in_tiles
from ditkit_core.planner.memory_tracker import MemoryTracker


def num_parameters(module: nn.Module) -> int:
    """Numbers in a module; a parameter that is shared counts once."""
    return sum(parameter.numel() for parameter in module.parameters())


def live(model: nn.Module, work: Callable[[], Any]) -> int:
    """Bytes of tensors on the CPU at their highest while `work` is done, the model's weights among them."""
    with MemoryTracker() as ledger:
        ledger.track(model, "weights")
        work()
    return ledger.peak[torch.device("cpu")]


def check_tiles(
    whole: Any, tiled: Any, clip: Float[Tensor, "channels frames height width"], *, module: ModuleType, patch: Any
) -> None:
    """Hold what tiles change, encoding and decoding, against what tiles do that lie one latent off their place.

    A VAE looks farther than the overlap, so that tiles change every number a little. One latent is the least that they can be
    misplaced by.

    Args:
        whole: The family's media encoder, loaded, which works on whole clips.
        tiled: The same, which works in tiles.
        clip: Pixels, of more than one tile.
        module: Of the encoder: where it finds `in_tiles`.
        patch: pytest's `monkeypatch`.
    """
    latents = whole.encode([clip])[0]["latents"]
    pixels = whole.decode(latents)

    def distances() -> list[float]:
        found = tiled.encode([clip])[0]["latents"], tiled.decode(latents)
        assert [each.shape for each in found] == [latents.shape, pixels.shape]
        return [float((one - other).abs().mean()) for one, other in zip(found, (latents, pixels), strict=True)]

    honest = distances()
    patch.setattr(module, "in_tiles", _one_latent_off)
    misplaced = distances()
    assert all(0 < one < other / 3 for one, other in zip(honest, misplaced, strict=True)), (honest, misplaced)


def _one_latent_off(
    work: Callable[[Tensor], Tensor], whole: Tensor, tiles: Tiles, *, pixels: int, scale: Fraction
) -> Tensor:
    """As `in_tiles`, with each tile's result moved down by one latent, which is `scale` pixels of a decoded clip."""
    step = max(1, int(scale))
    return in_tiles(lambda part: work(part).roll(step, -2), whole, tiles, pixels=pixels, scale=scale)
