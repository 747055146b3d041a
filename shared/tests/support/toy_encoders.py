"""Encoders that count what they do, for the tests of the encode stage."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ditkit_core.data.dataset import Sample
from ditkit_core.encoding.cache import Cache
from ditkit_core.encoding.encode import SampleEncoders, encode
from ditkit_core.io.console import NullProgress
from ditkit_core.models.encoders import Encoder


class CountingEncoder:
    """Stands in for a VAE or a text encoder; remembers every call."""

    def __init__(self, kind: str, log: list[str] | None = None, identity: str = "v1") -> None:
        self.kind = kind
        self.items_at_once = 1
        self.identity = f"{kind} {identity}"
        self.log = [] if log is None else log
        """`load media`, `media`, `unload media`, …; shared by encoders to see their order."""
        self.items: list[Any] = []
        self.stop_after: int | None = None
        """Raise KeyboardInterrupt in place of the next item."""
        self.result: float | None = None
        """Value to return in place of the right one."""

    def load(self) -> None:
        self.log.append(f"load {self.kind}")

    def unload(self) -> None:
        self.log.append(f"unload {self.kind}")

    def encode(
        self, items: Sequence[Any], advance: Callable[[float], None] = NullProgress.advance
    ) -> list[dict[str, Tensor]]:
        assert 0 < len(items) <= self.items_at_once
        encoded = [self._one(item) for item in items]
        advance(float(len(items)))
        return encoded

    def _one(self, item: Any) -> dict[str, Tensor]:
        if self.stop_after is not None and len(self.items) >= self.stop_after:
            raise KeyboardInterrupt
        assert self.log.count(f"load {self.kind}") == self.log.count(f"unload {self.kind}") + 1
        assert not torch.is_grad_enabled()
        self.items.append(item)
        self.log.append(self.kind)
        if self.kind == "media":
            latents = (
                item[:, ::4, ::8, ::8].clone()
                if self.result is None
                else torch.full((1, 1, 1, 1), self.result)
            )
            return {"latents": latents}
        return {"text": torch.tensor([[float(len(item)), float(sum(map(ord, item)))]])}


def encode_with(
    samples: Sequence[Sample],
    *,
    cache: Cache,
    media_encoder: Encoder,
    text_encoder: Encoder,
    **given: Any,
):
    """The encode stage with encoders and settings by name, whichever of its arguments they belong
    to."""
    own = {
        name: given.pop(name) for name in ("extra_prompts", "progress", "on_bad") if name in given
    }
    return encode(
        samples, SampleEncoders(media=media_encoder, text=text_encoder, **given), cache, **own
    )
