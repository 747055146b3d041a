"""Trains the tiny Qwen-Image of `qwenimage-train --demo` from generated shapes: `uv run
tools/demo/train_demo_base_qwenimage.py --work FOLDER`.

Its VAE is the one in Krea 2's demo, as the published one is Qwen-Image's. The transformer is
trained, kept in the working folder and not trained again if it is there. At the end both are measured and
written into the package in bf16. The seed is fixed, but training gives other weights on another
processor; that is why the weights are stored and not made by the demo.
"""

from collections.abc import Sequence
from typing import Any

from einops import rearrange
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.nn.padding import padding_mask
from ditkit_krea2.demo import write as krea2
from ditkit_qwenimage.demo import write as demo
from ditkit_qwenimage.encoders import TEXT, VAE
from ditkit_qwenimage.model import PATCH
from ditkit_qwenimage.spec import QWENIMAGE
from place_bases import base_parser, encode_images, started, train_base

STEPS = 1000


def velocity(model: nn.Module, noised: Tensor, sigma: Tensor, text: Sequence[Tensor]) -> Tensor:
    """The model's velocity.

    Args:
        noised: Noised latents [batch, channels, height, width].
        sigma: Noise levels [batch].
        text: Features of each caption [rows, width].
    """
    height, width = (size // PATCH for size in noised.shape[2:])
    result = model(
        rearrange(noised, "b c (h p) (w q) -> b (h w) (c p q)", p=PATCH, q=PATCH),
        pad_sequence(list(text), batch_first=True),
        padding_mask([len(x) for x in text], noised.device),
        sigma,
        [[(1, height, width)]] * len(noised),
    ).sample
    return rearrange(result, "b (h w) (c p q) -> b c (h p) (w q)", h=height, p=PATCH, q=PATCH)


def main() -> None:
    options = started(
        base_parser(str(__doc__), demo.WEIGHTS, {"the transformer": STEPS}).parse_args()
    )
    vae: Any = demo.build_vae().requires_grad_(False)
    vae.load_state_dict(load_file(krea2.WEIGHTS / "vae.safetensors"))
    train_base(
        options, QWENIMAGE, TEXT, demo, (VAE, vae), encode_images(VAE, vae), velocity,
        blocks=("attn.", "_mlp.net"), small=("_mod.1", "norm_out", "proj_out"), batch=32,
    )  # fmt: skip


if __name__ == "__main__":
    main()
