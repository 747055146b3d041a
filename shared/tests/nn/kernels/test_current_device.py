"""A kernel of Triton is launched with the device of its tensors current, whichever device the thread was on."""

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import pytest
import torch
from kernel_modules import jit_functions, kernel_modules

from ditkit_core.testing.stand_in import StandIn

pytest.importorskip("triton")

TWO = torch.device("cpu:2")
KERNELS = kernel_modules()


class Launches:
    """In place of a compiled kernel: notes the current device."""

    def __init__(self, stand_in: StandIn, seen: list[int]):
        self._stand_in, self._seen = stand_in, seen

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *given, **named: self._seen.append(self._stand_in.runtime.current_device())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    found: list[int] = []
    with StandIn() as stand_in:
        for module in vars(KERNELS).values():
            for name in jit_functions(module):
                monkeypatch.setattr(module, name, Launches(stand_in, found))
        yield found


def there(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=TWO)


def calls() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    x, rows = there(2, 3, 8), there(4, 8)
    codes, bits = there(4, 64, dtype=torch.int8), there(4, 8, dtype=torch.int16)
    yield "dequantized.rows", (codes, there(4, 1), torch.float32), {}
    yield "dequantized.nf4", (codes.to(torch.uint8), there(8, dtype=torch.int8), *(there(1),) * 3, torch.float32), {}
    yield "gated_unit.forward", (x,), {}
    yield "gated_unit.backward", (there(2, 3, 4), x), {}
    yield "lora_parts.factors", (rows, there(5, 4)), {}
    yield "lora_parts.products", (there(5, 12), 4, 1.0), {}
    yield "modulated_norm.forward", (x, there(2, 1, 8), there(2, 1, 8), 1e-6, 1.0, torch.float32), {}
    yield "modulated_norm.backward", (x, x, there(2, 1, 8), 1e-6, 1.0, True), {}
    yield "norm_rotation.forward", (x, there(8), None, 1e-6, 2, torch.float32), {}
    yield "norm_rotation.backward", (there(2, 3, 2, 4), x, there(8), None, there(2, 3, 1), True), {}
    yield "rounded_rows.codes_of_rows", (rows, None, torch.int8), {}
    yield "rounded_rows.scaled", (rows, there(4, 1), None, None), {"out": there(4, 8)}
    yield "rounding.stochastic", (bits, rows, 1, 2, 0, 32, 2**23), {}
    yield "rounding.split", (bits, rows, bits), {}
    yield "rounding.restored", (rows, bits, bits), {}


def test_its_device_is_the_current_one(seen: list[int]) -> None:
    given = list(calls())
    for place, tensors, named in given:
        attrgetter(place)(KERNELS)(*tensors, **named)
    assert seen == [2] * len(given)
    assert {place.partition(".")[0] for place, *_ in given} == vars(KERNELS).keys()
