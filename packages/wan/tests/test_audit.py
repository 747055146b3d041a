"""A precision audit of Wan, on the tiny model and as the demo's command."""

import re

import pytest
import torch

from ditkit_core.testing.conformance_audit import AuditChecks, check_demo
from ditkit_core.testing.demo import Demo
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN


class TestWan(AuditChecks):
    spec = WAN
    one_in, nightly = 2, ("test_division_and_streaming_change_no_number",)  # the toy's are daily
    arch = WanArch(
        dim=48, ffn_dim=64, heads=2, layers=2, in_channels=4, out_channels=4, text_dim=20, text_tokens=6, freq_dim=16
    )

    def items(self, count, ragged=False):
        random = torch.Generator().manual_seed(0)
        grids = [(4, 6), (4, 10)] if ragged else [(4, 6)]
        sizes = [(4, 2, *grids[i % len(grids)]) for i in range(count)]
        return [
            {"latents": torch.randn(size, generator=random), "text": torch.randn(3 + i, 20, generator=random)}
            for i, size in enumerate(sizes)
        ]


@pytest.mark.exhaustive
def test_the_demo_is_audited(tmp_path, capsys):
    check_demo(Demo.write(WAN, tmp_path / "inputs"), tmp_path / "run")
    # Which of them is first by a few per cent depends on the CPU.
    most = re.search(r"what matters most: (\w+), which this run has in fp32", capsys.readouterr().out)
    assert most is not None and most[1] in ("modulation", "residual")
