"""Our product of a plain LoRA against peft's own forward, and the cases that stay peft's."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import adapter_layers
from ditkit_core.nn import lora as lora_linear
from ditkit_core.nn.lora import low_rank_sum
from ditkit_core.testing.toy import TOY
from ditkit_core.testing.world import make_model


def layer_of(dtype: torch.dtype, **config: object) -> nn.Module:
    model = make_model(
        TOY, TOY.architecture.presets["tiny"], dtype=dtype, adapter=AdapterConfig(rank=4, alpha=6.0, **config)
    )
    return adapter_layers(model)["layers.0.out"]


def gradients(layer: nn.Module, x: Tensor, *, peft: bool) -> list[Tensor]:
    from peft.tuners.lora import Linear

    x = x.clone().requires_grad_()
    out = Linear.forward(layer, x) if peft else layer(x)
    layer.zero_grad()
    out.backward(torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype))
    return [
        out.detach(),
        x.grad,
        layer.lora_A["default"].weight.grad.clone(),
        layer.lora_B["default"].weight.grad.clone(),
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_it_equals_peft(dtype, tolerance):
    """fp32: order of summation. bf16: peft scales after the product and we before, which can round to the neighbour."""
    layer = layer_of(dtype)
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    for ours, theirs in zip(gradients(layer, x, peft=False), gradients(layer, x, peft=True), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_gradcheck():
    torch.manual_seed(0)
    sizes = ((2, 3, 5), (2, 5), (4, 2), (4, 5))
    x, down, up, weight = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in sizes)
    assert torch.autograd.gradcheck(lambda *t: low_rank_sum(*t[:3], 1.5, lambda: t[0] @ t[3].T), (x, down, up, weight))


def test_a_sum_over_a_half_base_rounds_once():
    torch.manual_seed(0)
    result, x, down, up = (
        torch.randn(2, 3, 4).bfloat16(),
        torch.randn(2, 3, 5).bfloat16(),
        torch.randn(2, 5),
        torch.randn(4, 2),
    )
    delta = (x.float() @ down.T * 1.5) @ up.T
    assert torch.equal(low_rank_sum(x, down, up, 1.5, lambda: result), (result.float() + delta).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_change_no_bit(dtype, monkeypatch):
    """Of outputs and gradients; 23 rows and 13 columns end with a part that is shorter."""

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        x, base = (torch.randn(23, size).to(dtype).requires_grad_() for size in (8, 13))
        down, up = torch.randn(4, 8, requires_grad=True), torch.randn(13, 4, requires_grad=True)
        out = low_rank_sum(x, down, up, 0.5, lambda: base * 1)
        return [out, *torch.autograd.grad(out, (x, base, down, up), torch.randn(23, 13).to(dtype))]

    whole = run()
    monkeypatch.setattr(lora_linear, "_at_once", lambda x, axis: 5)
    assert all(map(torch.equal, run(), whole))


def test_a_fused_projection_is_never_held_wide():
    """fp32 beside bf16: no tensor of the size of the output in a wider dtype, forward or backward."""
    x, down, up = torch.randn(1024, 8).bfloat16(), torch.randn(4, 8), torch.randn(8192, 4)
    x, down, up = (tensor.requires_grad_() for tensor in (x, down, up))
    weight = torch.randn(8192, 8).bfloat16()
    with WidestTensor() as seen:
        low_rank_sum(x, down, up, 1.0, lambda: F.linear(x, weight)).sum().backward()
    assert seen.bytes == 2 * 1024 * 8192


class WidestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.bytes = max(
            self.bytes, *(x.untyped_storage().nbytes() for x in tree_leaves(out) if isinstance(x, Tensor)), 0
        )
        return out


def test_what_is_kept_for_backward_is_the_input_as_it_came():
    """peft keeps an fp32 copy of a bf16 input per target."""
    layer, saved = layer_of(torch.bfloat16), []
    x = torch.randn(1, 50, 32).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    large = [t for t in saved if t.numel() >= x.numel() and not isinstance(t, nn.Parameter) and not t._is_view()]
    assert {t.dtype for t in large} == {torch.bfloat16}


def test_dora_and_disabled_adapters_stay_with_peft():
    dora = layer_of(torch.float32, use_dora=True)
    x = torch.randn(2, 3, 32)
    assert not torch.equal(dora(x), dora.base_layer(x))
    plain = layer_of(torch.float32)
    plain.enable_adapters(False)
    assert torch.equal(plain(x), plain.base_layer(x))
