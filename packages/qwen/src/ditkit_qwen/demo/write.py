"""The demo's inputs: a complete tiny Qwen-Image 2.1 checkpoint with random weights, and captioned
images of simple shapes.

The demo trains on these exactly as a run trains on real weights. The checkpoint is in diffusers
layout.
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
from ditkit_core.families.demo import word_tokenizer, write_vae
from ditkit_core.families.demo_places import CAPTIONS, IMAGES, DemoImage, write_dataset
from ditkit_qwen.encoders import SYSTEM, TEXT_LAYERS, VAE
from ditkit_qwen.presets import QwenArch, config_of

ARCH = QwenArch(dim=64, heads=2, layers=2, in_channels=16, text_dim=32, axes=(8, 12, 12))
"""The tiny transformer."""


MARKERS = ("system", "user", "assistant", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
"""Tokens of the template, next to the start and the end of a turn."""


def write_demo(folder: Path) -> None:
    """Write the demo's inputs, as `write_inputs`: `checkpoint/` and `images/`, the same bytes every
    time."""
    images = partial(write_dataset, examples=[replace(x, image=_large(x.image)) for x in IMAGES])
    write_inputs(folder, {"images": images, "checkpoint": write_checkpoint})


def _large(image: DemoImage) -> DemoImage:
    """The image with sides that are multiples of 32 pixels."""
    factor = 2 if min(image.height, image.width) < 96 else 1
    return replace(image, height=factor * image.height, width=factor * image.width)


def write_checkpoint(folder: Path) -> None:
    """Write the complete tiny checkpoint in diffusers layout. As published, the tokenizer is the
    processor's."""
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImage21Transformer2DModel

    words = re.sub(r"<.*?>|[.]", " ", SYSTEM)
    tokenizer = word_tokenizer((*CAPTIONS, words), markers=MARKERS)
    tokenizer.save_pretrained(folder / "processor")
    write_text_encoder(folder, build_text_encoder(tokenizer), tied="lm_head.weight")
    channels = ARCH.in_channels
    sizes = {
        "base_dim": 4, "decoder_base_dim": 4, "dim_mult": [1, 1, 1, 1, 1], "num_res_blocks": 1,
        "z_dim": channels, "latents_mean": [0.0] * channels, "latents_std": [1.0] * channels,
    }  # fmt: skip
    write_vae(folder, VAE, sizes)
    transformer = random_model("transformer", QwenImage21Transformer2DModel, **config_of(ARCH))
    transformer.save_pretrained(folder / "transformer")
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


def build_text_encoder(tokenizer: Any) -> Any:
    """A Qwen3-VL of many thin layers."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    reading = {
        "vocab_size": len(tokenizer), "hidden_size": ARCH.text_dim,
        "intermediate_size": 2 * ARCH.text_dim, "num_hidden_layers": TEXT_LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "max_position_embeddings": 1024, "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }  # fmt: skip
    seeing = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
        "out_hidden_size": ARCH.text_dim, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=reading, vision_config=seeing, tie_word_embeddings=True,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        architectures=["Qwen3VLForConditionalGeneration"], dtype="float32",
    )  # fmt: skip
    return random_model("text encoder", Qwen3VLForConditionalGeneration, config)
