"""How kernels of Triton are launched: with the device of their tensors current, whichever device
the thread was on, and with nothing left to a default that differs between versions of Triton."""

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import pytest
import torch
from kernel_modules import kernel_modules, kernels_of

from ditkit_core.nn.kernels import hopper
from ditkit_core.testing.stand_in import StandIn

pytest.importorskip("triton")

TWO = torch.device("cpu:2")
KERNELS = kernel_modules()


class Launches:
    """In place of a compiled kernel: notes the current device, and the options by name."""

    def __init__(self, stand_in: StandIn, seen: list[tuple[int, dict[str, Any]]]):
        self._stand_in, self._seen = stand_in, seen

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *given, **named: self._seen.append(
            (self._stand_in.runtime.current_device(), named)
        )


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    found: list[tuple[int, dict[str, Any]]] = []
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)
    with StandIn() as stand_in:
        for module in vars(KERNELS).values():
            for owner, name in kernels_of(module):
                monkeypatch.setattr(owner, name, Launches(stand_in, found))
        yield found


def there(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=TWO)


def calls() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    x, rows = there(2, 3, 8), there(4, 8)
    codes, bits = there(4, 64, dtype=torch.int8), there(4, 8, dtype=torch.int16)
    halves = there(4, 8, dtype=torch.bfloat16)
    yield "added_products.accumulated", (halves, halves, there(8, 8, dtype=torch.bfloat16)), {}
    yield "code_products.multiplied", (codes, codes, there(4, 1), None, None), {"out": there(4, 4)}
    yield "dequantized.rows", (codes, there(4, 1), torch.float32), {}
    yield (
        "dequantized.nf4",
        (codes.to(torch.uint8), there(8, dtype=torch.int8), *(there(1),) * 3, torch.float32),
        {},
    )
    yield "gated_sum.forward", (x, x, there(2, 1, 8)), {}
    yield "gated_sum.backward", (x, there(2, 1, 8), torch.bfloat16), {}
    yield "gated_unit.forward", (x,), {}
    yield "gated_unit.backward", (there(2, 3, 4), x), {}
    yield "lora_parts.factors", (rows, there(5, 4)), {}
    yield "lora_parts.products", (there(5, 12), None, 4, 1.0), {}
    yield "lora_parts.products", (there(5, 12), there(5, 4), 4, 1.0), {}
    yield "lora_parts.sums", (there(12, 8), there(6, 12), 4), {}
    yield (
        "modulated_norm.forward",
        (x, there(2, 1, 8), there(2, 1, 8), 1e-6, 1.0, torch.float32),
        {},
    )
    yield "modulated_norm.backward", (x, x, there(2, 1, 8), 1e-6, 1.0, True), {}
    yield "norm_rotation.forward", (x, there(8), None, 1e-6, 2, torch.float32), {}
    yield "norm_rotation.backward", (there(2, 3, 2, 4), x, there(8), None, there(2, 3, 1), True), {}
    yield "rounded_rows.codes_of_rows", (rows, None, torch.int8), {}
    yield "rounded_rows.transposed", (codes,), {}
    yield "rounded_rows.scaled", (rows, there(4, 1), None, None), {"out": there(4, 8)}
    yield "rounding.stochastic", (bits, rows, 1, 2, 0, 32, 2**23), {}
    yield "rounding.split", (bits, rows, bits), {}
    yield "rounding.restored", (rows, bits, bits), {}


def test_its_device_is_the_current_one_and_its_arithmetic_is_said(
    seen: list[tuple[int, dict[str, Any]]],
) -> None:
    """Triton 3.9 warns where nothing says whether products and sums are fused, and in 3.10 they no
    longer are."""
    given = list(calls())
    for place, tensors, named in given:
        attrgetter(place)(KERNELS)(*tensors, **named)
    assert [device for device, _ in seen] == [2] * len(given)
    assert all(isinstance(named.get("enable_fp_fusion"), bool) for _, named in seen)
    assert {place.partition(".")[0] for place, *_ in given} == vars(KERNELS).keys()


def properties(kernel: Any, given: Any, named: dict[str, Any]) -> str:
    """What Triton finds of arguments; each other finding is another kernel to compile."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    bind = create_function_from_signature(
        kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32))
    )
    return str(bind(*given, **named)[1])


def test_no_step_compiles_a_kernel_for_its_random_key() -> None:
    kernel, bits, values = KERNELS.rounding._stochastic, there(4, 8, dtype=torch.int16), there(4, 8)
    keys = [(7, -5), (16, 7), (-32, 1), (1, 0), (2**31 - 1, -(2**31))]
    sizes = {"CHUNK": 2**23, "BLOCK": 1024}
    assert len({properties(kernel, (bits, values, *key, 0, 32, 32), sizes) for key in keys}) == 1


def test_no_number_of_tokens_compiles_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches have buckets' numbers of tokens. A kernel takes seconds to compile."""
    found: dict[tuple[str, bool], set[str]] = {}

    class Noted:
        def __init__(self, kernel: Any):
            self._kernel = kernel

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            name = self._kernel.fn.__module__ + self._kernel.fn.__name__
            return lambda *given, **named: found.setdefault(
                (name, named.get("TRAINED", named.get("HAS_LOW", False))), set()
            ).add(properties(self._kernel, given, named))

    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)
    for module in vars(KERNELS).values():
        for owner, name in kernels_of(module):
            monkeypatch.setattr(owner, name, Noted(getattr(owner, name)))
    with torch.device("meta"):
        weight = torch.empty(32)
        for batch, tokens in ((1, 1), (1, 15), (1, 16), (2, 1), (3, 33), (4, 300)):
            x, row, table = (
                torch.empty(batch, tokens, 32),
                torch.empty(batch, 1, 32),
                torch.empty(1, tokens, 1, 8, 2),
            )
            heads, inverse = (
                torch.empty(batch, 2, tokens, 16).transpose(1, 2),
                torch.empty(batch, tokens, 1),
            )
            KERNELS.modulated_norm.forward(x, row, row, 1e-6, 1.0, torch.bfloat16)
            KERNELS.norm_rotation.forward(x, weight, table, 1e-6, 2, torch.bfloat16)
            codes = torch.empty(batch * tokens, 32, dtype=torch.int8)
            KERNELS.code_products.multiplied(
                codes,
                torch.empty(64, 32, dtype=torch.int8),
                inverse.flatten(0, 1),
                None,
                None,
                out=torch.empty(len(codes), 64),
            )
            halves = codes.bfloat16()
            KERNELS.added_products.accumulated(
                halves, halves, torch.empty(32, 32, dtype=torch.bfloat16)
            )
            KERNELS.gated_sum.forward(x, x, row)
            KERNELS.gated_sum.backward(x, row, torch.bfloat16)
            KERNELS.gated_unit.forward(x)
            KERNELS.gated_unit.backward(x[..., :16], x)
            for low in (None, torch.empty(batch * tokens, 4)):
                KERNELS.lora_parts.products(torch.empty(batch * tokens, 12), low, 4, 1.0)
            KERNELS.rounded_rows.codes_of_rows(x.flatten(0, 1), None, torch.int8)
            for trained in (False, True):
                KERNELS.modulated_norm.backward(x, x, row, 1e-6, 1.0, trained)
                KERNELS.norm_rotation.backward(heads, x, weight, table, inverse, trained)
    assert len(found) == 15 and {name: len(each) for name, each in found.items()} == dict.fromkeys(
        found, 1
    )
