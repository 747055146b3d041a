"""Trains the tiny Z-Image of `zimage-train --demo` from generated shapes: `uv run
tools/demo/train_demo_base_zimage.py --work FOLDER`.

About ten minutes of one core. Its VAE is that of FLUX.2's demo: Z-Image's has as many channels, and
two numbers where FLUX.2's has statistics of every channel, so those become part of the convolutions
next to the latents. The transformer is trained, kept in the working folder and not trained again if
it is there. At the end both are measured and written into the package in bf16. The seed is fixed,
but training gives other weights on another processor; that is why the weights are stored and not
made by the demo.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor, nn

from ditkit_flux2.demo import write as flux2
from ditkit_zimage.demo import write as demo
from ditkit_zimage.spec import TEXT, VAE, ZIMAGE
from place_bases import base_parser, encode_images, in_bf16, normalise, started, train_base

STEPS = 1200


def vae_weights() -> dict[str, Tensor]:
    """The VAE of FLUX.2's demo, whose latents get mean 0 and variance 1 by its first and last
    convolution of latents."""
    state = {
        name: value.float() for name, value in load_file(flux2.WEIGHTS / "vae.safetensors").items()
    }
    del state["bn.num_batches_tracked"]
    # Statistics of the four pixels of a patch become those of their channel.
    means, variances = (
        state.pop(f"bn.running_{name}").view(demo.CHANNELS, 4) for name in ("mean", "var")
    )
    mean, deviation = means.mean(1), (variances.mean(1) + means.var(1, unbiased=False)).sqrt()
    normalise(state, mean, deviation)
    return state


def velocity(
    model: nn.Module,
    noised: Float[Tensor, "batch channels height width"],
    sigma: Float[Tensor, " batch"],
    text: Sequence[Float[Tensor, "rows width"]],
) -> Float[Tensor, "batch channels height width"]:
    """The model's velocity, from data to noise."""
    found = model(list(noised[:, :, None]), 1 - sigma, list(text), return_dict=False)[0]
    return -torch.stack(list(found))[:, :, 0]


def main() -> None:
    options = started(
        base_parser(str(__doc__), demo.WEIGHTS, {"the transformer": STEPS}).parse_args()
    )
    vae: Any = demo.build_vae().requires_grad_(False)
    # the transformer learns latents of the VAE that is shipped
    vae.load_state_dict(in_bf16(vae_weights()))
    train_base(
        options, ZIMAGE, TEXT, demo, (VAE, vae), encode_images(VAE, vae), velocity,
        blocks=("layers.", "refiner."), small=("adaLN_modulation", "all_final_layer"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
