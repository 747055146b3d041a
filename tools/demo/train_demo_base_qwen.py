"""Trains the tiny Qwen-Image 2.1 of `qwen-train --demo` from generated shapes: `uv run
tools/demo/train_demo_base_qwen.py --work FOLDER`.

First the VAE, then the transformer. What a stage made is kept in the working folder and not made
again. At the end both are measured and written into the package in bf16. The seed is fixed, but
training gives other weights on another processor; that is why the weights are stored and not made
by the demo.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_qwen.demo import write as demo
from ditkit_qwen.encoders import TEXT, VAE
from ditkit_qwen.spec import QWEN
from place_bases import (
    SIZES,
    base_parser,
    encode_images,
    kept,
    started,
    train_base,
    train_vae,
    with_unit_latents,
)

STEPS = {"the VAE": 1400, "the transformer": 700}
SQUARE = SIZES[:1]


def velocity(model: nn.Module, noised: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    """The model's velocity.

    Args:
        noised: Noised latents [batch, channels, height, width].
        sigma: Noise levels [batch].
        text: Features of captions of one length [batch, rows, width].
    """
    grid = noised.shape[2:]
    # An image has a slot for each 2 x 2 of its tokens, behind the caption.
    slots = torch.arange(text.shape[1] + grid.numel() // 4) >= text.shape[1]
    result = model(
        noised.flatten(2).transpose(1, 2),
        text,
        sigma,
        [[(1, *grid)]] * len(noised),
        slots.expand(len(noised), -1),
    ).sample
    return result[:, -grid.numel() :].transpose(1, 2).unflatten(2, grid)  # the caption is in front


def by_length(model: nn.Module, noised: Tensor, sigma: Tensor, text: Sequence[Tensor]) -> Tensor:
    """The velocity with captions of several lengths: one that is padded would move the image."""
    result = torch.empty_like(noised)
    for length in sorted({len(rows) for rows in text}):
        at = [index for index, rows in enumerate(text) if len(rows) == length]
        features = torch.stack([text[index] for index in at])
        result[at] = velocity(model, noised[at], sigma[at], features)
    return result


def main() -> None:
    options = started(base_parser(str(__doc__), demo.WEIGHTS, STEPS).parse_args())
    vae: Any = demo.build_vae()
    state = kept(
        options.work / "vae.safetensors", lambda: train_vae(VAE, vae, options.steps[0], SQUARE)
    )
    vae.requires_grad_(False).load_state_dict(with_unit_latents(VAE, vae, state, SQUARE))
    train_base(
        options, QWEN, TEXT, demo, (VAE, vae), encode_images(VAE, vae, SQUARE), by_length,
        blocks=("attn.", "img_mlp."), small=("modulation", "norm_out", "proj_out"), batch=32,
        sizes=SQUARE,
    )  # fmt: skip


if __name__ == "__main__":
    main()
