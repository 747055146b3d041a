"""Weights that leave their device and come back bitwise, while the tensors stay the same objects."""

import torch
from torch import nn

from ditkit_core.engine.parked_weights import parked, parked_bytes, parked_tensors


def test_memory_is_given_away_and_comes_back_with_the_same_bits() -> None:
    """Views of one storage share it afterwards, and whoever keeps a tensor sees its values again."""
    together = torch.randn(4, 6)
    views = [together[:2], together[2:].t()]
    layer = nn.Linear(8, 8).to(torch.bfloat16)
    codes, empty = torch.randint(-9, 9, (3, 5), dtype=torch.int8), torch.randn(7)
    empty.untyped_storage().resize_(0)  # as of a streamed block that is on the host
    tensors = [*views, *layer.parameters(), codes, empty]
    before = [tensor.detach().clone() for tensor in tensors[:-1]]
    with parked_tensors(tensors):
        assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=False))
    assert not empty.untyped_storage().nbytes()
    together.zero_()
    assert not views[0].any() and not views[1].any()


def test_they_come_back_after_an_error() -> None:
    weight = torch.randn(3)
    before = weight.clone()
    try:
        with parked_tensors([weight]):
            raise ValueError
    except ValueError:
        pass
    assert torch.equal(weight, before)


def test_on_a_cpu_nothing_moves() -> None:
    layer = nn.Linear(2, 2)
    pointer = layer.weight.data_ptr()
    with parked(layer.parameters()):
        assert layer.weight.data_ptr() == pointer
    assert parked_bytes(layer.parameters()) == 0
