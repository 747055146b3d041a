"""What tests of conditions run under: a module loads an encoder once, and encodes a clip once.

What is asked here is which pixels a condition shows an encoder and what it makes of the latents;
loading and encoding have tests of their own next to `ditkit_wan.encoders`.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="module")
def _encoders_work_once() -> Iterator[None]:
    """Keeps loaded modules by their files, and latents by module and pixels."""
    from ditkit_core.io.console import NullProgress
    from ditkit_core.weights.frozen import FrozenModule, FrozenVae

    load_as, encode = FrozenModule.load_as, FrozenVae.encode
    modules: dict[tuple[type, Path, Any, Any], Any] = {}
    latents: dict[tuple[Any, ...], Any] = {}

    def load_once(self: FrozenModule, device: Any, dtype: Any) -> None:
        key = (type(self), self.source.path, device, dtype)
        if key in modules:
            self.module, self._loaded_as = modules[key], (device, dtype)
        else:
            load_as(self, device, dtype)
            modules[key] = self.module

    def encode_once(
        self: FrozenVae,
        items: Sequence[Any],
        advance: Callable[[float], None] = NullProgress.advance,
    ) -> list[dict[str, Any]]:
        assert self.module is not None, "encodes before it is loaded"
        (clip,) = items
        key = (self.module, self.mode, clip.dtype, clip.shape, clip.contiguous().numpy().tobytes())
        if key not in latents:
            (latents[key],) = encode(self, items, advance)
        return [{name: tensor.clone() for name, tensor in latents[key].items()}]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrozenModule, "load_as", load_once)
        patch.setattr(FrozenVae, "encode", encode_once)
        yield
