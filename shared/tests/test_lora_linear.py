"""Our product of a plain LoRA against peft's own forward, and the cases that stay peft's."""

import pytest
import torch
from torch import Tensor, nn

from ditkit_core.adapters import AdapterConfig, adapter_layers
from ditkit_core.lora_linear import low_rank, rounded_sum
from ditkit_core.testing.toy import TOY
from ditkit_core.testing.world import make_model


def layer_of(dtype: torch.dtype, **config: object) -> nn.Module:
    model = make_model(TOY, TOY.presets["tiny"], dtype=dtype, adapter=AdapterConfig(rank=4, alpha=6.0, **config))
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
    x, down, up = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((2, 3, 5), (2, 5), (4, 2)))
    assert torch.autograd.gradcheck(lambda *t: low_rank(*t, 1.5), (x, down, up))


def test_a_sum_over_a_half_base_rounds_once():
    result, delta = torch.randn(3, 4).bfloat16(), torch.randn(3, 4)
    assert torch.equal(rounded_sum(result, delta), (result.float() + delta).bfloat16())


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
