"""The VAE and the text encoder of Zed.

FILL IN 4: the class of the VAE in diffusers with its published configuration, and the language model with its chat template and the layers that are read.
"""

from ditkit_core.families.language_models import QWEN3, TextEncoding
from ditkit_core.families.vae import VaeFamily

_BLOCKS = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
}
VAE = VaeFamily(
    label="the VAE of Zed",
    published={
        "latent_channels": 16, "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "scaling_factor": 0.3611,
        "shift_factor": 0.1159, "use_quant_conv": False, "use_post_quant_conv": False, **_BLOCKS,
    },
)  # fmt: skip


TEXT = TextEncoding(
    models=(QWEN3,),
    reader="Zed",
    remedy="set model.text_encoder to the text_encoder folder of Zed",
    num_tokens=128,
)
