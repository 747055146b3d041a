"""LoKr and LoHa: our product against peft's own layers, forward and backward, and what it keeps."""

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import adapter_layers, initialise, inject, trainable_parameters
from ditkit_core.nn import factored
from ditkit_core.nn.factored import parts_of, weight_change

CONFIGS = {
    "lokr": AdapterConfig(method="lokr", rank=2, alpha=3.0),
    "lokr, both": AdapterConfig(method="lokr", rank=1, alpha=2.0, decompose_both=True),
    "lokr, whole": AdapterConfig(method="lokr", rank=100, alpha=50.0),
    "lokr, factor 3": AdapterConfig(method="lokr", rank=2, decompose_factor=3),
    "loha": AdapterConfig(method="loha", rank=4, alpha=2.0),
}


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"q": nn.Linear(24, 36), "out": nn.Linear(36, 10, bias=False)}).double()


def adapted(config: AdapterConfig) -> nn.Module:
    model = small()
    inject(model, config, {"all": ("q", "out")})
    initialise(model, 0, device_of=lambda module: torch.device("cpu"))
    random = torch.Generator().manual_seed(1)
    for parameter in trainable_parameters(model).values():
        parameter.data = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
    return model


def of_peft(config: AdapterConfig, ours: nn.Module) -> nn.Module:
    """The same model with peft's own layers and our values."""
    common: dict[str, Any] = {
        "r": config.rank,
        "alpha": config.alpha or config.rank,
        "target_modules": ["q", "out"],
    }
    if config.method == "lokr":
        settings = {
            "decompose_factor": config.decompose_factor,
            "decompose_both": config.decompose_both,
        }
        chosen: Any = peft.LoKrConfig(**common, **settings)
    else:
        chosen = peft.LoHaConfig(**common)
    model = small()
    peft.inject_adapter_in_model(chosen, model)
    theirs = dict(model.named_parameters())
    assert theirs.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert theirs[name].shape == parameter.shape, name
        theirs[name].data = parameter.data.clone()
    return model


def run(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    x = x.clone().requires_grad_()
    out = model["out"](torch.tanh(model["q"](x)))
    out.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return out.detach(), {**gradients, "x": x.grad}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("rows", "rows_at_once"), [(5, None), (5, 2), (1, None), (1, 1)])
def test_outputs_and_every_gradient_are_those_of_peft(
    name: str, rows: int, rows_at_once: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp64, where only the order of sums differs; the scale is a power of two, which peft's LoHa
    rounds to fp32."""
    if rows_at_once is not None:
        monkeypatch.setitem(factored.AT_ONCE, "cpu", 36 * rows_at_once)
    ours = adapted(CONFIGS[name])
    theirs = of_peft(CONFIGS[name], ours)
    num = 2 if rows > 1 else 1  # one row alone, as a sample's timestep has
    x = torch.randn(num, rows, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (out, gradients), (expected, others) = run(ours, x), run(theirs, x)
    assert gradients.keys() == others.keys()
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[key], rtol=1e-10, atol=1e-10, msg=key)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_change_of_a_weight_is_that_of_peft(name: str) -> None:
    config = CONFIGS[name]
    for layer in adapter_layers(adapted(config)).values():
        change = weight_change(parts_of(layer, config.method), layer.scaling["default"])
        torch.testing.assert_close(
            change, layer.get_delta_weight("default"), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_new_adapter_changes_nothing_depends_on_seed_and_name_and_learns(name: str) -> None:
    states = []
    for seed in (0, 0, 1):
        model = small()
        inject(model, CONFIGS[name], {"all": ("q", "out")})
        initialise(model, seed, device_of=lambda module: torch.device("cpu"))
        model.double()
        states.append(trainable_parameters(model))
        x = torch.randn(3, 24, dtype=torch.float64)
        assert torch.equal(run(model, x)[0], run(small(), x)[0])
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert any(not torch.equal(states[0][key], states[2][key]) for key in states[0])
    assert all("default" not in key and "base_layer" not in key for key in states[0])
    _, gradients = run(model, x)
    assert any(gradient.any() for key, gradient in gradients.items() if "_w" in key)


@pytest.mark.parametrize("name", ["lokr", "loha"])
def test_the_backward_keeps_the_input_as_it_came_and_the_factors(name: str) -> None:
    """peft's own layer keeps an fp32 copy of the input and the whole change of the weight."""
    model = small().to(torch.bfloat16)
    inject(model, CONFIGS[name], {"all": ("q", "out")})
    initialise(model, 0, device_of=lambda module: torch.device("cpu"))
    kept: list[Tensor] = []
    x = torch.randn(50, 24, dtype=torch.bfloat16, requires_grad=True)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model["q"](x)
    assert out.dtype == torch.bfloat16
    own = {tensor.untyped_storage().data_ptr() for tensor in (x, *model.parameters())}
    assert [tensor.shape for tensor in kept if tensor.untyped_storage().data_ptr() not in own] == []
    assert len(kept) > 2
