"""Adapters: which layers get one, how they start, what they are called."""

import pytest
import torch
from torch import nn

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import (
    adapter_layers,
    canonical_name,
    initialise,
    inject,
    is_adapter_name,
    target_modules,
    trainable_parameters,
)
from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import PartlyUsed
from ditkit_core.testing.toy import TOY, ToyArch, ToyInputs, ToyModel

CPU = torch.device("cpu")
ATTENTION = ("layers.0.qkv", "layers.0.query", "layers.1.qkv", "layers.1.query")


def on_meta(precision: Precision | None = None) -> ToyModel:
    with torch.device("meta"):
        return ToyModel(ToyArch(), precision or Precision())


def adapted(
    config: AdapterConfig, *, base: torch.dtype = torch.float32, seed: int = 0, **start
) -> ToyModel:
    """A toy with fixed random weights, prepared in the written order."""
    model = on_meta(Precision(matmul=base))
    inject(model, config, TOY.adapters.targets)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in list(model.named_parameters()):
        if ".lora_" in name:
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        value = torch.randn(parameter.shape, generator=generator) * 0.2
        value = value if TOY.precision.keep_fp32(canonical_name(name)) else value.to(base)
        setattr(
            module,
            name.rpartition(".")[2],
            nn.Parameter(value, requires_grad=parameter.requires_grad),
        )
    initialise(model, seed, device_of=lambda module: CPU, **start)
    return model


class Partly(PartlyUsed):
    """A block of two layers, one of which nothing reads."""

    unused = ("text.0",)

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_a_full_fine_tune_leaves_out_what_nothing_reads():
    model = nn.Sequential(nn.Linear(2, 2), Partly()).requires_grad_(False)
    inject(model, AdapterConfig(method="full"), {})
    frozen = {name for name, x in model.named_parameters() if not x.requires_grad}
    assert frozen == {"1.text.0.weight", "1.text.0.bias"}


def toy_inputs() -> ToyInputs:
    generator = torch.Generator().manual_seed(2)
    return ToyInputs(
        [torch.randn(4, 2, 3, 4, generator=generator)],
        torch.tensor([0.3]),
        [torch.randn(5, 8, generator=generator)],
    )


def test_the_default_is_the_first_named_set_and_head_and_embedding_stay_out_of_a_narrower_one():
    assert set(ATTENTION) < set(inject(on_meta(), AdapterConfig(), TOY.adapters.targets))
    model = on_meta()
    assert inject(model, AdapterConfig(targets=("attention",)), TOY.adapters.targets) == ATTENTION
    assert tuple(adapter_layers(model)) == ATTENTION


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("qkv",), ("layers.0.qkv", "layers.1.qkv")),
        (("mlp.0", "embed.text"), ("embed.text", "layers.0.mlp.0", "layers.1.mlp.0")),
        (("layers.1.*",), tuple(f"layers.1.{name}" for name in ("qkv", "out", "query", "key_value", "mlp.0", "mlp.2"))),
        (("layers.?.q*",), ATTENTION),
        (("attention", "layers.0.out"), ("layers.0.qkv", "layers.0.out", "layers.0.query", "layers.1.qkv", "layers.1.query")),
    ],
)  # fmt: skip
def test_targets_are_endings_patterns_and_named_sets(targets, expected):
    assert target_modules(on_meta(), targets, TOY.adapters.targets) == expected


def test_an_ending_fits_whole_components_only():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.eq, self.inner = (
                nn.Linear(2, 2),
                nn.Linear(2, 2),
                nn.ModuleDict({"q": nn.Linear(2, 2)}),
            )

    assert target_modules(Model(), ("q",), {}) == ("q", "inner.q")


def test_a_target_may_be_a_list_of_modules_in_one_place_and_a_layer_in_another():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.double = nn.ModuleDict({"to_out": nn.ModuleList([nn.Linear(2, 2)])})
            self.single = nn.ModuleDict({"to_out": nn.Linear(2, 2)})

    with torch.device("meta"):
        model = Model()
    assert inject(model, AdapterConfig(rank=1, targets=("to_out",)), {}) == ("single.to_out",)
    assert tuple(adapter_layers(model)) == ("single.to_out",)


@pytest.mark.parametrize("targets", [("self_attn.q",), ("qkv", "nothing"), ("layers.9.*",)])
def test_a_target_that_fits_nothing_is_an_error_that_lists_what_could(targets):
    with pytest.raises(UserError) as error:
        inject(on_meta(), AdapterConfig(targets=targets), TOY.adapters.targets)
    message = str(error.value)
    assert repr(targets[-1]) in message
    assert "layers.*.qkv, layers.*.query" in message
    assert "'all', 'attention'" in message
    assert "\n" not in message


@pytest.mark.parametrize("bad", [{"rank": 0}, {"alpha": -1.0}, {"dropout": 1.0}])
def test_impossible_numbers_are_refused(bad):
    with pytest.raises(UserError, match="adapter.rank"):
        AdapterConfig(**bad)


@pytest.mark.parametrize("use_dora", [False, True])
def test_only_adapters_are_trained_and_they_are_fp32_over_a_bf16_base(use_dora):
    model = adapted(AdapterConfig(rank=4, use_dora=use_dora), base=torch.bfloat16)
    trained = trainable_parameters(model)
    assert all(map(is_adapter_name, trained))
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    assert len(trained) == 13 * (3 if use_dora else 2)
    assert model.layers[0].qkv.base_layer.weight.dtype == torch.bfloat16
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    sum(part.sum() for part in model(toy_inputs())).backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert {canonical_name(name) for name in gradients} == trained.keys()
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}


def test_full_trains_every_parameter_and_adds_none():
    model = on_meta()
    before = [name for name, _ in model.named_parameters()]
    model.requires_grad_(False)
    assert inject(model, AdapterConfig(method="full"), TOY.adapters.targets) == ()
    assert list(trainable_parameters(model)) == before


def test_names_are_canonical():
    state = trainable_parameters(adapted(AdapterConfig(rank=2, use_dora=True, targets=("qkv",))))
    parts = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector.weight")
    assert set(state) == {f"layers.{number}.qkv.{part}" for number in range(2) for part in parts}
    assert canonical_name("layers.0.qkv.base_layer.bias") == "layers.0.qkv.bias"
    assert canonical_name("default.base_layer_norm.weight") == "default.base_layer_norm.weight"


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_new_adapter_changes_nothing(use_dora):
    model = adapted(AdapterConfig(rank=4, use_dora=use_dora))
    plain = ToyModel(ToyArch(), Precision(matmul=torch.float32))
    plain.load_state_dict(
        {canonical_name(n): t for n, t in model.state_dict().items() if ".lora_" not in n}
    )
    torch.testing.assert_close(model(toy_inputs()), plain(toy_inputs()), rtol=1e-5, atol=1e-6)


def test_first_values_depend_on_seed_and_name_alone():
    few = trainable_parameters(adapted(AdapterConfig(rank=4, targets=("layers.1.qkv",))))
    many = trainable_parameters(adapted(AdapterConfig(rank=4), base=torch.bfloat16))
    other = trainable_parameters(adapted(AdapterConfig(rank=4), seed=1))
    down = "layers.1.qkv.lora_A.weight"
    assert torch.equal(few[down], many[down])
    assert not torch.equal(many[down], other[down])
    assert not torch.equal(many[down], many[down.replace("1", "0")])


def test_a_is_uniform_as_peft_samples_it_and_b_is_zero():
    state = trainable_parameters(adapted(AdapterConfig(rank=32)))
    ups = [tensor for name, tensor in state.items() if "lora_B" in name]
    assert not any(tensor.any() for tensor in ups)
    reference = torch.empty(32, 32)
    nn.init.kaiming_uniform_(reference, a=5**0.5)
    down = state["layers.0.qkv.lora_A.weight"]
    bound = 1 / 32**0.5
    assert 0.98 * bound < down.abs().max() <= bound
    assert reference.abs().max() <= bound
    assert abs(down.std() / reference.std() - 1) < 0.1


def test_a_dora_magnitude_is_the_norm_of_the_loaded_weight_in_fp32():
    model = adapted(AdapterConfig(rank=4, use_dora=True, targets=("qkv",)), base=torch.bfloat16)
    weight = model.layers[0].qkv.base_layer.weight.float()
    magnitude = trainable_parameters(model)["layers.0.qkv.lora_magnitude_vector.weight"]
    torch.testing.assert_close(magnitude, weight.norm(dim=1))


def test_given_values_are_taken_and_the_dora_magnitude_then_includes_them():
    given = {"lora_A.weight": torch.randn(4, 32), "lora_B.weight": torch.randn(96, 4)}
    config = AdapterConfig(rank=4, alpha=8.0, use_dora=True, targets=("qkv",))
    model = adapted(config, start=lambda module: given if module == "layers.1.qkv" else {})
    state = trainable_parameters(model)
    assert torch.equal(state["layers.1.qkv.lora_A.weight"], given["lora_A.weight"])
    assert torch.equal(state["layers.1.qkv.lora_B.weight"], given["lora_B.weight"])
    assert not state["layers.0.qkv.lora_B.weight"].any()
    merged = (
        model.layers[1].qkv.base_layer.weight + 2 * given["lora_B.weight"] @ given["lora_A.weight"]
    )
    torch.testing.assert_close(
        state["layers.1.qkv.lora_magnitude_vector.weight"], merged.norm(dim=1)
    )


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        (AdapterConfig(rank=16), 1.0),
        (AdapterConfig(rank=16, alpha=8.0), 0.5),
        (AdapterConfig(rank=16, use_rslora=True), 4.0),
        (AdapterConfig(rank=16, alpha=8.0, use_rslora=True), 2.0),
    ],
)
def test_our_scaling_is_pefts(config, scaling):
    assert config.scaling == scaling
    model = on_meta()
    inject(model, config, TOY.adapters.targets)
    assert {layer.scaling["default"] for layer in adapter_layers(model).values()} == {scaling}


def test_ranks_and_alphas_by_layer_are_those_of_peft():
    """peft's own layers, given the same patterns as regular expressions."""
    import peft

    config = AdapterConfig(
        rank=8,
        alpha=4.0,
        rank_pattern=("query=2", "layers.0.*=3"),
        alpha_pattern=("layers.1.qkv=16",),
        use_rslora=True,
    )
    model, reference = on_meta(), on_meta()
    names = inject(model, config, TOY.adapters.targets)
    theirs = peft.LoraConfig(
        r=8,
        lora_alpha=4.0,
        use_rslora=True,
        rank_pattern={"query": 2, r"layers\.0\..*": 3},
        alpha_pattern={r"layers\.1\.qkv": 16.0},
        target_modules="|".join(names).replace(".", r"\."),
    )
    with torch.device("meta"):
        peft.inject_adapter_in_model(theirs, reference)
    ours, expected = adapter_layers(model), adapter_layers(reference)
    assert ours.keys() == expected.keys()
    for name, layer in ours.items():
        assert (
            layer.lora_A["default"].weight.shape == expected[name].lora_A["default"].weight.shape
        ), name
        assert layer.scaling["default"] == expected[name].scaling["default"], name
    assert {layer.r["default"] for layer in ours.values()} == {2, 3, 8}


def test_a_rank_and_an_alpha_are_of_the_named_layer_and_of_no_longer_name():
    model = nn.ModuleDict({"q": nn.Linear(8, 8), "inner": nn.ModuleDict({"q": nn.Linear(8, 8)})})
    config = AdapterConfig(rank=2, alpha=2.0, rank_pattern=("^q=4",), alpha_pattern=("^q=8",))
    inject(model, config, {"all": ("q",)})
    layers = adapter_layers(model)
    assert {name: layer.r["default"] for name, layer in layers.items()} == {"q": 4, "inner.q": 2}
    assert {name: layer.scaling["default"] for name, layer in layers.items()} == {
        "q": 2.0,
        "inner.q": 1.0,
    }


def test_without_an_alpha_each_layer_is_scaled_by_one():
    model = on_meta()
    inject(model, AdapterConfig(rank=8, rank_pattern=("query=2",)), TOY.adapters.targets)
    assert {layer.scaling["default"] for layer in adapter_layers(model).values()} == {1.0}


def test_a_pattern_that_fits_no_adapted_layer_is_refused():
    config = AdapterConfig(targets=("qkv",), rank_pattern=("query=2",))
    with pytest.raises(UserError, match="adapter.rank_pattern: 'query' fits no trained layer"):
        inject(on_meta(), config, TOY.adapters.targets)
    with pytest.raises(UserError, match="adapter.method = full trains the weights themselves"):
        AdapterConfig(method="full", rank_pattern=("query=2",))


def test_only_some_of_the_chosen_modules_get_an_adapter_and_patterns_count_for_all():
    model = on_meta()
    config = AdapterConfig(rank_pattern=("layers.1.*=2",))
    assert inject(model, config, TOY.adapters.targets, only={"layers.0.qkv"}) == ("layers.0.qkv",)
    assert tuple(adapter_layers(model)) == ("layers.0.qkv",)
