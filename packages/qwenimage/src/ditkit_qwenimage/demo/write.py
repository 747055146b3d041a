"""The demo's inputs: a complete tiny Qwen-Image checkpoint, and captioned images.

The demo trains on these exactly as a run trains on real weights. The checkpoint is in diffusers
layout. Its transformer was trained on generated shapes by tools/demo/train_demo_base_qwenimage.py;
the VAE is the one in Krea 2's demo. Their weights are part of the package, in bf16.
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
from ditkit_core.families.demo import save_trained, separate_words, word_tokenizer
from ditkit_core.families.demo_places import CAPTIONS, write_dataset
from ditkit_qwenimage.encoders import SYSTEM, VAE
from ditkit_qwenimage.presets import QwenImageArch, config_of

ARCH = QwenImageArch(dim=72, heads=3, layers=4, text_dim=32, axes=(8, 8, 8))
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
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
    ).save_pretrained(folder / "scheduler")
    index = {
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "QwenImageTransformer2DModel"],
        "vae": ["diffusers", VAE.kind],
    }
    write_index(folder, "QwenImagePipeline", index)


def write_text(folder: Path) -> None:
    """Write the tokenizer and the text encoder, which are not trained."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    write_text_encoder(folder, build_text_encoder(tokenizer), tied="lm_head.weight")


def build_tokenizer() -> Any:
    """A tokenizer that has as many tokens for the template as the published one."""
    words = re.sub(r"[,:]", "", SYSTEM)
    pictures = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
    markers = ("system", "user", "assistant", "Describe", *pictures)
    return word_tokenizer((*CAPTIONS, words), markers=markers)


def build_text_encoder(tokenizer: Any) -> Any:
    """A Qwen2.5-VL of three thin layers, whose features of a word are its embedding."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    reading = {
        "vocab_size": len(tokenizer), "hidden_size": ARCH.text_dim,
        "intermediate_size": 2 * ARCH.text_dim, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 1024,
        "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": None,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2],
        },
    }  # fmt: skip
    seeing = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
        "out_hidden_size": ARCH.text_dim,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=reading, vision_config=seeing, tie_word_embeddings=True,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        architectures=["Qwen2_5_VLForConditionalGeneration"], dtype="float32",
    )  # fmt: skip
    model = random_model("text encoder", Qwen2_5_VLForConditionalGeneration, config)
    separate_words(model.model.language_model, tokenizer, CAPTIONS)
    return model


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
    from diffusers import QwenImageTransformer2DModel

    return random_model("transformer", QwenImageTransformer2DModel, **config_of(ARCH))
