"""The base that the demo trains on: small models of the same structure as real ones, trained on
generated clips.

`tools/demo/train_demo_base_wan.py` made the files in `base/`. Training gives other weights on
another processor, so the weights are kept.
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ditkit_wan.demo.models import build_text_encoder

BASE = Path(__file__).parent / "base"
Part = Literal["vae", "transformer"]


def load_part(part: Part, folder: Path = BASE) -> Any:
    """A trained model, in fp32 and eval mode; its configuration is in the header of its file."""
    import diffusers

    kind = diffusers.AutoencoderKLWan if part == "vae" else diffusers.WanTransformer3DModel
    file = folder / f"{part}.safetensors"
    with safe_open(file, "pt") as header:
        config = json.loads(header.metadata()["config"])
    with torch.random.fork_rng(devices=[]):  # the library's initialisation, which is replaced
        model = kind(**config)
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(file).items()})
    return model.eval()


def load_text_encoder(folder: Path = BASE) -> Any:
    """The frozen text encoder that the transformer was trained with."""
    state = {
        name: tensor.float()
        for name, tensor in load_file(folder / "text_encoder.safetensors").items()
    }
    model = build_text_encoder(len(state["shared.weight"]))
    model.load_state_dict({**state, "encoder.embed_tokens.weight": state["shared.weight"]})
    return model
