"""Numeric sentinels: what is seen of a step, that seeing changes nothing, and what is said of a
step that went wrong."""

import json

import pytest
import torch
from saved_states import CLIPS, numbers
from torch.utils._python_dispatch import TorchDispatchMode
from toy_training import ToyBatch, toy_model, toy_run

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.planner.memory_tracker import fake_tensors
from ditkit_core.testing.combinations import daily
from ditkit_core.testing.conformance_swap import stream
from ditkit_core.testing.pretend_devices import PretendDevices, move_to
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import make_model
from ditkit_core.training import tensor_stats
from ditkit_core.training.config import FlowConfig, TrainConfig
from ditkit_core.training.losses import NonFiniteLoss
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.tensor_stats import (
    BlockStats,
    DriftMonitor,
    StatsRecorder,
    StepStats,
    magnitudes,
    normal_counts,
)
from ditkit_core.training.train_step import StepContext, training_step
from ditkit_core.training.trainer import Callback

FLOW = FlowConfig(weighting="bell")
ARCH = ToyArch(dim=16, depth=3)
ADAPTER = AdapterConfig(rank=4)
INF, NAN = float("inf"), float("nan")


def step(model, run=None, *, watch=None, fused=False, micro_batches=2, number=3):
    items = toy_items(2 * micro_batches)
    batches = [
        ToyBatch([f"clip {2 * i}", f"clip {2 * i + 1}"], items[2 * i : 2 * i + 2])
        for i in range(micro_batches)
    ]
    trainable = trainable_parameters(model)
    optimizer = NamedOptimizer(trainable, OptimConfig(fused_backward=fused))
    return training_step(
        Model(model, run or BlockEngine(), TOY),
        batches,
        optimizer,
        StepContext(step=number, seed=1, flow=FLOW),
        lr=1e-3,
        clip_norm=0.0,
        watch=watch,
    )


# What is seen


def below_normal_and_zero(gradient):
    return [gradient.numel() - float(count) for count in normal_counts(gradient)]


def test_magnitudes_are_counted_over_any_number_of_parts(monkeypatch):
    monkeypatch.setitem(tensor_stats._AT_ONCE, "cpu", 100)
    x = torch.randn(7, 50, 3)
    x[3, 7], x[0, 0, 0], x[6, 49, 1] = torch.tensor([INF, -INF, NAN]), NAN, -77.0
    for tensor in (x, x.bfloat16(), x.transpose(0, 2)):
        assert [float(number) for number in magnitudes(tensor)] == [77.0, 4.0]
    tiny = torch.finfo(torch.float32).tiny
    gradient = torch.cat([torch.zeros(150), torch.full((60,), tiny / 2), torch.full((90,), -tiny)])
    assert below_normal_and_zero(gradient) == [210.0, 150.0]
    half = torch.tensor([6e-5, 6.2e-5, 0.0, -6e-8]).half()
    assert below_normal_and_zero(half) == [3.0, 1.0], "of the dtype that it is stored in"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_numbers_at_the_edges_of_a_dtype_are_counted_as_they_are(dtype):
    limits = torch.finfo(dtype)
    smallest = torch.tensor([limits.tiny, -limits.tiny], dtype=dtype)
    below = (
        torch.nextafter(smallest, torch.zeros(2, dtype=dtype))
        if dtype != torch.float16
        else smallest / 2
    )
    gradient = torch.cat([smallest, below, torch.tensor([0.0, -0.0, 1.0, INF, NAN], dtype=dtype)])
    assert below_normal_and_zero(gradient) == [4.0, 2.0]
    largest = torch.tensor([limits.max, -limits.max], dtype=dtype)
    assert [float(number) for number in magnitudes(torch.cat([gradient, largest]))] == [
        limits.max,
        2.0,
    ]


class Launches(TorchDispatchMode):
    """Counts operations that a GPU would launch."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_few_operations_are_launched_for_a_watched_tensor(monkeypatch):
    monkeypatch.setitem(tensor_stats._AT_ONCE, "cpu", 100)
    counts = {}
    for parts in (1, 20):
        for look in (magnitudes, normal_counts):
            with Launches() as launches:
                look(torch.ones(parts * 100))
            counts[look, parts] = launches.count - 1  # of `ones`
    assert counts[magnitudes, 20] <= 20 * 4 + 8 and counts[normal_counts, 20] <= 20 * 3 + 6
    assert counts[magnitudes, 1] <= 12 and counts[normal_counts, 1] <= 4
    with fake_tensors("cuda") as meter:
        stream = torch.empty(20_280, 5120)  # of Wan 14B: 13 parts
        for look in (magnitudes, normal_counts):
            meter.kernels.clear()
            look(stream)
            assert meter.kernels.total() <= 13 * 4 + 8


class Seen:
    """What each block was given and made, noted by hand."""

    def __init__(self, model):
        self.largest = {}
        for index, block in enumerate(model.blocks()):
            block.register_forward_hook(
                lambda module, args, carry, index=index: self.note(index, carry)
            )

    def note(self, index, carry):
        self.largest[index] = max(
            self.largest.get(index, 0.0), float(carry.tokens.detach().abs().max())
        )


def freeze_key_biases(model, *, but=None):
    """Leaves the biases of keys out of training: softmax does not see them, so their gradients are
    0 but for rounding, and how many elements are exactly 0 depends on the CPU's instruction set. No
    other gradient of the toy comes near 0."""
    for layer in model.layers:
        for bias in (layer.qkv.bias, layer.key_value.bias):
            bias.requires_grad_(bias is but)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_reading_is_of_what_each_block_made(policy, method):
    model = make_model(TOY, ARCH, adapter=ADAPTER if method == "lora" else None)
    freeze_key_biases(model)
    seen, watch = Seen(model), StatsRecorder()
    step(model, BlockEngine(policy=policy), watch=watch)
    found = watch.reading
    assert found.largest == {BlockStats(i, "tokens"): value for i, value in seen.largest.items()}, (
        "nothing that is passed on"
    )
    assert len(seen.largest) == 3 and set(found.not_finite.values()) == {0}
    assert found.underflow == 0.0 and found.worst == ""


def test_evaluations_are_not_looked_at():
    model, watch = make_model(TOY, ARCH), StatsRecorder()
    with torch.no_grad():
        watch.post_forward(0, model.blocks()[0], (torch.ones(3),))
    assert watch.packed() == []


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_underflow_are_counted_and_the_worst_is_named(fused):
    model, watch = make_model(TOY, ARCH), StatsRecorder()
    halves = model.layers[1].out.weight, model.layers[0].qkv.bias
    freeze_key_biases(model, but=halves[1])
    halves[0].register_hook(lambda g: torch.cat([g[:12], 0 * g[12:]]))
    halves[1].register_hook(lambda g: 0 * g)  # to this one nothing comes: left out
    step(model, watch=watch, fused=fused, micro_batches=1)
    total = sum(p.numel() for p in model.parameters() if p.requires_grad) - halves[1].numel()
    assert watch.reading.underflow == pytest.approx(4 * 16 / total)
    assert watch.reading.worst == "layers.1.out.weight"


def test_at_the_first_step_of_an_adapter_nothing_underflows():
    model, _ = toy_model("lora")
    watch = StatsRecorder()
    step(model, watch=watch)
    assert watch.reading.underflow == 0.0, "B is 0, and so is the gradient of A"


def test_divided_and_streamed_models_read_the_same():
    plain, watches = make_model(TOY, ARCH), [StatsRecorder() for _ in range(3)]
    expected = step(plain, watch=watches[0], fused=True, micro_batches=1)
    model = make_model(TOY, ARCH)
    swap = stream(model, 1, trained=True)
    assert (
        step(model, BlockEngine(hooks=(swap,)), watch=watches[1], fused=True, micro_batches=1)
        == expected
    )
    with PretendDevices():
        model = make_model(TOY, ARCH)
        places = [torch.device("cpu"), torch.device("cpu:1"), torch.device("cpu:1")]
        for block, device in zip(model.blocks(), places, strict=True):
            move_to(block, device)
        move_to(model.head, torch.device("cpu:1"))
        assert step(model, watch=watches[2], fused=True, micro_batches=1) == expected
    assert watches[0].reading == watches[1].reading == watches[2].reading


# That it changes nothing


@pytest.mark.parametrize("policy", daily(POLICIES, "none", "full"))
def test_a_watched_run_is_the_same_bitwise(policy, tmp_path, monkeypatch):
    runs = {}
    monkeypatch.setattr("toy_training.BlockEngine", lambda: BlockEngine(policy=policy))
    for every in (0, 2):
        config = TrainConfig(steps=3, batch_size=2, accumulation=2, seed=5, sentinels=every)
        runs[every] = toy_run(tmp_path / str(every), 3, config=config, held_out_clips=CLIPS)
    assert numbers(tmp_path / "0") == numbers(tmp_path / "2")
    assert all(
        torch.equal(value, runs[2].parameters[name]) for name, value in runs[0].parameters.items()
    )
    lines = [
        json.loads(line) for line in (tmp_path / "2" / "metrics.jsonl").read_text().splitlines()
    ]
    seen = [line for line in lines if "activation_max" in line]
    assert [line["step"] for line in seen] == [1, 2] and not any("loss" in line for line in seen)
    assert seen[0]["activation_drift"] == 1.0 and 0 < seen[1]["activation_drift"] < 10
    assert all(line["nonfinite"] == 0 and line["activation_max_block"] in (0, 1) for line in seen)
    assert "activation_max" not in (tmp_path / "0" / "metrics.jsonl").read_text()


def test_a_run_that_goes_on_compares_with_its_beginning(tmp_path):
    config = {"batch_size": 2, "accumulation": 2, "seed": 5, "sentinels": 2}
    whole = toy_run(tmp_path / "whole", 4, config=TrainConfig(steps=4, **config))
    toy_run(tmp_path / "halves", 3, config=TrainConfig(steps=3, **config))
    toy_run(tmp_path / "halves", 4, config=TrainConfig(steps=4, **config))
    texts = [
        (tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "halves")
    ]
    seen = [[line for line in text if "activation_drift" in line] for text in texts]
    assert seen[0] == seen[1] and len(seen[0]) == 3 and whole.result.finished


def reading(*largest, not_finite=0):
    made = {BlockStats(i, "tokens"): value for i, value in enumerate(largest)}
    return StepStats(
        largest=made, not_finite=dict.fromkeys(made, not_finite), underflow=0.25, worst="a.weight"
    )


def test_drift_is_said_once_and_names_the_first_block():
    said = []
    drift = DriftMonitor(65504.0, said.append)
    assert drift.take(1, reading(2.0, 4.0, 8.0))["activation_drift"] == 1.0
    found = drift.take(51, reading(3.0, 41.0, 80.1))
    assert found == {
        "grad_underflow": 0.25, "grad_underflow_worst": "a.weight", "activation_max": 80.1,
        "activation_max_block": 2,
        "activation_drift": 10.25, "nonfinite": 0,
    }  # fmt: skip
    assert len(said) == 1
    assert said[0].startswith(
        "step 51: tokens of block 1: the largest activation is 41, 10.2 times its first 4"
    )
    drift.take(101, reading(30.0, 500.0, 900.0))
    assert len(said) == 1
    drift.take(151, reading(3.0, 33000.0, 80.0))
    assert len(said) == 2 and "block 1" in said[1] and "65504" in said[1]
    drift.take(201, reading(3.0, 4.0, 8.0, not_finite=5))
    assert len(said) == 3 and "5 activations are not finite" in said[2]


def test_a_negative_schedule_is_refused():
    with pytest.raises(UserError, match="train.sentinels = -1 must be"):
        TrainConfig(sentinels=-1)


# A step that went wrong


def failure(model, run=None, **given):
    with pytest.raises(NonFiniteLoss) as error:
        step(model, run, **given)
    assert json.loads(json.dumps(error.value.evidence, allow_nan=False)) == error.value.evidence
    return error.value


def engine_of(kind, model):
    if kind != "streamed":
        return BlockEngine(policy=kind)
    return BlockEngine(hooks=(stream(model, 1),))


KINDS = [*POLICIES, "streamed"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_poisoned_weight_is_named_with_its_block_its_layer_and_the_samples(kind):
    model = make_model(TOY, ARCH, adapter=ADAPTER)
    base = dict(model.named_parameters())["layers.1.mlp.0.base_layer.weight"]
    base.data[3, 5] = NAN
    error = failure(model, engine_of(kind, model))
    where = error.evidence["where"]
    assert (where["stage"], where["module"], where["pass"]) == (
        "block 1",
        "layers.1.mlp.0",
        "forward",
    )
    assert where["weights"] == ["layers.1.mlp.0.weight"]
    assert (where["micro_batch"], where["ids"]) == (0, ["clip 0", "clip 1"])
    assert "(first in block 1 at layers.1.mlp.0, aten." in str(error)
    assert str(error).endswith(
        "where layers.1.mlp.0.weight is not finite itself; samples clip 0, clip 1)"
    )


@pytest.mark.parametrize("kind", daily(KINDS, "none", "streamed"))
def test_an_overflow_from_finite_weights_is_named(kind):
    model = make_model(TOY, ARCH, dtype=torch.bfloat16, adapter=ADAPTER)
    weights = dict(model.named_parameters())
    weights["layers.1.mlp.0.base_layer.weight"].data.fill_(1e38)
    weights["layers.1.mlp.0.base_layer.bias"].data.fill_(3e38)
    where = failure(model, engine_of(kind, model)).evidence["where"]
    assert (where["stage"], where["module"], where["weights"]) == ("block 1", "layers.1.mlp.0", [])


@pytest.mark.parametrize("kind", daily(KINDS, "full", "streamed"))
def test_a_gradient_that_is_not_finite_is_named(kind):
    model = make_model(TOY, ARCH, adapter=ADAPTER)

    class Overflows(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * INF

    model.layers[1].mlp[1].register_forward_hook(lambda module, args, out: Overflows.apply(out))
    error = failure(model, engine_of(kind, model))
    where = error.evidence["where"]
    assert where["pass"] == "backward" and where["stage"] == "block 1" and where["weights"] == []
    assert where["module"] in ("layers.1.mlp.1", "layers.1.mlp.2"), (
        "at the module, or between it and the next"
    )
    assert error.evidence["first_parameters_with_non_finite_gradients"]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_sample_that_is_not_finite_is_not_the_models_fault():
    model, items = make_model(TOY, ARCH), toy_items(2)
    items[1]["latents"][0, 0, 0, 0] = INF
    optimizer = NamedOptimizer(trainable_parameters(model), OptimConfig())
    with pytest.raises(
        NonFiniteLoss, match=r"\(first in inputs, aten.mul in the forward; samples clip 1\)"
    ):
        training_step(
            Model(model, BlockEngine(), TOY),
            [ToyBatch(["clip 0", "clip 1"], items)],
            optimizer,
            StepContext(step=3, seed=1, flow=FLOW),
            lr=1e-3,
            clip_norm=0.0,
        )


def test_the_head_and_a_divided_model_are_named_too():
    with PretendDevices():
        model = make_model(TOY, ARCH)
        for part in (*model.blocks()[1:], model.head):
            move_to(part, torch.device("cpu:1"))
        with torch.no_grad():
            model.head.out.bias.fill_(INF)
        where = failure(model).evidence["where"]
        assert (where["stage"], where["module"], where["weights"]) == (
            "head",
            "head.out",
            ["head.out.bias"],
        )


def test_an_adapter_that_breaks_after_some_steps_is_named(tmp_path, monkeypatch):
    class Breaking(Callback):
        def after_step(self, step, metrics):
            if step == 2:
                dict(model.named_parameters())["layers.0.qkv.lora_B.default.weight"].data[0, 0] = (
                    NAN
                )

    model, _ = made = toy_model("lora")
    monkeypatch.setattr("toy_training.toy_model", lambda *args, **given: made)
    with pytest.raises(
        UserError, match=r"step 2 is not finite \(first in block 0 at layers.0.qkv.*evidence is in"
    ):
        toy_run(tmp_path, 5, method="lora", dropout=0.0, callbacks=[Breaking()])
    (file,) = tmp_path.glob("failure-step-*.json")
    found = json.loads(file.read_text())["where"]
    assert found["weights"] == ["layers.0.qkv.lora_B.weight"] and found["pass"] == "forward"
