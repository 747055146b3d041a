"""Optimizers by name, the schedule, and optimizer state without pickle."""

import json
import sys
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ditkit_core.config.schema import config_fields
from ditkit_core.errors import UserError
from ditkit_core.run.config import RunConfig
from ditkit_core.training.optim.optimizer import NamedOptimizer, check_rates, learning_rate
from ditkit_core.training.optim.optimizers import OptimConfig


def parameters():
    torch.manual_seed(0)
    shapes = {"block.weight": (64, 64), "head.weight": (3, 4), "head.bias": (64,)}
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def config_of(name, **fields):
    return OptimConfig(name=name, lr=1.0 if name == "prodigy" else 0.01, warmup_steps=4, **fields)


def build(name, held, **fields):
    return NamedOptimizer(
        held, config_of(name, **fields), matrices=["block.weight"] if name == "muon" else []
    )


def give_gradients(held, step):
    """Towards zero, with noise: an optimizer that estimates its own step size has something to
    estimate."""
    random = torch.Generator().manual_seed(step)
    for parameter in held.values():
        parameter.grad = parameter.detach() + 0.1 * torch.randn(parameter.shape, generator=random)


def run(name, held, optimizer, steps):
    for step in steps:
        give_gradients(held, step)
        optimizer.step(learning_rate(step, config_of(name), 60))


def through_a_file(state, folder):
    tensors, values = state
    save_file(tensors, folder / "optimizer.safetensors")
    return load_file(folder / "optimizer.safetensors"), json.loads(json.dumps(values))


def check_that_a_reloaded_state_continues_bitwise(name, folder):
    whole, halves = parameters(), parameters()
    # Prodigy changes its step size from the twentieth on
    run(name, whole, build(name, whole), range(60))
    first = build(name, halves)
    run(name, halves, first, range(30))
    second = build(name, halves)
    second.load_state(*through_a_file(first.state(), folder))
    run(name, halves, second, range(30, 60))
    initial = parameters()
    for key in whole:
        assert not torch.equal(whole[key], initial[key]), key
        assert torch.equal(whole[key], halves[key]), key


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_a_reloaded_state_continues_bitwise(name, tmp_path):
    check_that_a_reloaded_state_continues_bitwise(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "package"), [("prodigy", "prodigyopt"), ("schedulefree_adamw", "schedulefree")]
)
def test_a_reloaded_state_of_an_extra_optimizer_continues_bitwise(name, package, tmp_path):
    pytest.importorskip(package)
    check_that_a_reloaded_state_continues_bitwise(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stance", ["default", "force_eager"])
def test_a_reloaded_eight_bit_state_continues_bitwise(stance, tmp_path):
    held = parameters()
    with torch.compiler.set_stance(stance):  # eager needs no compiler
        check_that_a_reloaded_state_continues_bitwise("adamw8bit", tmp_path)
        optimizer = build("adamw8bit", held)
        run("adamw8bit", held, optimizer, range(1))
    tensors, values = optimizer.state()
    assert tensors["block.weight|exp_avg|codes"].dtype is torch.uint8
    assert list(values["subclasses"]) == ["block.weight|exp_avg", "block.weight|exp_avg_sq"]


def test_a_state_with_an_unknown_tensor_class_is_refused():
    held = parameters()
    optimizer = build("adamw", held)
    tensors, values = optimizer.state()
    values["subclasses"]["block.weight|exp_avg"] = ["os.system", []]
    with pytest.raises(UserError, match=r"os\.system.*--init-from"):
        optimizer.load_state(tensors, values)


def test_a_state_of_other_parameters_is_refused():
    held = parameters()
    optimizer = build("adamw", held)
    run("adamw", held, optimizer, range(1))
    other = build("adamw", {"else.weight": held["block.weight"], "else.bias": held["head.bias"]})
    with pytest.raises(UserError, match=r"block\.weight.*--init-from"):
        other.load_state(*optimizer.state())


def test_settings_of_now_win_over_those_of_the_saved_state():
    held = parameters()
    first = build("adamw", held, weight_decay=0.5)
    run("adamw", held, first, range(2))
    second = build("adamw", held, weight_decay=0.125, betas=(0.8, 0.9))
    second.load_state(*first.state())
    assert second.parts[0].param_groups[0]["weight_decay"] == 0.125
    assert second.parts[0].param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_vectors_are_not_decayed_and_matrices_are(name):
    held = parameters()
    before = {key: value.detach().clone() for key, value in held.items()}
    optimizer = build(name, held, weight_decay=0.5)
    for parameter in held.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.1)
    assert torch.equal(held["head.bias"], before["head.bias"])
    for key in ("block.weight", "head.weight"):
        assert torch.allclose(held[key], before[key] * (1 - 0.1 * 0.5), rtol=1e-4), key


def test_muon_takes_the_block_matrices_and_adamw_the_rest():
    held = parameters()
    muon, adamw = build("muon", held).parts
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    assert [id(p) for group in muon.param_groups for p in group["params"]] == [
        id(held["block.weight"])
    ]
    assert {id(p) for group in adamw.param_groups for p in group["params"]} == {
        id(held["head.weight"]),
        id(held["head.bias"]),
    }


def test_muon_without_whole_matrices_names_what_to_use_instead():
    with pytest.raises(UserError, match="muon is for a full fine-tune; with an adapter use adamw"):
        NamedOptimizer(parameters(), OptimConfig(name="muon"))


@pytest.mark.parametrize(
    ("name", "package"), [("prodigy", "prodigyopt"), ("schedulefree_adamw", "schedulefree")]
)
def test_a_missing_package_is_named_with_its_extra(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError) as error:
        build(name, parameters())
    assert "ditkit-core[optimizers]" in str(error.value) and package in str(error.value)
    assert "\n" not in str(error.value)


class Averaging(torch.optim.SGD):
    """An optimizer with two sets of weights and the rounding that comes of going between them."""

    def train(self):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.mul_(1.1)

    def eval(self):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.mul_(1 / 1.1)


def test_looking_at_averaged_weights_leaves_the_trained_ones_bitwise(monkeypatch):
    from ditkit_core.training.optim import optimizer as optim

    kind = optim.OptimizerKind(
        build=lambda groups, config: Averaging(groups[:1], lr=config.lr), averages=True
    )
    monkeypatch.setitem(optim.OPTIMIZERS, "schedulefree_adamw", kind)
    held = parameters()
    optimizer = build("schedulefree_adamw", held)
    trained = held["block.weight"].detach().clone()
    with optimizer.averaged():
        assert torch.equal(held["block.weight"], trained * (1 / 1.1))
    assert torch.equal(held["block.weight"], trained)
    with build("adamw", held).averaged():
        assert torch.equal(held["block.weight"], trained)


def test_a_constant_rate_follows_a_linear_warm_up():
    config = OptimConfig(lr=0.1, warmup_steps=4)
    assert [learning_rate(step, config, 100) for step in range(6)] == pytest.approx(
        [0.025, 0.05, 0.075, 0.1, 0.1, 0.1]
    )


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_falling_schedule_ends_at_its_fraction_and_stays_there(schedule):
    config = OptimConfig(lr=0.1, warmup_steps=2, schedule=schedule, final_lr_fraction=0.1)
    rates = [learning_rate(step, config, 21) for step in range(25)]
    assert rates[2] == pytest.approx(0.1)
    assert rates[11] == pytest.approx(0.055)
    assert rates[20:] == pytest.approx([0.01] * 5)
    assert all(a > b for a, b in pairwise(rates[2:21]))


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_without_a_fraction_the_last_step_has_no_rate_as_the_help_says(schedule):
    """diffusers' schedules reach 0 after it; runs that were stored continue with these rates."""
    config = OptimConfig(lr=0.1, schedule=schedule)
    assert [learning_rate(step, config, 3) for step in range(3)] == pytest.approx([0.1, 0.05, 0.0])
    assert learning_rate(0, config, 1) == pytest.approx(0.1), "a run of one step trains"
    assert (
        "With 0 the last step changes nothing"
        in config_fields(RunConfig)["optim.final_lr_fraction"].doc
    )


def test_a_run_shorter_than_its_warm_up_has_rates():
    config = OptimConfig(lr=0.1, warmup_steps=10, schedule="cosine")
    assert learning_rate(0, config, 1) == pytest.approx(0.01)
    assert learning_rate(9, config, 5) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "fields",
    [
        {"lr": 0.0},
        {"eps": 0.0},
        {"weight_decay": -1.0},
        {"warmup_steps": -1},
        {"betas": (0.9, 1.0)},
        {"name": "schedulefree_adamw", "schedule": "cosine"},
    ],
)
def test_settings_out_of_range_are_refused(fields):
    with pytest.raises(UserError, match="optim") as error:
        OptimConfig(**fields)
    assert "\n" not in str(error.value)


def test_prodigy_with_a_learning_rate_of_another_optimizer_is_refused() -> None:
    with pytest.raises(UserError, match="set optim.lr = 1"):
        OptimConfig(name="prodigy", lr=1e-4)


def adapter_parameters():
    torch.manual_seed(0)
    shapes = {
        f"layers.{block}.{layer}.{part}.weight": shape
        for block in (0, 1)
        for layer in ("q", "ffn")
        for part, shape in {
            "lora_A": (2, 8),
            "lora_B": (8, 2),
            "lora_magnitude_vector": (8,),
        }.items()
    }
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def test_lora_plus_updates_as_pefts_optimizer():
    """peft's create_loraplus_optimizer over the same parameters in a module of the same names."""
    from peft.optimizers import create_loraplus_optimizer

    held, model = adapter_parameters(), nn.Module()
    for name, parameter in held.items():
        owner = model
        *path, leaf = name.split(".")
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        setattr(owner, leaf, nn.Parameter(parameter.detach().clone()))
    theirs = create_loraplus_optimizer(
        model,
        torch.optim.AdamW,
        lr=1e-2,
        loraplus_lr_ratio=16.0,
        loraplus_weight_decay=0.1,
        fused=True,
    )
    ours = NamedOptimizer(held, OptimConfig(lr=1e-2, loraplus_lr_ratio=16.0, weight_decay=0.1))
    assert ours.rates(1e-2) == {"lr B": 0.16}
    for step in range(3):
        give_gradients(held, step)
        for name, parameter in model.named_parameters():
            parameter.grad = held[name].grad.clone()
        ours.step(1e-2)
        theirs.step()
    for name, parameter in model.named_parameters():
        if "magnitude" not in name:  # peft decays these vectors, we do not
            torch.testing.assert_close(held[name], parameter, rtol=0, atol=0, msg=name)


def test_a_rate_by_layer_is_that_of_a_run_with_this_rate():
    """A power of two apart, so that the factor is exact."""
    mixed, slow, fast = adapter_parameters(), adapter_parameters(), adapter_parameters()
    built = {
        "mixed": (
            mixed,
            NamedOptimizer(mixed, OptimConfig(lr=2**-6, lr_pattern=(f"layers.1.*={2**-9}",))),
        ),
        "slow": (slow, NamedOptimizer(slow, OptimConfig(lr=2**-9))),
        "fast": (fast, NamedOptimizer(fast, OptimConfig(lr=2**-6))),
    }
    for step in range(3):
        for name, (held, optimizer) in built.items():
            give_gradients(held, step)
            optimizer.step(2**-9 if name == "slow" else 2**-6)
    for name in mixed:
        assert torch.equal(mixed[name], (slow if name.startswith("layers.1.") else fast)[name]), (
            name
        )


@pytest.mark.parametrize("name", ["adamw", "adafactor", "schedulefree_adamw"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_reloaded_state_of_several_rates_continues_bitwise(name, fused, tmp_path):
    if name == "schedulefree_adamw":
        pytest.importorskip("schedulefree")
    fields = {"lr_pattern": ("layers.1.*=0.001", "ffn=0.002"), "loraplus_lr_ratio": 4.0}
    config = OptimConfig(name=name, lr=0.01, fused_backward=fused, **fields)
    whole, halves = adapter_parameters(), adapter_parameters()

    def steps(held, optimizer, numbers):
        for step in numbers:
            give_gradients(held, step)
            if fused:
                for one in held:
                    optimizer.step_one(one, 0.01)
                optimizer.end_step(0.01, list(held))
            else:
                optimizer.step(0.01)

    steps(whole, NamedOptimizer(whole, config), range(8))
    first = NamedOptimizer(halves, config)
    assert first.rates(0.01) == pytest.approx(
        {
            "lr layers.1.*": 0.001,
            "lr layers.1.* B": 0.004,
            "lr B": 0.04,
            "lr ffn": 0.002,
            "lr ffn B": 0.008,
        }
    )
    steps(halves, first, range(4))
    second = NamedOptimizer(halves, config)
    second.load_state(*through_a_file(first.state(), tmp_path))
    steps(halves, second, range(4, 8))
    for key in whole:
        assert torch.equal(whole[key], halves[key]), key


def test_rates_that_an_optimizer_cannot_have_are_refused():
    with pytest.raises(UserError, match="do not go with prodigy"):
        OptimConfig(name="prodigy", lr=1.0, loraplus_lr_ratio=16.0)
    with pytest.raises(UserError, match="loraplus_lr_ratio = 0.0 must be above 0"):
        OptimConfig(loraplus_lr_ratio=0.0)
    with pytest.raises(UserError, match="optim.lr_pattern: 'q' is not PATTERN=RATE"):
        OptimConfig(lr_pattern=("q",))
    with pytest.raises(UserError, match="optim.lr_pattern: 'k' fits no trained layer"):
        check_rates(OptimConfig(lr_pattern=("k=1e-3",)), ["layers.0.q"])
