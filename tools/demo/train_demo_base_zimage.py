"""Trains the tiny Z-Image of `zimage-train --demo` from generated shapes: `uv run
tools/demo/train_demo_base_zimage.py --work FOLDER`.

About ten minutes of one core. Its VAE is that of FLUX.2's demo: Z-Image's has as many channels, and
two numbers where FLUX.2's has statistics of every channel, so those become part of the convolutions
next to the latents. The transformer is trained, kept in the working folder and not trained again if
it is there. At the end both are measured and written into the package in bf16. The seed is fixed,
but training gives other weights on another processor; that is why the weights are stored and not
made by the demo.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor, nn

from ditkit_core.families.demo_places import CAPTIONS, KNOWN, LOOKS
from ditkit_core.families.text import LanguageModelEncoder
from ditkit_core.models.paths import ModelPaths
from ditkit_core.training.flow_matching import shift_sigma
from ditkit_flux2.demo import write as flux2
from ditkit_zimage.demo import write as demo
from ditkit_zimage.spec import SHIFT, TEXT, VAE
from place_bases import (
    SEED,
    SHARES,
    SIZES,
    drawn_captions,
    drawn_levels,
    encode_images,
    in_bf16,
    kept,
    known_looks,
    measure_samples,
    measure_vae,
    optimise,
    optimizers_of,
    package,
)
from place_judge import HEADINGS

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
    weight, bias = (
        state["quant_conv.weight"],
        state["quant_conv.bias"],
    )  # of means, then of logarithms of variances
    weight[: demo.CHANNELS] /= deviation[:, None, None, None]
    bias[: demo.CHANNELS] = (bias[: demo.CHANNELS] - mean) / deviation
    bias[demo.CHANNELS :] -= 2 * deviation.log()
    state["post_quant_conv.bias"] += state["post_quant_conv.weight"][:, :, 0, 0] @ mean
    state["post_quant_conv.weight"] *= deviation[:, None, None]
    return state


def encode_captions(work: Path) -> dict[str, Float[Tensor, "rows width"]]:
    """Features of every caption, and of the empty one."""
    demo.write_text(work / "text")
    encoder = LanguageModelEncoder(
        TEXT, ModelPaths(base=str(work / "text")), torch.device("cpu"), torch.float32
    )
    encoder.load()
    return {caption: encoder.encode([caption])[0]["text"] for caption in ("", *CAPTIONS)}


def velocity(
    model: nn.Module,
    noised: Float[Tensor, "batch channels height width"],
    sigma: Float[Tensor, " batch"],
    text: Sequence[Float[Tensor, "rows width"]],
) -> Float[Tensor, "batch channels height width"]:
    """The model's velocity, from data to noise."""
    found = model(list(noised[:, :, None]), 1 - sigma, list(text), return_dict=False)[0]
    return -torch.stack(list(found))[:, :, 0]


def train_transformer(
    images: Sequence[Tensor], text: Mapping[str, Tensor], steps: int
) -> dict[str, Tensor]:
    """The transformer's weights: velocities of images (`encode_images`) from captions."""
    torch.manual_seed(SEED)
    random = np.random.default_rng(SEED)
    model = demo.build_transformer().train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "adaLN_modulation" in name or name.startswith("all_final_layer"):
                weight.mul_(0.1)  # start close to the residual stream

    def losses() -> Iterator[Tensor]:
        while True:
            latents = images[random.choice(len(SIZES), p=SHARES)]
            looks, places = (
                random.integers(len(LOOKS), size=BATCH),
                random.integers(len(KNOWN), size=BATCH),
            )
            numbers = random.integers(latents.shape[2], size=BATCH)
            captions = drawn_captions(random, looks, places)
            captions = ["" if random.random() < 0.1 else caption for caption in captions]
            sigma, clean = drawn_levels(random, BATCH), latents[looks, places, numbers]
            noise = torch.randn_like(clean)
            noised = clean.lerp(noise, sigma[:, None, None, None])
            found = velocity(model, noised, sigma, [text[caption] for caption in captions])
            yield (found - (noise - clean)).square().mean()

    return optimise(
        model, optimizers_of(model, ("layers.", "refiner.")), losses(), steps, "transformer"
    )


@torch.no_grad()
def sample(
    model: nn.Module, text: Mapping[str, Tensor], captions: Sequence[str], seed: int
) -> Float[Tensor, "batch channels 8 8"]:
    """Latents from captions, by 20 Euler steps and guidance 2."""
    latents = torch.randn(
        len(captions), demo.CHANNELS, 8, 8, generator=torch.Generator().manual_seed(seed)
    )
    rows = [text[caption] for caption in (*captions, *[""] * len(captions))]
    for sigma, following in pairwise(shift_sigma(torch.linspace(1, 0, 21), SHIFT)):
        both = velocity(model, torch.cat([latents] * 2), sigma.expand(len(rows)), rows)
        given, without = both.chunk(2)
        latents = latents + (following - sigma) * (without + 2 * (given - without))
    return latents


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="where the trained transformer is kept"
    )
    parser.add_argument(
        "--to",
        type=Path,
        default=demo.WEIGHTS,
        help="where to write the weights (default: the package)",
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    for folder in (options.work, options.to):
        folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    vae: Any = demo.build_vae().requires_grad_(False)
    model = demo.build_transformer().requires_grad_(False)
    vae.load_state_dict(
        in_bf16(vae_weights())
    )  # the transformer learns latents of the VAE that is shipped
    text = encode_captions(options.work)
    file = options.work / "transformer.safetensors"
    trained = kept(
        file, lambda: train_transformer(encode_images(vae, VAE.patch), text, options.steps)
    )
    model.load_state_dict(trained)
    package({"vae": vae, "transformer": model}, options.to)
    print(measure_vae(VAE, vae))
    captions = [look.caption for look in known_looks()]
    print(f"{HEADINGS}\n{measure_samples(VAE, vae, sample(model, text, captions, SEED))}")


if __name__ == "__main__":
    main()
