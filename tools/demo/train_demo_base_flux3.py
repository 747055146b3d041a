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
from ditkit_core.training.flow_matching import shift_sigma
from ditkit_flux2.demo import write as flux2
from ditkit_flux3.demo import write as demo
from ditkit_flux3.spec import SHIFT, TEXT, VAE
from ditkit_flux3.verify import positions
from place_bases import (
    base_parser,
    edits,
    encode_captions,
    encode_images,
    finish,
    kept,
    sample,
    started,
    train_transformer,
)

STEPS, BATCH = 1000, 32


def velocity(
    model: nn.Module, noised: Tensor, sigma: Tensor, text: Tensor, references: Tensor | None = None
) -> Tensor:
    """The model's velocity.

    Args:
        noised: Noised latents [batch, channels, height, width].
        sigma: Noise levels [batch].
        text: Features of the captions [batch, rows, width].
        references: Latents of the same shape as the noised ones; None without.
    """
    device, grid = noised.device, noised.shape[2:]
    others = {}
    if references is not None:
        others["image_cond_hidden_states"] = references.flatten(2).transpose(1, 2)
        others["image_cond_ids"] = positions(device, grid=grid, index=-1)
    result = model(
        noised.flatten(2).transpose(1, 2),
        text,
        sigma,
        positions(device, grid=grid),
        positions(device, text=text.shape[1]),
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
    demo.write_text(options.work / "text")
    instructions = {instruction for look in LOOKS for _, instruction in edits(look)}
    text = encode_captions(TEXT, options.work / "text", [*CAPTIONS, *sorted(instructions)])
    model = demo.build_transformer()

    def predicted(
        noised: Tensor, sigma: Tensor, captions: Sequence[str], references: Tensor | None = None
    ) -> Tensor:
        rows = torch.stack([text[caption] for caption in captions])
        return velocity(model, noised, sigma, rows, references)

    def train() -> dict[str, Tensor]:
        return train_transformer(
            model, predicted, images, options.steps[0], blocks=("transformer_blocks", "mode_blocks"),
            small=("modulation", "proj_out", "norm_out"), batch=BATCH, edited=0.2,
        )  # fmt: skip

    model.load_state_dict(kept(options.work / "transformer.safetensors", train))
    levels = shift_sigma(torch.linspace(1, 0, 21), SHIFT)
    finish(
        VAE, {"vae": vae, "transformer": model}, options.to,
        lambda captions: sample(predicted, captions, images[0].shape[3:], levels, 2.0),
    )  # fmt: skip


if __name__ == "__main__":
    main()
