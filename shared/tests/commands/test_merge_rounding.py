"""What the rounding of merged weights means for the adapter that was merged."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ditkit_core.commands import cli
from ditkit_core.models.precision import Precision
from ditkit_core.testing.toy import TOY, ToyArch, ToyModel, in_form

KEY = "diffusion_model.blocks.0.qkv"
LINE = re.compile(
    r"rounding to (\w+) changes the written weights by ([\d.e+-]+)(?:, which is ([\d.]+)% of what "
    r"the file changes)?"
)


@pytest.mark.parametrize(
    ("size", "dtype", "warned"), [(1e-3, "bf16", "--dtype fp32"), (1.0, "bf16", ""), (1e-3, "fp32", ""), (0.01, "fp8_scaled", "--dtype bf16 or fp32")]
)  # fmt: skip
def test_rounding_is_compared_with_the_weights_and_with_the_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: float, dtype: str, warned: str
) -> None:
    torch.manual_seed(0)
    save_file(
        in_form(ToyModel(ToyArch(), Precision(matmul=torch.float32)).state_dict(), "official"),
        tmp_path / "base.safetensors",
    )
    down, up = torch.randn(2, 32), size * torch.randn(96, 2)
    save_file(
        {f"{KEY}.lora_A.weight": down, f"{KEY}.lora_B.weight": up}, tmp_path / "x.safetensors"
    )
    flags = [
        "--adapter",
        tmp_path / "x.safetensors",
        "--merge",
        "--base",
        tmp_path / "base.safetensors",
        "--dtype",
        dtype,
    ]
    assert cli.run(TOY, "export", [*map(str, flags), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    found = LINE.search(said.out)
    assert found is not None and found[1] == dtype
    base = load_file(tmp_path / "base.safetensors")["blocks.0.qkv.weight"]
    wanted = base + up @ down
    if dtype == "fp8_scaled":
        assert float(found[3]) > 10
    else:
        written = load_file(
            tmp_path / "out" / "transformer_official" / "diffusion_pytorch_model.safetensors"
        )["blocks.0.qkv.weight"].float()
        error = float((written - wanted).norm())
        assert float(found[2]) == pytest.approx(error / float(wanted.norm()), rel=0.06, abs=1e-7)
        assert float(found[3] or 0) == pytest.approx(
            100 * error / float((up @ down).norm()), rel=0.02, abs=0.06
        )
    assert (warned in said.err) if warned else said.err == ""
