"""Quantized values and products in 8 bits have the same bits on a GPU, whose arithmetic differs
from a CPU's where CUDA's kernels do."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ditkit_core.nn.eight_bit_products import product, transposed_product
from ditkit_core.nn.quantized_layouts import LAYOUTS
from ditkit_core.nn.quantized_linear import QuantizedLinear
from ditkit_core.testing.pretend_devices import PretendDevices, on_host

THERE = torch.device("cpu:1")
_aten: Any = torch.ops.aten
_DIVISIONS = {_aten.div.Tensor: _aten.mul.Tensor, _aten.div_.Tensor: _aten.mul_.Tensor}


class GPUArithmetic(TorchDispatchMode):
    """On a pretended device, what torch's CUDA kernels do otherwise: they multiply by the
    reciprocal of a number of the host, and sum in another order, which may change the last bit."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = bool(args) and isinstance(args[0], Tensor) and args[0].device == THERE
        if there and func in _DIVISIONS and isinstance(args[1], int | float):
            return _DIVISIONS[func](args[0], float(torch.ones(()) / args[1]))
        if there and func is _aten.mean.default:
            return torch.nextafter(mean := func(*args), mean + 1)
        return func(*args, **(kwargs or {}))


def rows(*shape: int, seed: int = 0) -> Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        * torch.logspace(-2, 0, shape[0])[:, None]
    )


@pytest.mark.parametrize("kind", LAYOUTS)
def test_codes_and_scales(kind: str) -> None:
    layer = QuantizedLinear(256, 300, kind, bias=False)
    layer.set_weight(rows(300, 256))
    expected = layer.values(), layer.dequantize()
    with PretendDevices(), GPUArithmetic():
        layer.set_weight(rows(300, 256).to(THERE))
        found = (
            {name: on_host(value) for name, value in layer.values().items()},
            on_host(layer.dequantize()),
        )
    assert found[0].keys() == expected[0].keys()
    assert [
        name for name, value in found[0].items() if not torch.equal(value, expected[0][name])
    ] == []
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_products_in_8_bits(kind: str, dtype: torch.dtype) -> None:
    values = LAYOUTS[kind].quantize(rows(64, 128), lambda magnitudes: magnitudes)
    given = rows(300, 128, seed=1).to(dtype), rows(300, 64, seed=2).to(dtype)

    def both(device: torch.device) -> list[Tensor]:
        weight, (x, gradient) = (
            [value.to(device) for value in values.values()],
            (each.to(device) for each in given),
        )
        return [
            product(x, None, *weight, fused=False),
            transposed_product(gradient, *weight, fused=False),
        ]

    expected = both(torch.device("cpu"))
    with PretendDevices(), GPUArithmetic():
        found = [on_host(result) for result in both(THERE)]
    assert all(map(torch.equal, found, expected))


def test_the_arithmetic_is_another_one() -> None:
    x = rows(300, 64).abs()
    with PretendDevices(), GPUArithmetic():
        there = x.to(THERE)
        assert not torch.equal(on_host(there / 127.5), x / 127.5) and not torch.equal(
            on_host(there.mean()), x.mean()
        )
        assert torch.equal(on_host(there / there.new_full((), 127.5)), x / 127.5)
