"""The demo's inputs: a complete tiny Zed checkpoint with random weights, and captioned media of simple shapes."""

from pathlib import Path

from ditkit_zed.encoders import VAE
from ditkit_zed.presets import PRESETS
from ditkit_zed.spec import ZED

from ditkit_core.data.media.synthetic import write_index, write_inputs
from ditkit_core.families.demo import (
    CAPTIONS,
    write_shapes,
    write_text_model,
    write_transformer,
    write_vae,
)


def write_demo(folder: Path) -> None:
    """Write the demo's inputs, as `write_inputs`: `checkpoint/` and `media/`, the same bytes every time."""
    write_inputs(
        folder,
        {
            "media": lambda media: write_shapes(media, ZED.data.frame_step, ZED.data.fps),
            "checkpoint": write_checkpoint,
        },
    )


def write_checkpoint(folder: Path) -> None:
    """Write the complete tiny checkpoint in diffusers layout."""
    write_text_model(folder, CAPTIONS, width=PRESETS["two-blocks"].text_dim)
    write_vae(folder, VAE)
    write_transformer(folder, ZED, PRESETS["two-blocks"])
    write_index(
        folder,
        "ZedPipeline",
        {"transformer": ["diffusers", "ZedTransformer"], "vae": ["diffusers", VAE.kind]},
    )
