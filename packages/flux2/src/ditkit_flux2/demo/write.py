"""The demo's inputs: a complete tiny FLUX.2 klein base checkpoint with random weights, captioned images and editing pairs.

The demo trains on these exactly as a run trains on real weights. The checkpoint is in diffusers layout. Its random initialisation
matters, because LoRA trains only the linear layers of the blocks: the frozen `img_in` must keep all of the image, the gates must let
the blocks' result through, and the frozen head must be able to output it.
"""

import math
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from ditkit_core.data.media.synthetic import isometry, random_model, write_index, write_inputs, write_text_encoder
from ditkit_flux2.demo.media import EXAMPLES, DemoImage, render, write_dataset

HEADS, AXES = 4, (4, 4, 4, 4)
WIDTH = HEADS * sum(AXES)
DOUBLE_BLOCKS, SINGLE_BLOCKS = 1, 2
TEXT_DIM, TEXT_LAYERS = 16, 28  # the deepest hidden state read is 27, which in a model of 27 layers would be normalised
LATENT_CHANNELS = 4
VAE_DIMS = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4}
PIXELS = 128
"""Side of the square images that the VAE's statistics are measured on."""

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def write_demo(folder: Path) -> None:
    """Write the demo's inputs, as `write_inputs`: `checkpoint/` and `pictures/`, the same bytes every time."""
    captions = [caption for example in EXAMPLES for caption in example.captions]
    write_inputs(folder, {"pictures": write_dataset, "checkpoint": lambda part: write_checkpoint(part, captions)})


def write_checkpoint(folder: Path, captions: list[str]) -> None:
    """Write a complete tiny klein base checkpoint in diffusers layout, with random weights.

    Args:
        folder: The folder to write.
        captions: Sentences whose words become tokens; other words are spelled in bytes.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    tokenizer = build_tokenizer(captions)
    tokenizer.save_pretrained(folder / "tokenizer")
    text_encoder = build_text_encoder(len(tokenizer), tokenizer.pad_token_id)
    write_text_encoder(folder, text_encoder, tied="lm_head.weight")
    build_vae().save_pretrained(folder / "vae")
    build_transformer().save_pretrained(folder / "transformer")
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
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[(start[:-1], start[-1]) for start in starts],
        eos_token=END,
        pad_token=PAD,
        unk_token=PAD,
        model_max_length=512,
        chat_template=CHAT_TEMPLATE,
        padding_side="right",
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, START, END)])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    return tokenizer


def build_text_encoder(vocabulary_size: int, pad_token_id: int) -> Any:
    """A Qwen3 of many thin layers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary_size,
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
        pad_token_id=pad_token_id,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    return random_model("text encoder", Qwen3ForCausalLM, config)


def build_vae() -> Any:
    """A VAE of few channels whose latents of the demo's images have mean 0 and variance 1 in every channel."""
    from diffusers import AutoencoderKLFlux2

    vae = random_model("vae", AutoencoderKLFlux2, **VAE_DIMS, latent_channels=LATENT_CHANNELS).requires_grad_(False)
    modes = [vae.encode(_pixels(example.image)).latent_dist.mode() for example in EXAMPLES]
    patches = torch.cat([functional.pixel_unshuffle(mode, 2)[0].flatten(1) for mode in modes], dim=1)
    vae.bn.running_mean.copy_(patches.mean(dim=1))
    vae.bn.running_var.copy_(patches.var(dim=1))
    return vae


def build_transformer() -> Any:
    """A transformer of one narrow double block and two single ones."""
    from diffusers import Flux2Transformer2DModel

    channels = 4 * LATENT_CHANNELS
    model = random_model(
        "transformer",
        Flux2Transformer2DModel,
        in_channels=channels,
        num_layers=DOUBLE_BLOCKS,
        num_single_layers=SINGLE_BLOCKS,
        num_attention_heads=HEADS,
        attention_head_dim=sum(AXES),
        joint_attention_dim=3 * TEXT_DIM,
        axes_dims_rope=AXES,
        guidance_embeds=False,
    )
    with torch.no_grad():
        columns = isometry(WIDTH, channels, "patch")
        # Without its blocks the model would predict the noised latents: near the truth where noise is strong.
        model.x_embedder.weight.copy_(columns * math.sqrt(WIDTH / channels))
        model.proj_out.weight.copy_(columns.T)
        model.norm_out.linear.weight.mul_(0.3)
        for modulation in (
            model.double_stream_modulation_img,
            model.double_stream_modulation_txt,
            model.single_stream_modulation,
        ):
            modulation.linear.weight.unflatten(0, (-1, 3, WIDTH))[:, 2].mul_(4)  # the gates, to about 1
        model.context_embedder.weight.mul_(0.3)  # hidden states of the text encoder are about 3 times too large
    return model


def _pixels(image: DemoImage) -> Float[Tensor, "1 3 height width"]:
    """An image at the side `PIXELS`, in [-1, 1]."""
    pixels = torch.from_numpy(render(image)).permute(2, 0, 1)[None].float() / 127.5 - 1
    return functional.interpolate(pixels, size=(PIXELS, PIXELS), mode="bilinear", antialias=True)
