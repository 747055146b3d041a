"""The check of the Triton kernels against torch on a run's own GPU: it finds a fault in each of
them, and says which failed and how."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.io.runtimes import RUNTIMES
from ditkit_core.nn import kernel_check
from ditkit_core.nn.context import settings_in_force
from ditkit_core.nn.kernel_check import KernelCase, KernelCheck, compare_kernels, rounds_products
from ditkit_core.nn.kernels.launch import summing_programs
from ditkit_core.testing.scripts import printed
from ditkit_core.testing.tensor_cores import TensorCores

CPU = torch.device("cpu")
SUPPORT = Path(__file__).parents[1] / "support"
NAMES = {
    "norm_rotation": "RMS norm over 320 and rotation", "affine_norm": "layer norm",
    "gated_unit": "gated unit", "gated_sum": "gated sum",
    **dict.fromkeys(("factor_parts", "product_parts", "term_sums"), "LoRA"),
    "add_product": "sum with a product",
    "dequantize_rows": "int8 weights", "dequantize_nf4": "nf4 weights",
    "round_rows": "rounding to int8", "transpose_codes": "transposed codes",
    "apply_scales": "scales of products in 8 bits",
    "multiply_codes": "products of int8 codes",
    **dict.fromkeys(("round_stochastic", "round_split", "join_split"), "rounding of bf16 weights"),
}  # fmt: skip


@pytest.mark.slow
def test_a_fault_in_any_kernel_is_found_and_its_name_said():
    """Under Triton's interpreter, in a process of its own."""
    pytest.importorskip("triton")
    found = printed(SUPPORT / "faulty_kernels.py", TRITON_INTERPRET="1")
    assert found.pop("none 0") == ""
    # Tensor cores do not round sums as fp32's own units do: no reason to refuse the kernels, on
    # GPUs that truncate more than known ones too.
    assert 0 < 4 * found.pop("truncated sums") < kernel_check.LIMIT
    # Nor does cuBLAS, which rounds a product before it adds it.
    fault, error, twice = found.pop("rounded products")
    assert (fault, twice) == ("", True) and 0 < error < kernel_check.LIMIT
    assert len(found) == 32
    for fault, said in found.items():
        name = NAMES[fault.split()[0].removesuffix("_backward")]
        assert said.startswith(f"computes {name} wrongly on cpu (off by "), (fault, said)


def test_programs_that_sum_over_rows_take_several_of_each_sample():
    """As in a run, so that a fault of the loop is found."""
    tokens = kernel_check._TOKENS
    assert summing_programs(2 * tokens) < 2 * tokens
    assert summing_programs(tokens, 2) < tokens


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts one computation in place of all, with what it is under the kernels."""

    def put(kernels: Callable[[Tensor], Tensor], *, is_bitwise: bool = False) -> None:
        def function(x: Tensor) -> Tensor:
            return kernels(x) if settings_in_force().kernels == "triton" else 2 * x

        def made(device: torch.device, has_fp8: bool) -> Iterator[KernelCase]:
            x = torch.linspace(1, 2, 50).to(torch.float32 if is_bitwise else torch.bfloat16)
            yield KernelCase("twice x", function, (x.requires_grad_(),), is_bitwise=is_bitwise)

        monkeypatch.setattr(kernel_check, "_cases", made)

    return put


def test_a_step_of_bf16_is_no_fault_and_more_is_one_also_in_a_gradient_alone(cases):
    cases(lambda x: 2 * x)
    assert compare_kernels(CPU).fault == ""
    cases(lambda x: 2 * (x * 1.001))  # less than the rounding to bf16
    assert compare_kernels(CPU).fault == ""
    cases(lambda x: 2.04 * x)
    assert (
        compare_kernels(CPU).fault
        == "computes twice x wrongly on cpu (off by 0.02 of the largest value)"
    )
    cases(lambda x: 2 * x.detach() + 1.5 * (x - x.detach()))
    assert compare_kernels(CPU).fault.startswith("computes twice x wrongly on cpu")
    cases(lambda x: 2 * x * torch.nan)
    assert (
        compare_kernels(CPU).fault
        == "computes twice x wrongly on cpu (off by nan of the largest value)"
    )


def test_kernels_that_are_wrong_only_when_they_are_launched_again_are_found(cases):
    """Triton makes the first launch, and the launcher that keeps compiled kernels those after
    it."""
    for wrong in (0, 1):
        launches = iter([wrong != 0, wrong != 1, True])
        cases(lambda x, launches=launches: (2.0 if next(launches) else 2.04) * x)
        assert compare_kernels(CPU).fault.startswith("computes twice x wrongly on cpu"), wrong
        assert next(launches)


def test_the_check_says_what_it_measured(cases):
    cases(lambda x: 2 * x)
    assert str(compare_kernels(CPU)) == "off by 0 of the largest value at most"
    cases(lambda x: 2 * (1 + 2e-6) * x.double())
    check = compare_kernels(CPU)
    assert 1e-6 < check.error < kernel_check.LIMIT, check
    assert str(KernelCheck(error=3e-7, rounds_products=True)) == (
        "off by 3e-07 of the largest value at most, and cuBLAS rounds products of LoRAs before it "
        "adds them"
    )


@pytest.mark.parametrize("twice", [False, True])
def test_a_product_that_is_rounded_before_it_is_added_is_seen(twice):
    with TensorCores(rounds_products=twice):
        assert rounds_products(CPU) is twice


def test_what_must_be_bitwise_may_not_be_off_by_a_bit(cases):
    cases(lambda x: 2 * x, is_bitwise=True)
    assert compare_kernels(CPU).fault == ""
    cases(lambda x: 2 * x * (1 + 2**-23), is_bitwise=True)
    assert compare_kernels(CPU).fault.startswith("computes twice x wrongly on cpu (off by 1e-07")


def test_whatever_triton_raises_is_said_in_a_line(cases):
    def fails(x: Tensor) -> Tensor:
        raise OSError("[Errno 30] Read-only file system: '/cache'\nwith more lines")

    cases(fails)
    assert compare_kernels(CPU).fault.startswith(
        "fails in twice x on cpu (OSError: [Errno 30] Read-only file system: '/cache' with more "
        "lines); "
    )


def test_a_gpu_that_a_kernel_leaves_unusable_is_an_error_with_the_remedy(cases, monkeypatch):
    """An illegal access stays with the process, so that going on with torch would fail in the first
    step."""

    def broken(*_: object, **__: object) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cases(broken)
    monkeypatch.setattr(torch, "zeros", broken)
    with pytest.raises(UserError, match=r"cannot use it any more; set train\.kernels = torch"):
        compare_kernels(CPU)


def test_gpus_that_triton_does_not_support_are_named_before_anything_is_compiled(monkeypatch):
    monkeypatch.setitem(
        RUNTIMES, "cuda", SimpleNamespace(get_device_capability=lambda device: (7, 5))
    )
    assert (
        compare_kernels(torch.device("cuda", 1)).fault
        == "needs compute capability 8.0, and cuda:1 has 7.5"
    )
