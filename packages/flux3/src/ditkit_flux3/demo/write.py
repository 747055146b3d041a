"""The demo's inputs: a complete tiny FLUX.3 klein base checkpoint, captioned images and editing
pairs.

The demo trains on these exactly as a run trains on real weights. The checkpoint is in diffusers
layout. Its transformer was trained on generated shapes by tools/demo/train_demo_base_flux3.py; its
VAE is that of FLUX.2's demo. Their weights are part of the package, in bf16.
"""

from functools import partial
from pathlib import Path
from typing import Any

from ditkit_core.data.media.synthetic import random_model, write_inputs, write_text_encoder
from ditkit_core.families.demo import random_qwen3_vl, save_trained, word_tokenizer
from ditkit_core.families.demo_edits import EXAMPLES
from ditkit_core.families.demo_places import write_dataset
from ditkit_flux3.spec import SHIFT

HEADS, AXES = 3, (8, 8, 8, 8)
TOWER_BLOCKS, JOINT_BLOCKS = 1, 4
TEXT_DIM, TEXT_LAYERS = 32, 33  # one more than are read: after the last there is a norm
LATENT_CHANNELS = 16
VAE_DIMS = {"block_out_channels": (16, 16, 32, 32), "layers_per_block": 1, "norm_num_groups": 4}
WEIGHTS = Path(__file__).parent / "base"
"""The trained weights of the checkpoint."""
CAPTIONS = tuple(caption for example in EXAMPLES for caption in example.captions)


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
    """Write tokenizer, text encoder and scheduler."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    tokenizer = word_tokenizer(CAPTIONS)
    tokenizer.save_pretrained(folder / "tokenizer")
    write_text_encoder(folder, build_text_encoder(tokenizer), tied="lm_head.weight")
    FlowMatchEulerDiscreteScheduler(shift=SHIFT).save_pretrained(folder / "scheduler")


def build_text_encoder(tokenizer: Any) -> Any:
    """A Qwen3-VL of many thin layers, whose features of a word are its embedding."""
    return random_qwen3_vl(
        "Qwen3VLForConditionalGeneration", tokenizer, CAPTIONS, width=TEXT_DIM, layers=TEXT_LAYERS
    )


def build_vae() -> Any:
    """A VAE of few channels, untrained."""
    from diffusers import AutoencoderKLFlux2

    return random_model("vae", AutoencoderKLFlux2, **VAE_DIMS, latent_channels=LATENT_CHANNELS)


def build_transformer() -> Any:
    """A transformer of one narrow block in each tower and four joint ones, untrained."""
    from diffusers import Flux3Transformer2DModel

    return random_model(
        "transformer", Flux3Transformer2DModel, in_channels=4 * LATENT_CHANNELS,
        cond_in_channels=4 * LATENT_CHANNELS, num_layers=TOWER_BLOCKS,
        num_single_layers=JOINT_BLOCKS, num_attention_heads=HEADS, attention_head_dim=sum(AXES),
        joint_attention_dim=8 * TEXT_DIM, axes_dims_rope=AXES,
    )  # fmt: skip
