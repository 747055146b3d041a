"""What is said about a file of unknown origin."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ditkit_core.adapters.files.inspect import inspect_file, inspection_text
from ditkit_core.testing.toy import TOY, native_name, official_name
from ditkit_core.testing.world import make_model

HOSTILE = {
    "\x1b[31mtitle": "\x1b]0;a window's title\x07\x1b[2J",
    "forged": "a\rerror: another line",
    "turned": "\u202egnp.exe",
    "long": "x" * 10_000 + "\x1b[2J",
}


@pytest.mark.parametrize("kind", ["transformer", "adapter"])
def test_a_file_of_unknown_origin_says_nothing_to_the_terminal(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.safetensors"
    state = make_model(TOY, TOY.architecture.presets["tiny"]).state_dict()
    if kind == "adapter":
        out, width = state["layers.0.qkv.weight"].shape
        name = official_name("layers.0.qkv.weight").removesuffix(".weight")
        save_file(
            {
                f"diffusion_model.{name}.lora_A.weight": torch.ones(2, width),
                f"diffusion_model.{name}.lora_B.weight": torch.ones(out, 2),
            },
            path,
            metadata=HOSTILE,
        )
    else:
        named = {official_name(name): tensor.contiguous() for name, tensor in state.items()}
        assert {native_name(name) for name in named} == set(state)
        save_file({**named, "\x1b[2Jblocks.0": torch.ones(2)}, path, metadata=HOSTILE)
    about = inspect_file(path, TOY)
    assert about["kind"] == kind and about["metadata"].items() >= HOSTILE.items()
    text = inspection_text(about)
    assert all(line.isprintable() for line in text.split("\n"))
    assert len(text.split("\n")) < 40 and max(map(len, text.split("\n"))) < 400
    assert r"\x1b[31mtitle: \x1b]0;a window's title" in text
