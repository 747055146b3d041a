"""tools/demo/train_demo_base_flux2.py: what its shortcut relies on."""

import pytest
import torch
from safetensors.torch import load_file

from workspace import ROOT


@torch.no_grad()
def test_some_rows_with_a_bias_stand_for_all_of_the_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "demo"))
    from train_demo_base_flux2 import PADDING_ROWS, ROWS, TEXT, demo, velocity

    model = demo.build_transformer()
    model.load_state_dict(load_file(demo.WEIGHTS / "transformer.safetensors"))
    random = torch.Generator().manual_seed(0)
    noised, sigma = torch.randn(2, 64, 4, 4, generator=random), torch.tensor([0.4, 0.9])
    text = torch.randn(2, ROWS, 96, generator=random), torch.randn(96, generator=random)
    every = velocity(model, noised, sigma, text)
    edges = torch.linspace(ROWS, TEXT.num_tokens, PADDING_ROWS + 1)
    some = velocity(model, noised, sigma, text, padding_at=((edges[:-1] + edges[1:]) / 2).long())
    none = velocity(model, noised, sigma, text, padding_at=torch.tensor([TEXT.num_tokens - 1]))
    assert (some - every).norm() < 0.1 * every.norm() and (some - every).norm() < 0.5 * (
        none - every
    ).norm()
