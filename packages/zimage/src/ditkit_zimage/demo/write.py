"""The demo's inputs: a complete tiny Z-Image checkpoint with random weights, and captioned images of simple shapes.

The demo trains on these exactly as a run trains on real weights. The checkpoint is in diffusers layout, and knows nothing: what is learned is how
latents of these images differ from noise.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

from ditkit_core.data.media.synthetic import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    paint,
    random_model,
    write_index,
    write_inputs,
    write_text_encoder,
)
from ditkit_core.io.files import write_text

TEXT_DIM, AXES, HEADS, CHANNELS = 32, (8, 12, 12), 2, 16
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = ((64, 64), (48, 80), (80, 48))
"""(height, width) of the images, in turn."""
EXAMPLES = [
    (f"image{index:02d}.png", colour, shape, background, SIZES[index % 3])
    for index, (background, shape, colour) in enumerate(product(BACKGROUNDS, SHAPES, COLOURS))
]


def caption_of(colour: str, shape: str, background: str) -> str:
    """The caption of an image."""
    return f"a {colour} {shape} on a {background} background"


def write_demo(folder: Path) -> None:
    """Write the demo's inputs, as `write_inputs`: `checkpoint/` and `images/`, the same bytes every time."""
    write_inputs(folder, {"images": write_images, "checkpoint": write_checkpoint})


def write_images(folder: Path) -> None:
    """Write all images, and the metadata.jsonl that has their captions."""
    from PIL import Image

    lines = []
    for name, colour, shape, background, (height, width) in EXAMPLES:
        centre, radius = (height * 0.5, width * 0.5), height * 0.22
        pixels = paint(height, width, shape=shape, colour=colour, background=background, centre=centre, radius=radius)
        Image.fromarray(pixels).save(folder / name)
        lines.append(json.dumps({"file_name": name, "text": caption_of(colour, shape, background)}) + "\n")
    write_text(folder / "metadata.jsonl", "".join(lines))


def write_checkpoint(folder: Path) -> None:
    """Write the complete tiny checkpoint in diffusers layout."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tokenizer([caption_of(*example[1:4]) for example in EXAMPLES])
    tokenizer.save_pretrained(folder / "tokenizer")
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=TEXT_DIM, intermediate_size=2 * TEXT_DIM, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=tokenizer.pad_token_id,
        architectures=["Qwen3ForCausalLM"], dtype="float32",
    )  # fmt: skip
    write_text_encoder(folder, random_model("text encoder", Qwen3ForCausalLM, config), tied="lm_head.weight")
    FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0).save_pretrained(folder / "scheduler")
    blocks = {
        f"{way}_block_types": [f"{way.title()}{kind}Block2D"] * 4
        for way, kind in (("down", "Encoder"), ("up", "Decoder"))
    }
    vae = random_model(
        "vae", AutoencoderKL, block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4,
        latent_channels=CHANNELS, use_quant_conv=False, use_post_quant_conv=False, scaling_factor=1.0, shift_factor=0.0,
        **blocks,
    )  # fmt: skip
    vae.save_pretrained(folder / "vae")
    transformer = random_model(
        "transformer", ZImageTransformer2DModel, in_channels=CHANNELS, dim=HEADS * sum(AXES), n_layers=3,
        n_refiner_layers=1, n_heads=HEADS, n_kv_heads=HEADS, cap_feat_dim=TEXT_DIM, axes_dims=list(AXES),
    )  # fmt: skip
    transformer.save_pretrained(folder / "transformer")
    index = {
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3ForCausalLM"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "transformer": ["diffusers", "ZImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    write_index(folder, "ZImagePipeline", index)


def build_tokenizer(captions: list[str]) -> Any:
    """A byte-level tokenizer like Qwen's, in which every word of the captions that follows a space is one token.

    The merges build a word letter by letter from its space on. No other merge applies on the way, so the order of words is free.
    """
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer

    space = "Ġ"  # how byte-level tokenizers write it
    words = {f"{space}{word}" for caption in captions for word in caption.split()}
    starts = sorted({word[:end] for word in words for end in range(2, len(word) + 1)}, key=lambda s: (len(s), s))
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *starts]
    tokenizer = Qwen2Tokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)}, merges=[(start[:-1], start[-1]) for start in starts],
        eos_token=END, pad_token=PAD, unk_token=PAD, model_max_length=512, chat_template=CHAT_TEMPLATE, padding_side="right",
    )  # fmt: skip
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, START, END)])
    return tokenizer
