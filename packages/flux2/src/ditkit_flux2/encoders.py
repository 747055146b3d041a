"""The VAE and the text encoders of FLUX.2.

Captions are read by the Mistral 3 of FLUX.2-dev or the Qwen3 of FLUX.2-klein, each in a chat
template of its own.
"""

from dataclasses import replace

from ditkit_core.families.batch_norm_vae import batch_normed
from ditkit_core.families.language_models import QWEN3, TextEncoding, TextFamily

VAE = batch_normed(
    label="the FLUX.2 VAE",
    remedy="get ae.safetensors of black-forest-labs/FLUX.2-dev, or name a diffusers vae folder",
)
"""The VAE of all FLUX.2 models."""

# As the official code has it, in `src/flux2/system_messages.py` of black-forest-labs/flux2: with a
# line break after "object".
_SYSTEM_MESSAGE = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing "
    "on object relationships, object\nattribution and actions without speculation."
)

_MISTRAL_SMALL_3 = {
    "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
    "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e9,
    "sliding_window": None,
}  # fmt: skip

MISTRAL = TextFamily(
    name="Mistral 3",
    layers=(10, 20, 30),
    before=f"<s>[SYSTEM_PROMPT]{_SYSTEM_MESSAGE}[/SYSTEM_PROMPT][INST]",
    after="[/INST]",
    removed="[IMG]",
    special=("<s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"),
    padding="<pad>",
    pads_left=True,
    kind="Mistral",
    model_type="mistral",
    unstated={"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None},
    published={"Mistral Small 3": _MISTRAL_SMALL_3},
)
"""The text encoder of FLUX.2-dev; its padding has id 11."""

QWEN = replace(
    QWEN3,
    layers=(9, 18, 27),
    after="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    special=("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
)
"""The text encoder of FLUX.2-klein; its padding has id 151643."""

TEXT = TextEncoding(
    models=(MISTRAL, QWEN),
    reader="FLUX.2",
    remedy="set model.text_encoder to the text_encoder folder of FLUX.2, or a bf16 file of its Mistral or Qwen3",
    keeps_padding=True,
)
"""The transformer attends to all 512 tokens of a caption, padding included."""
