"""A fault of cuDNN on Hopper GPUs: which calls it would spoil, how they avoid it, and what is
bitwise equal on a GPU."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_tensors import qkv
from torch import Tensor

from ditkit_core.nn.attention import backends as attention_backends
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.attention.backends import BACKENDS
from ditkit_core.nn.context import BlockSettings, block_settings


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry takes tensors on the CPU."""
    for name, backend in list(BACKENDS.items()):
        monkeypatch.setitem(BACKENDS, name, replace(backend, devices=()))


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends a version of cuDNN and a compute capability; returns the keys and masks that torch's
    attention gets."""
    calls: list[tuple[Tensor, Tensor | None]] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def noted(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        calls.append((k, attn_mask))
        return attention(q, k, v, attn_mask=attn_mask, **options)

    def pretend(version: int, capability: tuple[int, int]) -> list[tuple[Tensor, Tensor | None]]:
        monkeypatch.setattr(attention_backends, "_cudnn_of", lambda device: (version, capability))
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
        return calls

    return pretend


def attended(backend: str, keys: int, dtype: torch.dtype, mask: Tensor | None) -> list[Tensor]:
    """The result of attention over so many keys, and the gradients of q, k and v."""
    given = [t.requires_grad_() for t in qkv(dtype, keys=keys)]
    with block_settings(BlockSettings(backend=backend)):
        out = attend(*given, name="self", padding_mask=mask)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), given)]


MASK = torch.arange(192)[None] < torch.tensor([[192], [100]])


def test_keys_that_cudnn_would_miscount_are_followed_by_hidden_ones(cudnn):
    """64 more, so that their number is a multiple of 128: the results are those of the others."""
    mask = MASK
    expected = attended("sdpa_math", 192, torch.bfloat16, mask)
    calls = cudnn(91900, (9, 0))
    found = attended("sdpa", 192, torch.bfloat16, mask)
    ((keys, hidden),) = calls
    assert keys.shape[2] == 256 and hidden[..., 192:].sum() == 0
    assert torch.equal(hidden[:, 0, 0, :192], mask)
    assert [t.shape for t in found] == [t.shape for t in expected]
    for ours, right in zip(found, expected, strict=True):
        assert float((ours.float() - right.float()).abs().max()) <= 2**-7 * float(
            right.float().abs().max()
        )


@pytest.mark.parametrize(
    ("version", "capability", "keys", "dtype", "masked"),
    [
        (92600, (9, 0), 192, torch.bfloat16, True),
        (91900, (10, 0), 192, torch.bfloat16, True),
        (91900, (8, 9), 192, torch.bfloat16, True),
        (91900, (9, 0), 128, torch.bfloat16, True),
        (91900, (9, 0), 200, torch.bfloat16, True),
        (91900, (9, 0), 192, torch.float32, True),  # which cuDNN does not take
        (91900, (9, 0), 192, torch.bfloat16, False),  # where a mask would take a third of the time
    ],
)
def test_no_keys_are_added_where_cudnn_counts_right(
    cudnn, version, capability, keys, dtype, masked
):
    calls = cudnn(version, capability)
    attended("sdpa", keys, dtype, torch.ones(2, keys, dtype=torch.bool) if masked else None)
    ((found, mask),) = calls
    assert found.shape[2] == keys and (mask is not None) is masked


def test_the_fault_of_cudnn_is_avoided_by_the_backends_that_may_run_it(
    cudnn, on_any_device, monkeypatch
):
    calls = cudnn(91900, (9, 0))
    monkeypatch.setattr(attention_backends, "sdpa_kernel", lambda which: nullcontext())
    for backend in ("sdpa", "sdpa_cudnn", "sdpa_efficient", "sdpa_math"):
        attended(backend, 192, torch.bfloat16, MASK)
    assert [keys.shape[2] for keys, _ in calls] == [256, 256, 192, 192]


@pytest.mark.parametrize("keys", [192, 704])
def test_gradients_of_very_low_scores_are_finite_under_a_mask(keys, gpu):
    """All of them -120, whose exponentials are zero in fp32."""
    q, k, v = (
        0.1 * torch.randn(1, keys, 2, 64, generator=torch.Generator().manual_seed(i))
        for i in range(3)
    )
    q[..., 0], k[..., 0] = 1.0, -120.0 * 8
    there = [t.bfloat16().to(gpu.device).requires_grad_() for t in (q, k, v)]
    mask = torch.ones(1, keys, dtype=torch.bool, device=gpu.device)
    out = attend(*there, name="self", padding_mask=mask)
    for gradient in torch.autograd.grad(out.float().square().sum(), there):
        assert bool(gradient.isfinite().all())


# Determinism


@pytest.mark.parametrize("backend", ["sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_math"])
def test_on_a_gpu_deterministic_backwards_are_bitwise_equal(backend, gpu, monkeypatch):
    """What docs/evidence.md says of `use_deterministic_algorithms`: only without `warn_only` is
    flash's other backward chosen."""
    # else torch refuses the products of `sdpa_math`
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if BACKENDS[backend].devices and not gpu.is_real:
        pytest.skip("has no kernel for a stand-in")
    shape = (1, gpu.size(4096, 64), gpu.size(16, 2), 128)
    q, k, v, upstream = (
        torch.randn(shape, generator=torch.Generator().manual_seed(i)).bfloat16().to(gpu.device)
        for i in range(4)
    )
    given = [t.requires_grad_() for t in (q, k, v)]
    torch.use_deterministic_algorithms(True)
    with block_settings(BlockSettings(backend=backend)):
        runs = [torch.autograd.grad(attend(*given, name="self"), given, upstream) for _ in range(5)]
    assert all(all(map(torch.equal, run, runs[0])) for run in runs)


# check_backend
