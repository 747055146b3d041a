"""The norm of several gradients."""

import pytest
import torch

from ditkit_core.planner.memory_tracker import fake_tensors
from ditkit_core.testing.pretend_devices import CountCrossings, PretendDevices, on_host
from ditkit_core.training.optim.clipping import joined_norm, norm_of, total_norm

HOST, ONE, TWO = (torch.device(name) for name in ("cpu", "cpu:1", "cpu:2"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_on_one_device_are_joined_there(dtype: torch.dtype) -> None:
    """With the same bits on any devices; from the host nothing is sent, for which a GPU would be
    waited for."""
    norms = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=dtype).abs()
    expected = joined_norm(list(norms))
    assert expected.dtype == dtype and float(expected) == pytest.approx(
        float(norms.double().norm())
    )
    with PretendDevices():
        there, apart = (
            norms.to(ONE),
            [norm.to(TWO if place % 3 else ONE) for place, norm in enumerate(norms)],
        )
        with CountCrossings() as crossings:
            found = joined_norm(list(there))
        assert not crossings.copies and found.device == ONE
        assert torch.equal(on_host(found), expected) and torch.equal(
            on_host(joined_norm(apart)), expected
        )


def test_the_norm_of_many_gradients_is_a_few_launches() -> None:
    with fake_tensors("cuda") as meter:
        total_norm([torch.empty(8, 8) for _ in range(100)])
    assert meter.kernels.total() <= 4


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_norms_of_narrow_gradients_are_not_rounded_to_them(wide):
    gradients = [torch.full((n,), 1.0, dtype=torch.bfloat16) for n in (301, 1003)] + [
        torch.ones(5, dtype=wide)
    ]
    assert torch.equal(total_norm(gradients), torch.tensor(1309, dtype=wide).sqrt())
    assert torch.equal(
        joined_norm([norm_of(gradient) for gradient in gradients]).float(),
        torch.tensor(1309.0).sqrt(),
    )
