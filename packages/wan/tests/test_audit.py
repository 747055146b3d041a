"""A precision audit of Wan, on the tiny model and as the demo's command."""

import json

import pytest
import torch
from PIL import Image

from ditkit_core.audit_findings import from_json
from ditkit_core.testing.conformance_audit import AuditChecks
from ditkit_core.testing.demo import Demo
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN


class TestWan(AuditChecks):
    spec = WAN
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


@pytest.mark.slow
def test_the_demo_is_audited(tmp_path, capsys):
    demo = Demo.write(WAN, tmp_path / "inputs")
    assert demo.train(tmp_path / "run", "--audit-precision") == 0
    assert "what matters most: timestep, which this run has in fp64" in capsys.readouterr().out
    audit = tmp_path / "run" / "audit"
    found = from_json(json.loads((audit / "precision.json").read_text()))
    assert found.own.overall.gradient < 1e-5 < found.places[-1].alone.overall.gradient
    with Image.open(audit / "precision.png") as picture:
        assert picture.width > picture.height > 400
