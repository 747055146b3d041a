"""The demo's inputs: a complete tiny Krea 2 checkpoint, and captioned images.

The demo trains on these exactly as a run trains on real weights. The checkpoint is in diffusers
layout. Its VAE and transformer were trained on generated shapes by
tools/demo/train_demo_base_krea2.py; their weights are part of the package, in bf16.
"""

import re
from pathlib import Path
from typing import Any

from ditkit_core.data.media.synthetic import (
    random_model,
    write_index,
    write_inputs,
    write_text_encoder,
)
from ditkit_core.families.demo import random_qwen3_vl, save_trained, word_tokenizer
from ditkit_core.families.demo_places import CAPTIONS, write_dataset
from ditkit_krea2.encoders import SYSTEM, VAE
from ditkit_krea2.presets import TEXT_LAYERS, Krea2Arch, config_of

ARCH = Krea2Arch(
    dim=96, heads=3, kv_heads=1, layers=5, mlp_dim=288, freq_dim=64, text_dim=32, text_heads=2,
    text_kv_heads=2, text_mlp_dim=48, layerwise_blocks=1, refiner_blocks=1, axes=(8, 12, 12),
)  # fmt: skip
"""The tiny transformer."""
WEIGHTS = Path(__file__).parent / "base"
"""The trained weights of the checkpoint."""


def write_demo(folder: Path) -> None:
    """Write the demo's inputs, as `write_inputs`: `checkpoint/` and `images/`, the same bytes every
    time."""
    write_inputs(folder, {"images": write_dataset, "checkpoint": write_checkpoint})


def write_checkpoint(folder: Path) -> None:
    """Write the complete tiny checkpoint in diffusers layout."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    write_text(folder)
    save_trained(folder, WEIGHTS, vae=build_vae(), transformer=build_transformer())
    FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=6400,
    ).save_pretrained(folder / "scheduler")
    index = {
        "is_distilled": False,
        "text_encoder_select_layers": list(TEXT_LAYERS),
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3VLModel"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "transformer": ["diffusers", "Krea2Transformer2DModel"],
        "vae": ["diffusers", VAE.kind],
    }
    write_index(folder, "Krea2Pipeline", index)


def write_text(folder: Path) -> None:
    """Write the tokenizer and the text encoder, which are not trained."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    write_text_encoder(folder, build_text_encoder(tokenizer), tied="")


def build_tokenizer() -> Any:
    """A tokenizer that has as many tokens for the template as the published one."""
    words = re.sub(r"[,:]", "", SYSTEM)
    markers = ("system", "user", "assistant", "Describe")
    return word_tokenizer((*CAPTIONS, words), markers=markers)


def build_text_encoder(tokenizer: Any) -> Any:
    """A Qwen3-VL of many thin layers, whose features of a word are its embedding."""
    return random_qwen3_vl(
        "Qwen3VLModel", tokenizer, CAPTIONS, width=ARCH.text_dim, layers=TEXT_LAYERS[-1] + 1
    )


def build_vae() -> Any:
    """A VAE of few channels, untrained."""
    from diffusers import AutoencoderKLQwenImage

    return random_model(
        "vae", AutoencoderKLQwenImage, base_dim=16, dim_mult=[1, 1, 2, 2], num_res_blocks=1,
        z_dim=ARCH.in_channels, latents_mean=[0.0] * ARCH.in_channels,
        latents_std=[1.0] * ARCH.in_channels,
    )  # fmt: skip


def build_transformer() -> Any:
    """The tiny transformer, untrained."""
    from diffusers import Krea2Transformer2DModel

    return random_model("transformer", Krea2Transformer2DModel, **config_of(ARCH))
