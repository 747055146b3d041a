"""A precision audit of FLUX.2, on the tiny model and as the demo's command."""

import pytest
import torch

from ditkit_core.testing.conformance_audit import AuditChecks, check_demo
from ditkit_core.testing.demo import Demo
from ditkit_flux2.presets import Flux2Arch
from ditkit_flux2.spec import FLUX2


class TestFlux2(AuditChecks):
    spec = FLUX2
    one_in, nightly = 2, ("test_division_and_streaming_change_no_number",)  # the toy's are daily
    arch = Flux2Arch(
        dim=32, heads=2, double_layers=1, single_layers=2, text_dim=12, text_tokens=5, guidance=True, in_channels=6,
        out_channels=6, freq_dim=16, axes=(4, 4, 4, 4),
    )  # fmt: skip

    def items(self, count, ragged=False):
        random = torch.Generator().manual_seed(0)
        grids = ([(2, 3), (2, 2)], [(2, 5), (3, 3)])
        return [
            {
                name: torch.randn(6, 1, *grid, generator=random)
                for name, grid in zip(("latents", "reference.0"), grids[i % 2 if ragged else 0], strict=True)
            }
            | {"text": torch.randn(5, 12, generator=random)}
            for i in range(count)
        ]


@pytest.mark.exhaustive
def test_the_demo_is_audited(tmp_path, capsys):
    check_demo(Demo.write(FLUX2, tmp_path / "inputs"), tmp_path / "run")
    assert "what matters most: timestep, which this run has in fp64" in capsys.readouterr().out
