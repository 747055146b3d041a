"""tools/demo/train_demo_base_wan.py: what its shortcuts rely on, and the whole script in its
smallest run."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workspace import ROOT


def test_an_update_has_singular_values_of_about_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "demo"))
    from motion_bases import orthogonalized

    for rows, columns in ((96, 96), (384, 96), (16, 432)):
        update = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(orthogonalized(update))
        assert values.min() > 0.3 and values.max() < 1.3


@torch.no_grad()
def test_a_bias_stands_for_the_padding_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "demo"))
    from diffusers import WanTransformer3DModel

    from train_demo_base_wan import PUBLISHED_TOKENS, TRANSFORMER, BiasedAttention, encode_texts

    texts = encode_texts(["a red circle moves right on a dark background", ""])
    torch.manual_seed(0)
    model = WanTransformer3DModel(**TRANSFORMER | {"num_layers": 2}).double()
    latents, time = torch.randn(2, 16, 3, 8, 8).double(), torch.tensor([300.0, 900.0]).double()
    padded = torch.zeros(2, PUBLISHED_TOKENS, texts.features.shape[2]).double()
    padded[:, : texts.features.shape[1]] = texts.features
    expected = model(latents, time, padded, return_dict=False)[0]
    attention = BiasedAttention()
    attention.bias = texts.bias.double()
    for block in model.blocks:
        block.attn2.set_processor(attention)
    short = model(latents, time, texts.features.double(), return_dict=False)[0]
    assert expected.std() > 0.01 and torch.allclose(short, expected, rtol=0, atol=1e-6)


@pytest.mark.exhaustive
def test_two_steps_of_every_stage_make_a_package(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "tools" / "demo" / "train_demo_base_wan.py"),
        "--steps",
        "2",
        "--clips",
        "1",
    ]
    command += ["--work", str(tmp_path / "work"), "--to", str(tmp_path / "base")]
    for _ in range(2):  # the second time, every stage is found done
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert sorted(file.stem for file in (tmp_path / "base").iterdir()) == [
            "text_encoder",
            "transformer",
            "vae",
        ]
        assert "PSNR of 40 held-out clips with bf16 weights" in done.stdout
    assert "2/2" not in done.stdout
