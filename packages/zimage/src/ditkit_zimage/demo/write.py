"""The demo's inputs: a complete tiny Z-Image checkpoint with random weights, and captioned images of simple shapes.

The demo trains on these exactly as a run trains on real weights. The checkpoint is in diffusers layout, and knows nothing: what is learned is how
latents of these images differ from noise.
"""

from functools import partial
from pathlib import Path

from ditkit_core.data.media.synthetic import random_model, write_index, write_inputs
from ditkit_core.families.demo import CAPTIONS, write_shapes, write_text_model, write_vae
from ditkit_zimage.spec import SHIFT, VAE

TEXT_DIM, AXES, HEADS, CHANNELS = 32, (8, 12, 12), 2, 16
SIZES = ((64, 64), (48, 80), (80, 48))
"""(height, width) of the images, in turn."""


def write_demo(folder: Path) -> None:
    """Write the demo's inputs, as `write_inputs`: `checkpoint/` and `images/`, the same bytes every time."""
    write_inputs(folder, {"images": partial(write_shapes, frame_step=0, sizes=SIZES), "checkpoint": write_checkpoint})


def write_checkpoint(folder: Path) -> None:
    """Write the complete tiny checkpoint in diffusers layout."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel

    write_text_model(folder, CAPTIONS, width=TEXT_DIM)
    write_vae(folder, VAE)
    FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=SHIFT).save_pretrained(folder / "scheduler")
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
