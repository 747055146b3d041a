"""Tiny architectures of the variants that diffusers has."""

from typing import Any

SIZES: dict[str, Any] = {
    "dim": 32, "ffn_dim": 40, "heads": 2, "layers": 2, "text_dim": 12, "freq_dim": 16,
    "out_channels": 4,
}  # fmt: skip
IMAGE = {"in_channels": 10, "image_dim": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "i2v": IMAGE,
    "flf2v": IMAGE | {"image_positions": 8},
    "i2v-a14b": {"in_channels": 10, "boundary": 0.9},
    "ti2v": {"in_channels": 4, "token_times": True},
    "vace": {"in_channels": 4, "vace_layers": (0, 1), "vace_channels": 7},
}
