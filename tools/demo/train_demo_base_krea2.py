"""Trains the tiny Krea 2 of `krea2-train --demo` from generated shapes: `uv run
tools/demo/train_demo_base_krea2.py --work FOLDER`.

First the VAE, then the transformer. What a stage made is kept in the working folder and not made
again. At the end both are measured and written into the package in bf16. The seed is fixed, but
training gives other weights on another processor; that is why the weights are stored and not made
by the demo.
"""

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.nn.padding import padding_mask
from ditkit_krea2.demo import write as demo
from ditkit_krea2.encoders import TEXT, VAE
from ditkit_krea2.model import PATCH
from ditkit_krea2.spec import KREA2
from place_bases import (
    base_parser,
    encode_images,
    kept,
    started,
    train_base,
    train_vae,
    with_unit_latents,
)

STEPS = {"the VAE": 700, "the transformer": 1200}


def velocity(model: nn.Module, noised: Tensor, sigma: Tensor, text: Sequence[Tensor]) -> Tensor:
    """The model's velocity.

    Args:
        noised: Noised latents [batch, channels, height, width].
        sigma: Noise levels [batch].
        text: Features of each caption [rows, layers x width].
    """
    rows = pad_sequence(list(text), batch_first=True)
    height, width = (size // PATCH for size in noised.shape[2:])
    image = torch.cartesian_prod(*(torch.arange(size) for size in (1, height, width)))
    result = model(
        hidden_states=rearrange(noised, "b c (h p) (w q) -> b (h w) (c p q)", p=PATCH, q=PATCH),
        encoder_hidden_states=rows.unflatten(-1, (-1, demo.ARCH.text_dim)),
        timestep=sigma,
        position_ids=torch.cat([image.new_zeros(rows.shape[1], 3), image]),
        encoder_attention_mask=padding_mask([len(x) for x in text], noised.device),
    ).sample
    return rearrange(result, "b (h w) (c p q) -> b c (h p) (w q)", h=height, p=PATCH, q=PATCH)


def main() -> None:
    options = started(base_parser(str(__doc__), demo.WEIGHTS, STEPS).parse_args())
    vae: Any = demo.build_vae()
    state = kept(options.work / "vae.safetensors", lambda: train_vae(VAE, vae, options.steps[0]))
    vae.requires_grad_(False).load_state_dict(with_unit_latents(VAE, vae, state))
    train_base(
        options, KREA2, TEXT, demo, (VAE, vae), encode_images(VAE, vae), velocity,
        blocks=(".attn.", ".ff."), small=("time_mod_proj", "scale_shift_table", "final_layer"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
