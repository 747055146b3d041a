"""The hand-written elementwise functions against their plain composition, forward and backward."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ditkit_core.models.precision import Precision
from ditkit_core.nn.context import BlockSettings, block_settings
from ditkit_core.nn.functional import (
    affine_norm,
    gated_sum,
    gated_unit,
    modulated_norm,
    normalised_heads,
    per_token,
)
from ditkit_core.nn.rope import axis_angles, rotary_table, rotate
from ditkit_core.planner.memory_tracker import fake_tensors


def norm_of(dim: int, dtype: torch.dtype = torch.float64) -> nn.RMSNorm:
    norm = nn.RMSNorm(dim, eps=1e-6, dtype=dtype)
    norm.weight.data = 1 + 0.3 * torch.randn(dim, dtype=dtype)
    return norm


def tables(tokens: int, head_dim: int, samples: int = 1) -> torch.Tensor:
    positions = torch.arange(samples * tokens).view(samples, tokens, 1)
    return rotary_table(axis_angles(positions, head_dim // 2, 10_000.0), torch.float64)


@pytest.mark.parametrize("width", [24, 12], ids=["full width", "per head"])
@pytest.mark.parametrize("layouts", [0, 1, 2])
def test_norm_and_rotation_equal_the_composition_in_fp64(layouts, width):
    """Without positions, with those of all samples, with those of each."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)
    norm, rotary = norm_of(width), tables(5, 12, layouts) if layouts else None
    ours = normalised_heads(x, norm, 2, Precision(matmul=torch.float64), rotary)
    plain = (
        F.rms_norm(x.unflatten(-1, (-1, width)), (width,), norm.weight, 1e-6)
        .flatten(-2)
        .unflatten(-1, (2, -1))
    )
    plain = plain if rotary is None else rotate(plain, *rotary.unbind(-1))
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(plain)
    inputs = (x, norm.weight)
    for mine, theirs in zip(
        torch.autograd.grad(ours, inputs, upstream),
        torch.autograd.grad(plain, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("width", [12, 6], ids=["full width", "per head"])
@pytest.mark.parametrize("rotated", [False, True])
def test_gradients_of_norm_and_rotation_pass_gradcheck(rotated, width):
    torch.manual_seed(0)
    rotary = tables(3, 6) if rotated else None
    x = torch.randn(1, 3, 12, dtype=torch.float64, requires_grad=True)
    norm = norm_of(width)

    def function(x, weight):
        norm.weight = nn.Parameter(weight) if not isinstance(weight, nn.Parameter) else weight
        return normalised_heads(x, norm, 2, Precision(matmul=torch.float64), rotary)

    assert torch.autograd.gradcheck(lambda x: function(x, norm.weight), (x,))


@pytest.mark.parametrize("width", [24, 12], ids=["full width", "per head"])
def test_norm_and_rotation_round_once_and_leave_their_inputs_alone(width):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 24).bfloat16().requires_grad_()
    norm, rotary = norm_of(width, torch.float32), tables(5, 12)
    before = x.detach().clone()
    out = normalised_heads(x, norm, 2, Precision(), rotary.float())
    groups = x.double().unflatten(-1, (-1, width))
    exact = (
        F.rms_norm(groups, (width,), norm.weight.double(), 1e-6).flatten(-2).unflatten(-1, (2, -1))
    )
    exact = rotate(exact, *rotary.unbind(-1))
    assert out.dtype == torch.bfloat16 and torch.equal(x, before)
    assert torch.equal(out, exact.bfloat16())
    upstream = torch.randn_like(out)
    kept = upstream.clone()
    out.backward(upstream)
    assert torch.equal(upstream, kept) and x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("times", [1, 5])
def test_the_gated_sum_equals_the_composition(times, trained):
    torch.manual_seed(0)
    x, y = (torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gate = torch.randn(2, times, 8, dtype=torch.float64, requires_grad=trained)
    assert torch.equal(gated_sum(y, x, gate), torch.addcmul(x, y, gate))
    assert torch.autograd.gradcheck(gated_sum, (y, x, gate))


@pytest.mark.parametrize("trained", [False, True])
def test_the_gated_sum_with_two_gates_equals_that_with_one_for_each_token(trained):
    torch.manual_seed(0)
    x, y = (torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gate = torch.randn(2, 2, 8, dtype=torch.float64, requires_grad=trained)
    late = torch.tensor([[False, False, True, True, True], [True] * 5])
    each = torch.stack([gate[0, [0, 0, 1, 1, 1]], gate[1, [1] * 5]])
    assert torch.equal(per_token(gate, late), each)
    assert torch.equal(gated_sum(y, x, gate, late), torch.addcmul(x, y, each))
    assert torch.autograd.gradcheck(lambda *t: gated_sum(*t, late), (y, x, gate))


def test_two_gates_leave_nothing_but_themselves_to_be_saved():
    x, y = (torch.randn(2, 5, 8, requires_grad=True) for _ in range(2))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor), lambda none: none
    ):
        gated_sum(y, x, torch.randn(2, 2, 8), torch.ones(2, 5, dtype=torch.bool))
    assert saved == []


@pytest.mark.parametrize(("batch", "times"), [(1, 1), (2, 1), (2, 5)])
def test_the_modulated_norm_equals_the_composition(batch, times):
    torch.manual_seed(0)
    x = torch.randn(batch, 5, 8, dtype=torch.float64, requires_grad=True)
    scale, shift = (
        torch.randn(batch, times, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    expected = F.layer_norm(x, (8,), eps=1e-6) * (1 + scale) + shift
    torch.testing.assert_close(
        modulated_norm(x, scale, shift, 1e-6, x.dtype, x.dtype), expected, rtol=1e-12, atol=1e-12
    )
    assert torch.autograd.gradcheck(
        lambda *t: modulated_norm(*t, 1e-6, x.dtype, x.dtype), (x, scale, shift)
    )


def test_a_slice_of_a_wider_matmul_is_normalised_as_a_tensor_of_its_own_is():
    torch.manual_seed(0)
    wide = torch.randn(2, 5, 60, requires_grad=True)
    norm, rotary = norm_of(12, torch.float32), tables(5, 12).float()
    upstream = torch.randn(2, 5, 2, 12)
    fp32 = Precision(matmul=torch.float32)
    sliced = normalised_heads(wide[..., 24:48], norm, 2, fp32, rotary)
    own = wide.detach()[..., 24:48].contiguous().requires_grad_()
    alone = normalised_heads(own, norm, 2, fp32, rotary)
    assert torch.equal(sliced, alone)
    (d_wide,), (d_own,) = (
        torch.autograd.grad(sliced, wide, upstream),
        torch.autograd.grad(alone, own, upstream),
    )
    assert torch.equal(d_wide[..., 24:48], d_own)


def test_calls_save_the_carried_table_and_no_copy_of_it():
    norm, rotary, saved = norm_of(24, torch.float32), tables(5, 12).float(), []
    x = torch.randn(2, 5, 24).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        normalised_heads(x, norm, 2, Precision(), rotary)
    own = rotary.untyped_storage().data_ptr()
    assert [t.untyped_storage().data_ptr() for t in saved if t.is_complex()] == [own]


def test_the_gated_unit_equals_the_composition_and_passes_gradcheck():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 10, dtype=torch.float64, requires_grad=True)
    a, b = x.chunk(2, -1)
    torch.testing.assert_close(gated_unit(x), F.silu(a) * b, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(gated_unit, (x,))


def test_the_gated_unit_keeps_its_input_and_nothing_else():
    kept = []
    x = torch.randn(2, 3, 10, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        gated_unit(x)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]


def calls(tokens, dim):
    """Each function as a block of bf16 matmuls with an fp32 residual stream calls it, and the dtype
    of its first argument."""
    bf16, fp32 = torch.bfloat16, torch.float32
    norm = nn.RMSNorm(dim, eps=1e-6).requires_grad_(False)
    layer = nn.LayerNorm(dim).requires_grad_(False)
    scale, shift, gate = torch.empty(3, 1, 1, dim)
    table, stream = torch.empty(1, tokens, 1, 16, 2), torch.empty(1, tokens, dim)
    return {
        "norm and rotation": (
            bf16,
            lambda x: normalised_heads(x, norm, dim // 32, Precision(), table),
        ),
        "norm": (bf16, lambda x: normalised_heads(x, norm, dim // 32, Precision())),
        "modulated norm": (fp32, lambda x: modulated_norm(x, scale, shift, 1e-6, fp32, bf16)),
        "affine norm": (fp32, lambda x: affine_norm(layer, x, fp32, bf16)),
        "gated unit": (bf16, gated_unit),
        "gated sum": (bf16, lambda y: gated_sum(y, stream, gate)),
    }


COUNTED = {
    "torch": {
        "norm and rotation": (2.0, (10, 40.3, 10.0), (12, 78.8, 12.0)),
        "norm": (2.0, (9, 32.1, 10.0), (10, 70.0, 12.0)),
        "modulated norm": (2.0, (3, 14.0, 6.0), (2, 18.0, 8.0)),
        "affine norm": (2.0, (2, 14.0, 6.0), (2, 18.0, 8.0)),
        "gated unit": (1.0, (2, 5.0, 1.0), (5, 13.0, 4.0)),
        "gated sum": (4.0, (1, 10.0, 4.0), (1, 6.0, 2.0)),
    },
    "triton": {
        "norm and rotation": (2.0, (1, 4.3, 2.0), (1, 6.3, 2.0)),
        "norm": (2.0, (1, 4.0, 2.0), (1, 6.0, 2.0)),
        "modulated norm": (2.0, (1, 6.0, 2.0), (1, 10.0, 4.0)),
        "affine norm": (2.0, (1, 6.0, 2.0), (1, 10.0, 4.0)),
        "gated unit": (1.0, (1, 3.0, 1.0), (1, 5.0, 2.0)),
        "gated sum": (4.0, (1, 10.0, 4.0), (1, 6.0, 2.0)),
    },
}
"""On a GPU, bytes for each element of the argument that its result and the backward keep. Of
forward and backward: launches, and for each element bytes that pass, and that are allocated at the
peak."""


@pytest.mark.parametrize("kernels", COUNTED)
def test_a_gpu_passes_over_memory_as_rarely_as_counted(kernels):
    found = {}
    with fake_tensors("cuda") as meter, block_settings(BlockSettings(kernels=kernels)):
        for name, (dtype, call) in calls(4096, 512).items():
            x, numbers = torch.empty(1, 4096, 512, dtype=dtype, requires_grad=True), []
            before = meter.total(x.device)
            out = call(x)
            kept = meter.total(x.device) - before
            for run in (partial(call, x), partial(out.backward, torch.empty_like(out))):
                meter.kernels.clear()
                meter.restart_peak()
                before = meter.total(x.device)
                run()
                moved = sum(kernel.bytes * count for kernel, count in meter.kernels.items())
                sizes = (
                    round(size / x.numel(), 1) for size in (moved, meter.peak[x.device] - before)
                )
                numbers.append((meter.kernels.total(), *sizes))
            found[name] = (round(kept / x.numel(), 1), *numbers)
    assert found == COUNTED[kernels]
