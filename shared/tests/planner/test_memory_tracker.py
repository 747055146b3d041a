"""The kernels that a step runs, with their work, counted on fake tensors."""

import torch
import torch.nn.functional as F

from ditkit_core.planner.memory_tracker import Kernel, fake_tensors

ROWS, COLUMNS = 64, 32


def test_each_input_is_read_once_and_each_result_written_once():
    with fake_tensors("cuda") as meter:
        x = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16)
        row = torch.empty(COLUMNS)
        assert meter.kernels.total() == 0  # memory without contents
        x.view(COLUMNS, ROWS).T.unsqueeze(0)
        assert meter.kernels.total() == 0  # views
        x * x
        row.expand(ROWS, COLUMNS) + 1.0
        y = torch.empty_like(x)
        y.copy_(x)
        y.add_(x)
        torch.mul(x, x, out=y)
        torch.zeros_like(x)
        x.new_ones(3)
    size = 2 * ROWS * COLUMNS
    expected = [2 * size, 4 * COLUMNS + 2 * size, 2 * size, 3 * size, 2 * size, size, 6]
    assert sorted(kernel.bytes for kernel in meter.kernels.elements()) == sorted(expected)
    assert {(kernel.kind, kernel.flops) for kernel in meter.kernels} == {("elementwise", 0)}


def test_products_are_counted_by_the_bits_of_their_inputs():
    with fake_tensors("cuda") as meter:
        narrow, wide = (
            torch.empty(ROWS, COLUMNS, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)
        )
        narrow @ narrow.T
        wide @ wide.T
        torch.mm(narrow, narrow.T, out_dtype=torch.float32)
    flops, read = 2 * ROWS * ROWS * COLUMNS, ROWS * COLUMNS
    # The transposed view is another input: a matmul reads both.
    assert meter.kernels == {
        Kernel("matmul_16", flops, 2 * 2 * read + 2 * ROWS * ROWS): 1,
        Kernel("matmul_32", flops, 4 * 2 * read + 4 * ROWS * ROWS): 1,
        Kernel("matmul_16", flops, 2 * 2 * read + 4 * ROWS * ROWS): 1,
    }


def test_products_of_codes_are_counted_by_their_format():
    with fake_tensors("cuda") as meter:
        codes = torch.empty(ROWS, COLUMNS, dtype=torch.int8)
        torch._int_mm(codes, codes.T)
        codes, one = torch.empty(ROWS, COLUMNS, dtype=torch.float8_e4m3fn), torch.empty(())
        torch._scaled_mm(codes, codes.T, scale_a=one, scale_b=one, out_dtype=torch.float32)
    flops, size = 2 * ROWS * ROWS * COLUMNS, 2 * ROWS * COLUMNS + 4 * ROWS * ROWS
    assert {(kernel.kind, kernel.flops) for kernel in meter.kernels} == {
        ("matmul_int8", flops),
        ("matmul_fp8", flops),
    }
    assert all(size <= kernel.bytes <= size + 4 for kernel in meter.kernels), (
        "and the scale that is one"
    )


def test_attention_is_one_kernel_each_way():
    with fake_tensors("cuda") as meter:
        q = torch.empty(1, 2, ROWS, 64, dtype=torch.bfloat16, device="cpu:1", requires_grad=True)
        F.scaled_dot_product_attention(q, q, q).backward(torch.empty_like(q))
    flops = {kernel.kind: kernel.flops for kernel in meter.kernels}
    forward = 2 * 2 * 2 * ROWS * ROWS * 64
    assert flops["attention"] == forward and flops["attention_backward"] == 2.5 * forward
