"""Qwen-Image's VAE and text encoder: the last layer of Qwen2.5-VL 7B, behind its last norm, which
sees the references of an edit.

Source: `QwenImagePipeline`, `QwenImageEditPipeline` and `QwenImageEditPlusPipeline` of diffusers:
their templates, how many of their tokens are dropped, and the sizes of references.
"""

from dataclasses import replace

from ditkit_core.errors import UserError
from ditkit_core.families.causal_vae import causal_image_vae
from ditkit_core.families.language_models import (
    QWEN2_5_VL,
    QWEN2_5_VL_TOWER,
    TextEncoding,
    VisionTower,
)
from ditkit_core.families.references import area_size

SYSTEM = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:"
)
EDIT_SYSTEM = (
    "Describe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. "
    "Generate a new image that meets the user's requirements while maintaining consistency with "
    "the original input where appropriate."
)
PREFIX_TOKENS, EDIT_PREFIX_TOKENS = 34, 64
"""Tokens before a caption or an instruction, whose features are dropped."""
TEXT_TOKENS, USUAL_TOKENS = 1024, 256
"""Most tokens of a caption and of the end of the template, and how many plans count."""

VAE = causal_image_vae(
    label="the VAE of Qwen-Image",
    remedy="name the vae folder of Qwen-Image, or ComfyUI's qwen_image_vae.safetensors",
)


def _encoding(system: str, dropped: int, vision: VisionTower | None = None) -> TextEncoding:
    """The text encoding of a task: its system turn, the tokens up to a caption, which are dropped,
    and how it sees references."""
    family = replace(
        QWEN2_5_VL,
        before=f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n",
        dropped=dropped,
        vision=vision,
    )
    return TextEncoding(
        models=(family,),
        reader="Qwen-Image",
        remedy="set model.text_encoder to the text_encoder folder of Qwen-Image, or to Qwen2.5-VL 7B",
        num_tokens=dropped + TEXT_TOKENS,
        window=0 if vision else 1,
        planned_tokens=dropped + USUAL_TOKENS,
    )


TEXT = _encoding(SYSTEM, PREFIX_TOKENS)
EDIT_TEXT = _encoding(EDIT_SYSTEM, EDIT_PREFIX_TOKENS, QWEN2_5_VL_TOWER)
EDIT_PLUS_TEXT = _encoding(
    EDIT_SYSTEM,
    EDIT_PREFIX_TOKENS,
    replace(QWEN2_5_VL_TOWER, picture=f"Picture {{number}}: {QWEN2_5_VL_TOWER.picture}"),
)
"""What is seen of a reference is in front of the instruction, and behind its number where a model
takes several."""

reference_size, picture_size = area_size(1024 * 1024), area_size(384 * 384)
"""Height and width of a reference for the VAE, and for the text encoder of a model that takes
several: about a megapixel, and a seventh of it, in its shape."""


def only_reference_size(height: int, width: int, count: int) -> tuple[int, int]:
    """`reference_size` of a model that takes one reference, for VAE and text encoder.

    Raises:
        UserError: If there are several, or it is longer than 200:1.
    """
    if count > 1:
        raise UserError(
            f"Qwen-Image-Edit takes one reference, and a sample has {count}; take its later models "
            f'for several (model.preset = "edit-2509" or "edit-2511")'
        )
    return reference_size(height, width, count)
