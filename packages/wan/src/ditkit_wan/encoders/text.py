"""The UMT5 text encoder of all Wan models: its published sizes, official names, and how captions
are cleaned."""

import html
import re

import torch

from ditkit_core.families.t5 import T5Encoder, T5Encoding, T5Family
from ditkit_core.models.encoders import Streaming
from ditkit_core.models.paths import ModelPaths
from ditkit_wan.encoders.safe_names import SAFE_NAMES

TEXT_TOKENS = 512
"""Tokens of a caption, with its end token; longer captions are cut."""

# Official names to the names of transformers. Source: `T5Encoder` in Wan-Video/Wan2.1,
# wan/modules/t5.py.
_IN_BLOCK = {
    "norm1": "layer.0.layer_norm",
    **{f"attn.{part}": f"layer.0.SelfAttention.{part}" for part in "qkvo"},
    "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "norm2": "layer.1.layer_norm",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
    "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo",
}
_OUTSIDE = {"token_embedding": "shared", "norm": "encoder.final_layer_norm"}
_BLOCK = re.compile(r"^blocks\.(\d+)\.(.+)\.weight$")


def to_transformers(name: str) -> str:
    """The transformers name of a parameter of the UMT5 encoder, given in either form."""
    block = _BLOCK.match(name)
    if block and block[2] in _IN_BLOCK:
        return f"encoder.block.{block[1]}.{_IN_BLOCK[block[2]]}.weight"
    module = name.removesuffix(".weight")
    return f"{_OUTSIDE[module]}.weight" if module in _OUTSIDE else name


def clean(caption: str) -> str:
    """A caption cleaned as in the authors' training: fixed encoding, no HTML entities, single
    spaces."""
    import ftfy

    caption = html.unescape(html.unescape(ftfy.fix_text(caption)))
    return re.sub(r"\s+", " ", caption).strip()


TEXT = T5Encoding(
    model=T5Family(
        name="UMT5",
        kind="UMT5",
        published={
            "vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24,
            "num_heads": 64, "relative_attention_num_buckets": 32, "feed_forward_proj": "gated-gelu",
        },
        to_transformers=to_transformers,
    ),
    remedy="get umt5_xxl_fp16.safetensors, or set a text_encoder folder",
    num_tokens=TEXT_TOKENS,
    clean=clean,
    cleaning="ftfy, unescaped twice, spaces",
    safe_names=SAFE_NAMES,
)  # fmt: skip
"""UMT5-XXL with its padding masked; zeros take the place of padding when inputs are made."""


class TextEncoder(T5Encoder):
    """Captions to token features; an `Encoder` of the core."""

    def __init__(
        self,
        components: ModelPaths,
        device: torch.device,
        dtype: torch.dtype,
        streaming: Streaming = "auto",
    ):
        """As of `T5Encoder`."""
        super().__init__(TEXT, components, device, dtype, streaming)
