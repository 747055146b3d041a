"""The VAE of Krea 2, which is that of Qwen-Image, and its text encoder: twelve layers of Qwen3-VL.

Source: `Krea2Pipeline` of diffusers: its template, and what of it is dropped. It puts the padding
between caption and end of the template, which changes nothing for the tokens that count: positions
count real tokens alone, and padding is masked.
"""

from dataclasses import replace

from ditkit_core.families.causal_vae import causal_image_vae
from ditkit_core.families.language_models import QWEN3_VL, TextEncoding
from ditkit_krea2.presets import TEXT_LAYERS

SYSTEM = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:"
)
PREFIX_TOKENS, TEXT_TOKENS = 34, 512
"""Tokens before a caption, whose features are dropped; most tokens of a caption and of the end of
the template."""


VAE = causal_image_vae(
    label="the VAE of Krea 2, which is that of Qwen-Image",
    remedy="name the vae folder of Krea 2 or of Qwen-Image, or ComfyUI's qwen_image_vae.safetensors",
)

READER = replace(
    QWEN3_VL,
    layers=TEXT_LAYERS,
    before=f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n",
    dropped=PREFIX_TOKENS,
)

TEXT = TextEncoding(
    models=(READER,),
    reader="Krea 2",
    remedy="set model.text_encoder to the text_encoder folder of Krea 2, or to Qwen3-VL 4B",
    num_tokens=PREFIX_TOKENS + TEXT_TOKENS,
    keeps_end=True,
)
