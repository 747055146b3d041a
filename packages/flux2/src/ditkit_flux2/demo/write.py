"""The demo's inputs: a complete tiny FLUX.2 klein base checkpoint, captioned images and editing
pairs.

The demo trains on these exactly as a run trains on real weights. The checkpoint is in diffusers
layout. Its VAE and transformer were trained on generated shapes by
tools/demo/train_demo_base_flux2.py; their weights are part of the package, in bf16.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ditkit_core.data.media.synthetic import (
    random_model,
    write_index,
    write_inputs,
    write_text_encoder,
)
from ditkit_core.families.demo import save_trained, separate_words, word_tokenizer
from ditkit_core.families.demo_edits import EXAMPLES
from ditkit_core.families.demo_places import write_dataset

HEADS, AXES = 3, (8, 8, 8, 8)
WIDTH = HEADS * sum(AXES)
DOUBLE_BLOCKS, SINGLE_BLOCKS = 1, 4
# the deepest hidden state read is 27, which in a model of 27 layers would be normalised
TEXT_DIM, TEXT_LAYERS = 32, 28
LATENT_CHANNELS = 16
VAE_DIMS = {"block_out_channels": (16, 16, 32, 32), "layers_per_block": 1, "norm_num_groups": 4}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif "
    "%}{% endif %}"
)
WEIGHTS = Path(__file__).parent / "base"
"""The trained weights of the checkpoint."""


def write_demo(folder: Path) -> None:
    """Write the demo's inputs, as `write_inputs`: `checkpoint/` and `images/`, the same bytes every
    time."""
    write_inputs(
        folder,
        {"images": partial(write_dataset, examples=EXAMPLES), "checkpoint": write_checkpoint},
    )


def write_checkpoint(folder: Path) -> None:
    """Write the complete tiny klein base checkpoint in diffusers layout."""
    write_text(folder)
    save_trained(folder, WEIGHTS, vae=build_vae(), transformer=build_transformer())


def write_text(folder: Path) -> None:
    """Write all of the checkpoint that is not trained: tokenizer, text encoder, scheduler and
    index."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    tokenizer = build_tokenizer([caption for example in EXAMPLES for caption in example.captions])
    tokenizer.save_pretrained(folder / "tokenizer")
    write_text_encoder(folder, build_text_encoder(tokenizer), tied="lm_head.weight")
    FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    ).save_pretrained(folder / "scheduler")
    index = {
        "is_distilled": False,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3ForCausalLM"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLFlux2"],
    }
    write_index(folder, "Flux2KleinPipeline", index)


def build_tokenizer(captions: Sequence[str]) -> Any:
    """A tokenizer of these captions' words, with the marks of Qwen3's thinking."""
    return word_tokenizer(captions, CHAT_TEMPLATE, ("<think>", "</think>"))


def build_text_encoder(tokenizer: Any) -> Any:
    """A Qwen3 of many thin layers, whose features of a word are its embedding."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_DIM,
        intermediate_size=2 * TEXT_DIM,
        num_hidden_layers=TEXT_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    model = random_model("text encoder", Qwen3ForCausalLM, config)
    separate_words(
        model.model, tokenizer, [caption for example in EXAMPLES for caption in example.captions]
    )
    return model


def build_vae() -> Any:
    """A VAE of few channels, untrained."""
    from diffusers import AutoencoderKLFlux2

    return random_model("vae", AutoencoderKLFlux2, **VAE_DIMS, latent_channels=LATENT_CHANNELS)


def build_transformer() -> Any:
    """A transformer of one narrow double block and four single ones, untrained."""
    from diffusers import Flux2Transformer2DModel

    return random_model(
        "transformer",
        Flux2Transformer2DModel,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=DOUBLE_BLOCKS,
        num_single_layers=SINGLE_BLOCKS,
        num_attention_heads=HEADS,
        attention_head_dim=sum(AXES),
        joint_attention_dim=3 * TEXT_DIM,
        axes_dims_rope=AXES,
        guidance_embeds=False,
    )
