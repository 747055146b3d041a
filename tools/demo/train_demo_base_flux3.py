"""Trains the tiny FLUX.3 of `flux3-train --demo` from generated shapes: `uv run
tools/demo/train_demo_base_flux3.py --work FOLDER`.

Its VAE is that of FLUX.2's demo, as the published one is FLUX.2's. The transformer is trained, kept
in the working folder and not trained again if it is there. At the end both are measured and written
into the package in bf16. The seed is fixed, but training gives other weights on another processor;
that is why the weights are stored and not made by the demo.
"""

from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ditkit_core.families.demo_places import CAPTIONS, LOOKS
from ditkit_flux2.demo import write as flux2
from ditkit_flux3.demo import write as demo
from ditkit_flux3.spec import FLUX3, TEXT, VAE
from ditkit_flux3.verify import positions
from place_bases import base_parser, edits, encode_images, started, train_base

STEPS = 1000


def velocity(
    model: nn.Module,
    noised: Tensor,
    sigma: Tensor,
    text: Sequence[Tensor],
    references: Tensor | None = None,
) -> Tensor:
    """The model's velocity.

    Args:
        noised: Noised latents [batch, channels, height, width].
        sigma: Noise levels [batch].
        text: Features of each caption [rows, width].
        references: Latents of the same shape as the noised ones; None without.
    """
    device, grid, rows = noised.device, noised.shape[2:], torch.stack(list(text))
    others = {}
    if references is not None:
        others["image_cond_hidden_states"] = references.flatten(2).transpose(1, 2)
        others["image_cond_ids"] = positions(device, grid=grid, index=-1)
    result = model(
        noised.flatten(2).transpose(1, 2),
        rows,
        sigma,
        positions(device, grid=grid),
        positions(device, text=rows.shape[1]),
        **others,
    ).sample
    return result.transpose(1, 2).unflatten(2, grid)


def main() -> None:
    options = started(
        base_parser(str(__doc__), demo.WEIGHTS, {"the transformer": STEPS}).parse_args()
    )
    vae: Any = demo.build_vae().requires_grad_(False)
    vae.load_state_dict(load_file(flux2.WEIGHTS / "vae.safetensors"))
    mean, variance = (each[:, None, None] for each in (vae.bn.running_mean, vae.bn.running_var))
    images = [(x - mean) / (variance + vae.bn.eps).sqrt() for x in encode_images(VAE, vae)]
    instructions = {instruction for look in LOOKS for _, instruction in edits(look)}
    train_base(
        options, FLUX3, TEXT, demo, (VAE, vae), images, velocity,
        blocks=("transformer_blocks", "mode_blocks"), small=("modulation", "proj_out", "norm_out"),
        batch=32, captions=[*CAPTIONS, *sorted(instructions)], edited=0.2,
    )  # fmt: skip


if __name__ == "__main__":
    main()
