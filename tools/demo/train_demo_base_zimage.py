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

from ditkit_core.families.demo_places import CAPTIONS
from ditkit_core.training.flow_matching import shift_sigma
from ditkit_flux2.demo import write as flux2
from ditkit_zimage.demo import write as demo
from ditkit_zimage.spec import SHIFT, TEXT, VAE
from place_bases import (
    base_parser,
    encode_captions,
    encode_images,
    finish,
    in_bf16,
    kept,
    normalise,
    sample,
    started,
    train_transformer,
)

STEPS, BATCH = 1200, 64


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
    vae.load_state_dict(
        in_bf16(vae_weights())
    )  # the transformer learns latents of the VAE that is shipped
    images = encode_images(VAE, vae)
    demo.write_text(options.work / "text")
    text = encode_captions(TEXT, options.work / "text", CAPTIONS)
    model = demo.build_transformer()

    def predicted(
        noised: Tensor, sigma: Tensor, captions: Sequence[str], references: Tensor | None = None
    ) -> Tensor:
        return velocity(model, noised, sigma, [text[caption] for caption in captions])

    def train() -> dict[str, Tensor]:
        return train_transformer(
            model, predicted, images, options.steps[0], blocks=("layers.", "refiner."),
            small=("adaLN_modulation", "all_final_layer"),
        )  # fmt: skip

    model.load_state_dict(kept(options.work / "transformer.safetensors", train))
    levels = shift_sigma(torch.linspace(1, 0, 21), SHIFT)
    finish(
        VAE, {"vae": vae, "transformer": model}, options.to,
        lambda captions: sample(predicted, captions, images[0].shape[3:], levels, 2.0),
    )  # fmt: skip


if __name__ == "__main__":
    main()
