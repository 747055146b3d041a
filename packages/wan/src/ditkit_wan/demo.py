"""The demo's inputs: a complete tiny Wan checkpoint with random weights, and a dozen captioned videos.

The demo trains on these by the same path as real weights: nothing else in ditkit knows about it. The checkpoint is in
diffusers layout. Its random initialisation matters, because LoRA reaches only the attention and feed-forward layers of
the blocks: the frozen patch embedding must keep the whole picture, the gates must let the blocks' result through, and
the frozen head must be able to say it.
"""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.demo_inputs import drawn, isometry, write_index, write_inputs, write_text_encoder
from ditkit_wan.demo_media import CLIPS, draw, write_clip

HEADS, HEAD_DIM, LAYERS, FFN_DIM = 4, 24, 3, 192
TEXT_DIM = 32
LATENT_CHANNELS = 16
VAE_DIMS = {"base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
PIXELS, FRAMES = 64, 9
"""The size that the VAE's statistics are measured at: the demo's training size."""


def write_demo(folder: Path) -> None:
    """Write the demo's inputs: `checkpoint/` and `clips/`, the same bytes every time.

    A folder that is complete is left alone; one that was half written is written again.

    Args:
        folder: Where to write; created if needed.

    Raises:
        UserError: If it cannot be written.
    """
    captions = [clip.caption for clip in CLIPS]
    write_inputs(folder, {"clips": _write_clips, "checkpoint": lambda part: write_checkpoint(part, captions)})


def _write_clips(folder: Path) -> None:
    for index, clip in enumerate(CLIPS):
        write_clip(folder / f"clip{index:02d}.mp4", clip)


def write_checkpoint(folder: Path, captions: list[str]) -> None:
    """Write a complete tiny Wan text-to-video checkpoint in diffusers layout, with random weights.

    Args:
        folder: The folder to write.
        captions: Sentences whose words become the tokenizer's vocabulary.
    """
    import diffusers
    from diffusers import UniPCMultistepScheduler

    tokenizer = build_tokenizer(captions)
    tokenizer.save_pretrained(folder / "tokenizer")
    text_encoder = build_text_encoder(len(tokenizer))
    write_text_encoder(folder, text_encoder, tied="encoder.embed_tokens.weight")
    build_vae().save_pretrained(folder / "vae")
    build_transformer().save_pretrained(folder / "transformer")
    UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    ).save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "WanPipeline",
        "_diffusers_version": diffusers.__version__,
        "boundary_ratio": None,
        "expand_timesteps": False,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", type(tokenizer).__name__],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    write_index(folder, index)


def build_tokenizer(captions: list[str]) -> Any:
    """A unigram tokenizer of the T5 kind over the captions' words and characters.

    The vocabulary is counted, not fitted by `UnigramTrainer`, whose threads may order equal pieces differently.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Counter(f"▁{word}" for caption in captions for word in caption.split())
    characters = Counter({character: 0.01 for word in sorted(words) for character in word})
    total = sum(words.values()) + sum(characters.values())
    pieces = sorted((words + characters).items(), key=lambda piece: (-piece[1], piece[0]))
    special = ["<pad>", "</s>", "<unk>"]
    vocabulary = [(piece, 0.0) for piece in special] + [(piece, math.log(n / total)) for piece, n in pieces]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def build_text_encoder(vocabulary_size: int) -> Any:
    """A two-layer UMT5 encoder."""
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=vocabulary_size, d_model=TEXT_DIM, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, pad_token_id=0, eos_token_id=1,
        architectures=["UMT5EncoderModel"],
    )  # fmt: skip
    return drawn("text encoder", UMT5EncoderModel, config)


def build_vae() -> Any:
    """A Wan 2.1 VAE of few channels whose latents of the demo's clips have mean 0 and variance 1 in every channel."""
    from diffusers import AutoencoderKLWan

    vae = drawn("vae", AutoencoderKLWan, **VAE_DIMS, z_dim=LATENT_CHANNELS).requires_grad_(False)
    latents = torch.cat([vae.encode(clip[None]).latent_dist.mean[0].flatten(1) for clip in _clip_pixels()], dim=1)
    vae.register_to_config(latents_mean=_rounded(latents.mean(dim=1)), latents_std=_rounded(latents.std(dim=1)))
    return vae


def build_transformer() -> Any:
    """A Wan text-to-video transformer of three narrow blocks."""
    from diffusers import WanTransformer3DModel

    model = drawn(
        "transformer", WanTransformer3DModel,
        num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, num_layers=LAYERS, ffn_dim=FFN_DIM,
        in_channels=LATENT_CHANNELS, out_channels=LATENT_CHANNELS, text_dim=TEXT_DIM, rope_max_seq_len=1024,
    )  # fmt: skip
    with torch.no_grad():
        model.condition_embedder.time_embedder.linear_2.weight.mul_(0.5)
        model.condition_embedder.time_proj.weight.mul_(0.3)
        for block in model.blocks:
            block.scale_shift_table[:, [2, 5]] += 1.0  # the two gates
        # Without its blocks the model would predict the noised latents: near the truth where noise is strong.
        columns = isometry(HEADS * HEAD_DIM, 4 * LATENT_CHANNELS, "patch").unflatten(1, (LATENT_CHANNELS, 1, 2, 2))
        model.patch_embedding.weight.copy_(columns * math.sqrt(HEADS * HEAD_DIM / (4 * LATENT_CHANNELS)))
        model.proj_out.weight.copy_(columns.permute(2, 3, 4, 1, 0).flatten(0, 3))
    return model


def _clip_pixels() -> list[Float[Tensor, "3 frames height width"]]:
    """The demo's clips at the training size, in [-1, 1], before encoding to mp4."""
    clips = []
    for clip in CLIPS:
        frames = torch.from_numpy(draw(clip)[:FRAMES]).permute(0, 3, 1, 2).float() / 127.5 - 1
        resized = torch.nn.functional.interpolate(frames, size=(PIXELS, PIXELS), mode="bilinear", antialias=True)
        clips.append(resized.transpose(0, 1))
    return clips


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 6) for value in values]
