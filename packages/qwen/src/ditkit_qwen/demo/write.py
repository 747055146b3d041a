"""The demo's inputs: a complete tiny Qwen-Image 2.1 checkpoint, and captioned images.

The demo trains on these exactly as a run trains on real weights. The checkpoint is in diffusers
layout. Its VAE and transformer were trained on generated shapes by
tools/demo/train_demo_base_qwen.py; their weights are part of the package, in bf16.
"""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ditkit_core.data.media.synthetic import (
    random_model,
    write_index,
    write_inputs,
    write_text_encoder,
)
from ditkit_core.families.demo import random_qwen3_vl, save_trained, word_tokenizer
from ditkit_core.families.demo_places import CAPTIONS, IMAGES, SIDE, write_dataset
from ditkit_qwen.encoders import SYSTEM, TEXT_LAYERS, VAE
from ditkit_qwen.presets import QwenArch, config_of

ARCH = QwenArch(dim=120, heads=5, layers=4, in_channels=32, text_dim=32, axes=(8, 8, 8))
"""The tiny transformer."""
WEIGHTS = Path(__file__).parent / "base"
"""The trained weights of the checkpoint."""
SHIFTS = {"picture73.jpg": (-0.03, -0.03)}
"""Of an image that would look nearly like picture06.png where both are 64 pixels wide."""
MARKERS = ("system", "user", "assistant", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
"""Tokens of the template, next to the start and the end of a turn."""


def write_demo(folder: Path) -> None:
    """Write the demo's inputs, as `write_inputs`: `checkpoint/` and `images/`, the same bytes every
    time."""
    # Sides are multiples of 32 pixels: of the demo's small sizes, the square alone is.
    squares = [
        replace(
            x,
            image=replace(
                x.image, height=SIDE, width=SIDE, shift=SHIFTS.get(x.file, x.image.shift)
            ),
        )
        for x in IMAGES
    ]
    images = partial(write_dataset, examples=squares)
    write_inputs(folder, {"images": images, "checkpoint": write_checkpoint})


def write_checkpoint(folder: Path) -> None:
    """Write the complete tiny checkpoint in diffusers layout."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    write_text(folder)
    save_trained(folder, WEIGHTS, vae=build_vae(), transformer=build_transformer())
    FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    ).save_pretrained(folder / "scheduler")
    index = {
        "sample_sigmas": None,
        "processor": ["transformers", "Qwen3VLProcessor"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
        "transformer": ["diffusers", "QwenImage21Transformer2DModel"],
        "vae": ["diffusers", VAE.kind],
    }
    write_index(folder, "QwenImage21Pipeline", index)


def write_text(folder: Path) -> None:
    """Write the tokenizer and the text encoder, which are not trained. As published, the tokenizer
    is the processor's."""
    words = re.sub(r"<.*?>|[.]", " ", SYSTEM)
    tokenizer = word_tokenizer((*CAPTIONS, words), markers=MARKERS)
    tokenizer.save_pretrained(folder / "processor")
    write_text_encoder(folder, build_text_encoder(tokenizer), tied="lm_head.weight")


def build_text_encoder(tokenizer: Any) -> Any:
    """A Qwen3-VL of many thin layers, whose features of a word are its embedding."""
    return random_qwen3_vl(
        "Qwen3VLForConditionalGeneration",
        tokenizer,
        CAPTIONS,
        width=ARCH.text_dim,
        layers=TEXT_LAYERS,
        image_token="<|image_pad|>",
    )


def build_vae() -> Any:
    """A VAE of few channels, untrained."""
    from diffusers import AutoencoderKLQwenImage21

    return random_model(
        "vae", AutoencoderKLQwenImage21, base_dim=8, decoder_base_dim=12,
        dim_mult=[1, 2, 4, 4, 4], num_res_blocks=1, z_dim=ARCH.in_channels,
        latents_mean=[0.0] * ARCH.in_channels, latents_std=[1.0] * ARCH.in_channels,
    )  # fmt: skip


def build_transformer() -> Any:
    """The tiny transformer, untrained."""
    from diffusers import QwenImage21Transformer2DModel

    return random_model("transformer", QwenImage21Transformer2DModel, **config_of(ARCH))
