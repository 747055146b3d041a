"""The demo's inputs: a complete tiny Z-Image checkpoint, and captioned images.

The demo trains on these exactly as a run trains on real weights. The checkpoint is in diffusers
layout. Its VAE and transformer were trained on generated shapes by
tools/demo/train_demo_base_zimage.py; their weights are part of the package, in bf16.
"""

from pathlib import Path
from typing import Any

from ditkit_core.data.media.synthetic import random_model, write_index, write_inputs
from ditkit_core.families.demo import save_trained, write_text_model
from ditkit_core.families.demo_places import CAPTIONS, write_dataset
from ditkit_zimage.spec import SHIFT

HEADS, AXES, LAYERS = 3, (8, 12, 12), 4
TEXT_DIM, CHANNELS = 32, 16
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
    FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=SHIFT).save_pretrained(
        folder / "scheduler"
    )
    save_trained(folder, WEIGHTS, vae=build_vae(), transformer=build_transformer())
    index = {
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3ForCausalLM"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "transformer": ["diffusers", "ZImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    write_index(folder, "ZImagePipeline", index)


def write_text(folder: Path) -> None:
    """Write the tokenizer and the text encoder, which are not trained."""
    write_text_model(folder, CAPTIONS, width=TEXT_DIM, are_separate=True)


def build_vae() -> Any:
    """A VAE of few channels, untrained."""
    from diffusers import AutoencoderKL

    return random_model(
        "vae", AutoencoderKL, block_out_channels=(16, 16, 32, 32), layers_per_block=1,
        norm_num_groups=4,
        latent_channels=CHANNELS, scaling_factor=1.0, shift_factor=0.0,
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
    )  # fmt: skip


def build_transformer() -> Any:
    """A transformer of one noise refiner, one context refiner and four narrow layers, untrained."""
    from diffusers import ZImageTransformer2DModel

    return random_model(
        "transformer", ZImageTransformer2DModel, in_channels=CHANNELS, dim=HEADS * sum(AXES),
        n_layers=LAYERS,
        n_refiner_layers=1, n_heads=HEADS, n_kv_heads=HEADS, cap_feat_dim=TEXT_DIM,
        axes_dims=list(AXES),
    )  # fmt: skip
