"""What dividing a model over devices trips over elsewhere: each has a test here, and each naive way
fails in it."""

import itertools

import pytest
import torch
from divided_toy import VARIANT, VARIANT_ARCH
from torch import nn
from torch.utils._pytree import tree_map_only
from toy_training import ToyData, train
from toy_world import World

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import adapter_layers, initialise, trainable_parameters
from ditkit_core.commands import cli
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.engine import POLICIES, BlockEngine, move_carry
from ditkit_core.engine.placement import place_blocks
from ditkit_core.loading.model import Model
from ditkit_core.testing.carries import check_carry
from ditkit_core.testing.combinations import every_value
from ditkit_core.testing.conformance_split import layouts
from ditkit_core.testing.pretend_devices import PretendDevices, divide
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import make_model, outcome, train_shortly
from ditkit_core.training.checkpoint import load_state
from ditkit_core.training.config import (
    EMAConfig,
    FlowConfig,
    HeldOutConfig,
    SaveConfig,
    TrainConfig,
)
from ditkit_core.training.metrics import LogConfig
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_state import TrainState

ONE, TWO, THREE = (torch.device("cpu", index) for index in (1, 2, 3))
ITEMS = toy_items(2, ragged=True)
LORA = AdapterConfig(rank=2, dropout=0.1)


def divided(spec, arch, devices, adapter=None):
    model = make_model(spec, arch, adapter=adapter)
    divide(model, devices)
    return model


# Optional modules of variants, blocks between blocks, tables that are bare parameters, a second
# head


def test_the_variant_hands_on_what_it_says():
    model = make_model(VARIANT, VARIANT_ARCH)
    carry = model.embed(
        VARIANT.training.make_inputs(
            [i["latents"] for i in ITEMS], torch.tensor([0.3, 0.8]), ITEMS, 1.0
        )
    )
    for block in model.blocks():
        carry = block(carry)
        check_carry(carry)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "adapter"), every_value(POLICIES, ("full", "lora")))
def test_no_cut_of_a_variant_changes_a_bit(policy, adapter):
    adapter = {"full": None, "lora": LORA}[adapter]
    expected = outcome(
        VARIANT,
        make_model(VARIANT, VARIANT_ARCH, adapter=adapter),
        ITEMS,
        BlockEngine(policy=policy),
    )
    num = len(make_model(VARIANT, VARIANT_ARCH).blocks())
    assert num == 7
    for cut in range(1, num):
        model = divided(VARIANT, VARIANT_ARCH, [ONE] * (1 + cut) + [TWO] * (num - cut + 1), adapter)
        with PretendDevices():
            assert (
                outcome(VARIANT, model, ITEMS, BlockEngine(policy=policy)).differences(expected)
                == []
            ), cut


@pytest.mark.slow
def test_a_variant_trains_over_three_devices_as_on_one():
    numbers, values = train_shortly(
        VARIANT, make_model(VARIANT, VARIANT_ARCH, adapter=LORA), ITEMS, BlockEngine()
    )
    for devices in layouts(7).values():
        with PretendDevices():
            found, others = train_shortly(
                VARIANT, divided(VARIANT, VARIANT_ARCH, devices, LORA), ITEMS, BlockEngine()
            )
        assert found == numbers
        assert all(torch.equal(values[name], others[name]) for name in values)


def test_bare_parameters_go_where_they_are_used():
    model = make_model(VARIANT, VARIANT_ARCH)
    device_of = place_blocks(model, (ONE, TWO, THREE), (2, 5)).device_of(model)
    assert device_of("layers.0.strength") == ONE
    assert device_of("injectors.0.scale_shift_table") == ONE
    assert device_of("layers.1.strength") == TWO
    assert device_of("injectors.1.scale_shift_table") == THREE
    assert device_of("head.whole.weight") == THREE and device_of("embed.image.weight") == ONE


def test_a_parameter_outside_the_stages_is_refused_before_anything_is_loaded():
    class Rootless(VARIANT.architecture.build):
        def __init__(self, arch, precision):
            super().__init__(arch, precision)
            self.scale_shift_table = nn.Parameter(torch.zeros(2, arch.dim))

    model = make_model(altered(VARIANT, build=Rootless), VARIANT_ARCH)
    device_of = place_blocks(model, (ONE, TWO), (3,)).device_of(model)
    with pytest.raises(LookupError, match="scale_shift_table belongs neither"):
        [device_of(name) for name, _ in model.named_parameters()]


# Tables that are not buffers


@pytest.mark.parametrize("place_of_table", ["host", "first device"])
@pytest.mark.parametrize("where", ["block", "head"])
def test_a_table_left_behind_is_found(where, place_of_table):
    """Whoever reads what is on another device fails here, not on the user's second GPU."""
    devices = [ONE, ONE, ONE, TWO, TWO, TWO]
    model = divided(TOY, ToyArch(depth=4), devices)
    with PretendDevices():
        table = torch.ones(32) if place_of_table == "host" else torch.ones(32, device=ONE)
        stage = model.blocks()[3] if where == "block" else model.head
        handle = stage.register_forward_pre_hook(
            lambda _, given: (given[0]._replace(tokens=given[0].tokens + table),)
        )
        with pytest.raises(RuntimeError, match="mixes tensors of"):
            outcome(TOY, model, ITEMS, BlockEngine())
        handle.remove()
        outcome(TOY, model, ITEMS, BlockEngine())  # and it was the table


# Naive ways to cross a boundary


def tokens_alone(carry, device):
    """What a hook on the first block of a device does: it moves the hidden states."""
    return carry._replace(tokens=carry.tokens.to(device))


def tensors_of_the_first_level(carry, device):
    """What misses tensors inside of tuples, were there any; here all but the last is moved."""
    *most, last = (leaf for leaf in carry)
    return type(carry)(*tree_map_only(torch.Tensor, lambda leaf: leaf.to(device), most), last)


@pytest.mark.parametrize("naive", [tokens_alone, tensors_of_the_first_level])
@pytest.mark.parametrize("policy", POLICIES)
def test_ways_that_leave_constants_behind_fail(naive, policy, monkeypatch):
    monkeypatch.setattr("ditkit_core.engine.engine.move_carry", naive)
    model = divided(VARIANT, VARIANT_ARCH, [ONE] * 4 + [TWO] * 5)
    with PretendDevices(), pytest.raises(RuntimeError, match="mixes tensors of"):
        outcome(VARIANT, model, ITEMS, BlockEngine(policy=policy))
    monkeypatch.setattr("ditkit_core.engine.engine.move_carry", move_carry)
    with PretendDevices():
        outcome(VARIANT, model, ITEMS, BlockEngine(policy=policy))


# Adapters, average, multipliers


def test_adapters_are_made_where_their_layer_is():
    model = make_model(TOY, ToyArch(depth=4), adapter=AdapterConfig(rank=2, use_dora=True))
    placed = place_blocks(model, (ONE, TWO), (3,))
    divide(model, [placed.embed, *placed.blocks, placed.head])
    with PretendDevices():
        initialise(model, 0, device_of=placed.device_of(model))
    layers = adapter_layers(model)
    assert {layer.weight.device for layer in layers.values()} == {ONE, TWO}
    for name, layer in layers.items():
        own = {parameter.device for parameter in layer.parameters()}
        assert own == {layer.weight.device}, name
        assert isinstance(layer.scaling["default"], float), (
            "a multiplier that is a tensor would have a device"
        )


def test_adapters_left_on_the_first_device_are_found():
    model = divided(TOY, ToyArch(depth=4), [ONE] * 3 + [TWO] * 3, AdapterConfig(rank=2))
    with PretendDevices():
        initialise(model, 0, device_of=lambda name: ONE)
        with pytest.raises(RuntimeError, match="mixes tensors of"):
            outcome(TOY, model, ITEMS, BlockEngine())


def test_average_and_optimizer_are_on_the_device_of_their_parameters():
    model = divided(
        TOY, ToyArch(depth=4), [ONE, ONE, TWO, TWO, THREE, THREE], AdapterConfig(rank=2)
    )
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with PretendDevices():
        trained = TrainState(model, trainable, OptimConfig(), EMAConfig(decay=0.9))
        outcome(TOY, model, ITEMS, BlockEngine())
        trained.optimizer.step(1e-3)
        trained.average.update(1)
    state = trained.optimizer.state()[0]
    for name, parameter in trainable.items():
        assert trained.average.values[name].device == parameter.device, name
        assert all(
            state[f"{name}|{kind}"].device == parameter.device for kind in ("exp_avg", "exp_avg_sq")
        ), name
    assert {parameter.device for parameter in trainable.values()} == {ONE, TWO, THREE}


# Something that moves the model later


def test_nothing_moves_a_model_after_it_was_loaded(tmp_path, monkeypatch):
    """Training, measuring, previews, saves, exports, verifying and drawing: a `.to(device)` would
    put the halves back together."""
    monkeypatch.chdir(tmp_path)
    world, applied, verified = World(tmp_path), [], []
    world.spec = altered(world.spec, verify=lambda *given: verified.append(given) or "yes")
    apply = nn.Module._apply

    def recorded(module, *given, **options):
        # adapters are put in on meta
        if any(not parameter.is_meta for parameter in module.parameters()):
            applied.append(type(module).__name__)
        return apply(module, *given, **options)

    # what to(), cuda(), cpu(), float() and half() all go through
    monkeypatch.setattr(nn.Module, "_apply", recorded)
    flags = ["--train.devices", '["cpu:1", "cpu:2"]', "--held_out.clips", "1", "--ema.decay", "0.9"]
    flags += ["--sample.every_steps", "1", "--save.every_steps", "1", "--export.merged", "true"]
    run = ["--run", str(tmp_path / "run")]
    with PretendDevices():
        assert world.train("run", 2, *flags) == 0
        assert (
            cli.run(world.spec, "export", [*run, "--merge", "--out", str(tmp_path / "merged")]) == 0
        )
        assert cli.run(world.spec, "sample", [*run, "--prompt", "teal"]) == 0
    assert applied == []
    assert len(list((tmp_path / "run" / "samples").iterdir())) > 2


# A save of one division continues under any other


OPTIMIZERS = ("adamw", "muon", "prodigy", "adafactor", "schedulefree_adamw")
WAYS = [
    (None, "none"),
    ([ONE, ONE, ONE, TWO, TWO, TWO], "full"),
    ([ONE, TWO, TWO, TWO, THREE, ONE], "attn_only"),
]


def train_toy(folder, steps, way, method, name):
    """Up to this step, by one of the ways to lay the model out and to recompute; returns the state
    that is saved."""
    devices, policy = WAYS[way]
    model = make_model(
        TOY, ToyArch(dim=16, depth=4, dropout=0.1), adapter=LORA if method == "lora" else None
    )
    if devices:
        divide(model, devices)
    averages_itself = name == "schedulefree_adamw"
    with PretendDevices():
        result = train(
            Model(model, BlockEngine(policy=policy), TOY, trainable_parameters(model)),
            ToyData(ragged=True), folder=folder,
            config=TrainConfig(steps=steps, batch_size=2, clip_norm=0.1),
            flow=FlowConfig(weighting="bell"), save=SaveConfig(),
            held_out=HeldOutConfig(sigmas=(0.5,)),
            optim=OptimConfig(name=name, lr=1.0 if name == "prodigy" else 0.01, warmup_steps=2),
            ema=EMAConfig() if averages_itself else EMAConfig(decay=0.9),
            log=LogConfig(tensorboard=False),
            held_out_clips=Batch(ids=["held"], items=toy_items(1, seed=9)),
        )  # fmt: skip
    return load_state(result.save)


def how_often(name):
    """Marks: in the default set the usual optimizer, and one that knows matrices."""
    return () if name in ("adamw", "muon") else pytest.mark.slow


@pytest.mark.parametrize(
    ("method", "name"),
    [
        pytest.param(
            method, name, marks=how_often(name) if method == daily else pytest.mark.exhaustive
        )
        for name, daily in zip(OPTIMIZERS, itertools.cycle(("lora", "full")))
        for method in ("lora", "full")
        if (method, name) != ("lora", "muon")
    ],
)
def test_a_save_of_one_division_continues_under_any_other_bitwise(method, name, tmp_path):
    pytest.importorskip(
        {"prodigy": "prodigyopt", "schedulefree_adamw": "schedulefree"}.get(name, "torch")
    )
    whole = train_toy(tmp_path / "whole", 3, 0, method, name)
    for steps, way in enumerate((1, 2, 0), start=1):  # on two devices, on others, on one
        parts = train_toy(tmp_path / "parts", steps, way, method, name)
    assert (whole.step, whole.values) == (parts.step, parts.values)
    assert whole.tensors.keys() == parts.tensors.keys()
    for group, tensors in whole.tensors.items():
        assert tensors.keys() == parts.tensors[group].keys()
        assert [
            key for key in tensors if not torch.equal(tensors[key], parts.tensors[group][key])
        ] == [], group
    assert whole.tensors["optimizer"] and bool(whole.tensors.get("ema")) == (
        name != "schedulefree_adamw"
    )
