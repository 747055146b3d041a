"""The demo's inputs: a complete tiny LTX-Video checkpoint, and captioned clips.

The demo trains on these exactly as a run trains on real weights. The checkpoint is in diffusers
layout. Its VAE and transformer were trained on generated clips by
tools/demo/train_demo_base_ltx.py; their weights are part of the package, in bf16.
"""

from pathlib import Path
from typing import Any

from ditkit_core.data.media.synthetic import (
    random_model,
    write_index,
    write_inputs,
    write_text_encoder,
)
from ditkit_core.families.demo import (
    random_t5,
    save_trained,
    separate_pieces,
    unigram_tokenizer,
)
from ditkit_core.families.demo_motions import CAPTIONS, write_clips
from ditkit_ltx.encoders import VAE
from ditkit_ltx.presets import LtxArch, config_of

ARCH = LtxArch(dim=96, heads=4, layers=4, in_channels=48, text_dim=32)
"""The tiny transformer."""
WEIGHTS = Path(__file__).parent / "base"
"""The trained weights of the checkpoint."""
_WIDTHS, _LAYERS = (24,) * 4, (1,) * 5


def write_demo(folder: Path) -> None:
    """Write the demo's inputs, as `write_inputs`: `checkpoint/` and `clips/`, the same bytes every
    time."""
    write_inputs(folder, {"clips": write_clips, "checkpoint": write_checkpoint})


def write_checkpoint(folder: Path, causal: bool = False) -> None:
    """Write the complete tiny checkpoint in diffusers layout: of a model up to 0.9.1 whose VAE
    decodes with a noise level, or (`causal`) of a later one."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    write_text(folder)
    save_trained(folder, WEIGHTS, vae=build_vae(), transformer=build_transformer())
    scheduler = {} if causal else SCHEDULER
    FlowMatchEulerDiscreteScheduler(**scheduler).save_pretrained(folder / "scheduler")
    index = {
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "LTXVideoTransformer3DModel"],
        "vae": ["diffusers", VAE.kind],
    }
    write_index(folder, "LTXConditionPipeline" if causal else "LTXPipeline", index)


SCHEDULER = {
    "use_dynamic_shifting": True,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
    "shift_terminal": 0.1,
}
"""Of the published models up to 0.9.1."""


def write_text(folder: Path) -> None:
    """Write the tokenizer and the text encoder, which are not trained."""
    tokenizer = unigram_tokenizer(CAPTIONS)
    tokenizer.save_pretrained(folder / "tokenizer")
    encoder = random_t5("T5", len(tokenizer), width=ARCH.text_dim)
    separate_pieces(encoder, tokenizer)
    write_text_encoder(folder, encoder, tied="encoder.embed_tokens.weight")


def build_vae() -> Any:
    """A VAE with the published strides and thin layers, untrained."""
    from diffusers import AutoencoderKLLTXVideo

    return random_model(
        "vae", AutoencoderKLLTXVideo, latent_channels=ARCH.in_channels,
        block_out_channels=_WIDTHS, decoder_block_out_channels=_WIDTHS,
        layers_per_block=_LAYERS, decoder_layers_per_block=_LAYERS, timestep_conditioning=True,
    )  # fmt: skip


def build_transformer() -> Any:
    """The tiny transformer, untrained."""
    from diffusers import LTXVideoTransformer3DModel

    return random_model("transformer", LTXVideoTransformer3DModel, **config_of(ARCH))
