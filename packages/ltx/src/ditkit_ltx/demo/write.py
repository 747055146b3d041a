"""The demo's inputs: a complete tiny LTX-Video checkpoint with random weights, and captioned clips of
simple shapes.

The demo trains on these exactly as a run trains on real weights. The checkpoint is in diffusers
layout.
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
    CAPTIONS,
    random_t5,
    unigram_tokenizer,
    write_shapes,
    write_vae,
)
from ditkit_ltx.encoders import FPS, FRAMES, VAE
from ditkit_ltx.presets import LtxArch, config_of

ARCH = LtxArch(dim=64, heads=4, layers=2, in_channels=16, text_dim=32)
"""The tiny transformer."""
_STAGES = 4


def write_demo(folder: Path) -> None:
    """Write the demo's inputs, as `write_inputs`: `checkpoint/` and `clips/`, the same bytes every
    time."""
    write_inputs(
        folder,
        {"clips": lambda clips: write_shapes(clips, FRAMES, FPS), "checkpoint": write_checkpoint},
    )


def write_checkpoint(folder: Path, causal: bool = False) -> None:
    """Write the complete tiny checkpoint in diffusers layout: of a model up to 0.9.1 whose VAE
    decodes with a noise level, or (`causal`) of a later one."""
    from diffusers import FlowMatchEulerDiscreteScheduler, LTXVideoTransformer3DModel

    tokenizer = unigram_tokenizer(CAPTIONS)
    tokenizer.save_pretrained(folder / "tokenizer")
    write_text_encoder(
        folder,
        random_t5("T5", len(tokenizer), width=ARCH.text_dim),
        tied="encoder.embed_tokens.weight",
    )
    write_vae(folder, VAE, sizes())
    transformer = random_model("transformer", LTXVideoTransformer3DModel, **config_of(ARCH))
    transformer.save_pretrained(folder / "transformer")
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


def sizes() -> dict[str, Any]:
    """Arguments of a VAE with the published strides and thin layers."""
    widths, layers = (8,) * _STAGES, (1,) * (_STAGES + 1)
    return {
        "latent_channels": ARCH.in_channels,
        "block_out_channels": widths,
        "decoder_block_out_channels": widths,
        "layers_per_block": layers,
        "decoder_layers_per_block": layers,
        "timestep_conditioning": True,
    }
