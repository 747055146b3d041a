"""Cache keys, family by family: a cache that was encoded stays good, and what differs has another
key."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ditkit_core.encoding.encode import text_key
from ditkit_core.models.conditions import ClipInputs
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.spec import ModelSpec
from ditkit_flux2 import FLUX2
from ditkit_flux3 import FLUX3
from ditkit_krea2 import KREA2
from ditkit_ltx.encoders import Seconds
from ditkit_wan import WAN
from ditkit_zimage import ZIMAGE

LAYERS: dict[str, Any] = {"num_hidden_layers": 40, "hidden_size": 8}
SPECIAL = ("<s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "<pad>", "<|im_start|>",
           "<|im_end|>", "<|endoftext|>", "<think>", "</think>")  # fmt: skip
CAPTIONS = ("", "a fox")
KEYS: dict[str, tuple[ModelSpec, dict[str, Any], tuple[str, str]]] = {
    "FLUX.2 dev": (
        FLUX2,
        {"model_type": "mistral", **LAYERS},
        ("a1bb1afd05f0434d17552b5a204078d3", "bbe914c06aaffddf5eaee02882132a78"),
    ),
    "FLUX.2 klein": (
        FLUX2,
        {"model_type": "qwen3", **LAYERS},
        ("c9a93eb7183e8799b4111cc546d009ed", "bf38758bdb059cdaa88970bd40a7e15a"),
    ),
    "FLUX.3": (
        FLUX3,
        {"text_config": {"model_type": "qwen3_vl_text", **LAYERS}},
        ("e314ca1886d7d6cedfa6d4cd0f7eb3b4", "3413a1eef9481946f353122e35c4a6fc"),
    ),
    "Krea 2": (
        KREA2,
        {"text_config": {"model_type": "qwen3_vl_text", **LAYERS}},
        ("2fba6ef85263a6dd33de9339538e5a23", "11656e6697b4bd588d6701b10667160f"),
    ),
    "Wan": (
        WAN,
        {"model_type": "umt5"},
        ("81e25f2633db61d61b23f55dbd99df94", "d6796d93e115c4a6d5bb022eb7caeaf9"),
    ),
    "Z-Image": (
        ZIMAGE,
        {"model_type": "qwen3", **LAYERS},
        ("a27c8f138bd4db28c305c1b658434dc6", "20a51fe11d46a2ed4536c030192187a2"),
    ),
}
"""The family, the configuration of its text encoder, and the keys of `CAPTIONS` at b4ea978e, before
an encoder could read references."""


def write_encoder(folder: Path, config: dict[str, Any]) -> None:
    """Files of the same bytes in every version of every library: a header without weights, a
    configuration, and a vocabulary."""
    header = json.dumps({"zero": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    for part in ("text_encoder", "tokenizer"):
        (folder / part).mkdir()
    weights = len(header).to_bytes(8, "little") + header + bytes(4)
    (folder / "text_encoder" / "model.safetensors").write_bytes(weights)
    (folder / "text_encoder" / "config.json").write_bytes(json.dumps(config).encode())
    tokens = [{"content": token, "id": number} for number, token in enumerate(SPECIAL)]
    vocabulary = {"model": {"vocab": {}}, "added_tokens": tokens}
    (folder / "tokenizer" / "tokenizer.json").write_bytes(json.dumps(vocabulary).encode())
    (folder / "tokenizer" / "tokenizer_config.json").write_bytes(b"{}")


@pytest.mark.parametrize("family", KEYS)
def test_keys_of_captions_are_those_of_earlier_versions(tmp_path: Path, family: str) -> None:
    spec, config, keys = KEYS[family]
    write_encoder(tmp_path, config)
    encoder = spec.auxiliary.text_encoder(
        ModelPaths(base=str(tmp_path)), torch.device("cpu"), torch.bfloat16, "auto"
    )
    assert tuple(text_key(caption, encoder) for caption in CAPTIONS) == keys


def test_seconds_that_differ_have_other_identities() -> None:
    """LTX-Video's later models begin the latent frames of a clip at other times."""
    even, causal = Seconds(causal=False), Seconds(causal=True)
    clip = ClipInputs(
        clip=None, start_seconds=0.0, files={}, frames=17, height=32, width=32, fps=25.0
    )
    seconds = [encoder.condition(clip)["seconds"] for encoder in (even, causal)]
    assert not torch.equal(*seconds) and even.identity != causal.identity
