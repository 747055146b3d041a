"""Modules on `meta`: as `torch.device("meta")` makes them, without the random values that nothing
can read."""

import torch
from torch import nn

from ditkit_core.models.meta import on_meta


def test_a_module_is_what_it_is_without_and_no_random_number_is_taken(monkeypatch):
    def made() -> list[tuple[str, object]]:
        module = nn.Sequential(nn.Linear(3, 4), nn.Embedding(5, 4), nn.LayerNorm(4))
        return [
            (name, (value.shape, value.dtype, value.device, value.requires_grad))
            for name, value in module.named_parameters()
        ]

    with torch.device("meta"):
        expected = made()
    random = torch.get_rng_state()
    drawn = list[object]()
    monkeypatch.setattr(nn.init, "_calculate_correct_fan", drawn.append)
    with on_meta():
        assert made() == expected
    assert torch.equal(torch.get_rng_state(), random) and drawn == []


def test_what_is_made_elsewhere_has_its_values():
    with on_meta():
        elsewhere = nn.Linear(3, 4, device="cpu")
        filled = torch.zeros(1000, device="cpu").normal_()
    assert elsewhere.weight.any() and elsewhere.bias.any() and filled.std() > 0.5
