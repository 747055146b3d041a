"""Writing fp32 results into bf16 weights: no bias, the same bits everywhere, and a full fine-tune
in bf16 that learns."""

from functools import cache

import pytest
import torch
from saved_states import CLIPS, assert_same_state, numbers
from torch import nn
from toy_jobs import toy_job
from toy_training import ToyBatch, ToyData, train
from toy_world import World
from whole_steps import agree

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.io.rng import seed_of
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import Precision
from ditkit_core.nn.stochastic_rounding import joined, random_bits, write_split, write_stochastic
from ditkit_core.testing.conformance_swap import stream
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import make_model
from ditkit_core.training.checkpoint import load_state
from ditkit_core.training.config import (
    EMAConfig,
    FlowConfig,
    HeldOutConfig,
    SaveConfig,
    TrainConfig,
)
from ditkit_core.training.metrics import LogConfig
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_state import TrainState
from ditkit_core.training.train_step import StepContext, training_step

BF16 = torch.bfloat16
ROUNDINGS = ["stochastic", "split"]


def mix(word):
    """The finalizer in Python's integers."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
        word = (word ^ word >> shift) * factor & 0xFFFFFFFF
    return word


def test_the_bits_are_those_of_integers_of_any_size():
    key, count, start = 0xFEDC_BA98_8765_4321, 7, 2**31 - 40
    words = [mix(mix((start + i) ^ (key & 0xFFFFFFFF)) ^ (key >> 32)) for i in range(4)]
    expected = [word & 0xFFFF for word in words] + [word >> 16 for word in words][:3]
    assert random_bits(count, key, "cpu", start=start).tolist() == expected


def test_the_bits_are_uniform_and_unrelated_between_keys_and_places():
    keys = [seed_of(0, "rounding", *which) for which in ((0, "a"), (0, "b"), (1, "a"), (1, "b"))]
    drawn = torch.stack([random_bits(2**20, key, "cpu") for key in keys]).double()
    assert (drawn.mean(1) - 32767.5).abs().max() < 4 * 18918 / 2**10
    for row in drawn:
        counts = torch.bincount((row / 256).long(), minlength=256).double()
        assert float(((counts - 4096).square() / 4096).sum()) < 255 + 5 * (2 * 255) ** 0.5
    related = torch.corrcoef(
        torch.cat([drawn, drawn[:1].roll(1), drawn[:1].roll(2**19)])
    ) - torch.eye(6)
    assert related.abs().max() < 5 / 2**10


def test_the_mean_of_what_is_written_is_the_value():
    torch.manual_seed(0)
    values = torch.randn(64) * torch.logspace(-30, 30, 64)
    weight, count = torch.empty(64, 4096, dtype=BF16), 4096
    write_stochastic(weight, values[:, None].repeat(1, count), key=5)
    low, high = weight.double().min(1).values, weight.double().max(1).values
    spacing = (high - low).clamp_min(torch.finfo(torch.float32).tiny)
    assert ((weight.double() == low[:, None]) | (weight.double() == high[:, None])).all(), (
        "its two neighbours alone"
    )
    assert (high - low <= values.double().abs() / 128 * 1.001).all()
    error = (weight.double().mean(1) - values.double()) / spacing
    assert error.abs().max() < 4.5 * 0.5 / count**0.5
    nearest = (values.to(BF16).double() - values.double()) / spacing
    assert nearest.abs().max() > 0.3, "which rounding to nearest fails"


def test_values_that_bf16_has_stay_and_what_is_not_finite_stays_so():
    exact = torch.tensor(
        [0.0, -0.0, 1.0, -3.140625, 2.0**-126, -(2.0**127), float("inf"), float("-inf")]
    )
    weight = torch.empty(8, dtype=BF16)
    for key in range(50):
        write_stochastic(weight, exact.clone(), key)
        assert torch.equal(weight.float(), exact)
    # CUDA's NaN has all bits set: a carry would make a zero of it
    nan = torch.full((64,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    weight = torch.empty(64, dtype=BF16)
    write_stochastic(weight, nan, 1)
    assert weight.isnan().all()


def test_a_tensor_written_in_parts_has_different_bits_in_each(monkeypatch):
    monkeypatch.setattr("ditkit_core.nn.stochastic_rounding._AT_ONCE", 1000)
    weight = torch.empty(50, 61, dtype=BF16)  # several parts, the last of an odd size
    write_stochastic(weight, torch.full((50, 61), 1 + 1 / 256), 3)
    parts = weight.view(-1)[:3000].view(3, 1000)
    assert not any(torch.equal(parts[i], parts[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert weight.unique().tolist() == [1.0, 1.0078125]


def test_what_is_split_is_joined_bitwise(monkeypatch):
    monkeypatch.setattr("ditkit_core.nn.stochastic_rounding._AT_ONCE", 1000)
    random = torch.Generator().manual_seed(0)
    values = (
        torch.randint(-(2**31), 2**31, (64, 101), generator=random)
        .to(torch.int32)
        .view(torch.float32)
    )
    values[0, :6] = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), torch.finfo(torch.float32).max, 1 + 1 / 256]
    )
    # not contiguous
    weight, rest = (torch.empty(101, 64, dtype=BF16).T, torch.empty(64, 101, dtype=torch.int16))
    write_split(weight, values.clone(), rest)
    again, known = joined(weight, rest), ~values.isnan()
    assert torch.equal(again.view(torch.int32)[known], values.view(torch.int32)[known])
    assert weight.isnan().equal(~known) and again.isnan().equal(~known)
    tie = values.view(torch.int32).bitwise_and(0xFFFF) == 0x8000
    assert torch.equal(weight[known & ~tie], values.to(BF16)[known & ~tie]), "to nearest"


# A full fine-tune of the toy.

ARCH = ToyArch(dim=16, depth=3, dropout=0.1)
RUN = {
    "flow": FlowConfig(weighting="bell"), "ema": EMAConfig(decay=0.9), "save": SaveConfig(),
    "held_out": HeldOutConfig(sigmas=(0.3, 0.8)), "log": LogConfig(tensorboard=False),
    "held_out_clips": CLIPS,
}  # fmt: skip


def run(folder, steps, rounding, *, name="adamw", fused=False, one_of=None, dtype=BF16):
    model = make_model(TOY, ARCH, dtype=dtype)
    swap = None if one_of is None else stream(model, one_of, trained=True)
    config = TrainConfig(
        steps=steps, batch_size=2, accumulation=1 if fused else 2, clip_norm=0.0, seed=5
    )
    optim = OptimConfig(name=name, lr=1e-4, warmup_steps=3, fused_backward=fused, rounding=rounding)
    engine = BlockEngine(hooks=() if swap is None else (swap,))
    toy = Model(model, engine, TOY, trainable_parameters(model), swap)
    return train(toy, ToyData(), config=config, optim=optim, folder=folder, **RUN)


@pytest.mark.parametrize(
    ("rounding", "name"),
    [
        ("stochastic", "adamw"),
        ("split", "adamw"),
        pytest.param("split", "muon", marks=pytest.mark.slow),
        pytest.param("stochastic", "adafactor", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_bitwise(rounding, name, tmp_path):
    whole = run(tmp_path / "whole", 4, rounding, name=name)
    run(tmp_path / "halves", 2, rounding, name=name)
    halves = run(tmp_path / "halves", 4, rounding, name=name)
    assert_same_state(whole.save, halves.save)
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "halves")
    state = load_state(whole.save).tensors
    kinds = {one: tensor.dtype for one, tensor in state["optimizer"].items()}
    kept = {one for one in kinds if one.endswith("|rounding_rest")}
    bf16 = {one for one, tensor in state["trainable"].items() if tensor.dtype == BF16}
    assert bf16 == {one for one in state["trainable"] if not TOY.precision.keep_fp32(one)}
    assert kept == ({f"{one}|rounding_rest" for one in bf16} if rounding == "split" else set())
    assert {kinds[one] for one in kept} <= {torch.int16} and {
        kinds[one] for one in kinds.keys() - kept
    } == {torch.float32}


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("one_of", [None, 1, 2])
def test_updates_in_the_backward_and_streamed_weights_are_the_same_bitwise(
    rounding, one_of, tmp_path
):
    plain = training(rounding)
    fused = training(rounding, fused=True, one_of=one_of)
    assert plain[0] == fused[0] and plain[1].keys() == fused[1].keys()
    assert all(torch.equal(value, fused[1][name]) for name, value in plain[1].items())


@cache
def training(rounding, *, fused=False, one_of=None, seed=1):
    """What two steps report, and everything after them."""
    model = make_model(TOY, ARCH, dtype=BF16)
    swap = None if one_of is None else stream(model, one_of, trained=True)
    optim = OptimConfig(fused_backward=fused, rounding=rounding)
    trained = TrainState(model, trainable_parameters(model), optim, EMAConfig(decay=0.9), swap)
    engine, reported = BlockEngine(hooks=() if swap is None else (swap,)), []
    for number in range(2):
        reported.append(
            training_step(Model(model, engine, TOY), [ToyBatch(["one", "two"], toy_items(2))],
            trained.optimizer, StepContext(step=number, seed=seed, flow=RUN["flow"]), lr=1e-4,
            clip_norm=0.0)
        )  # fmt: skip
        trained.average.update(number + 1)
    trained.optimizer.zero_grad()
    groups = trained.state_dict().tensors
    return reported, {
        f"{group} {name}": tensor.clone()
        for group, own in groups.items()
        for name, tensor in own.items()
    }


def test_streamed_runs_go_on_bitwise(tmp_path):
    whole = run(tmp_path / "whole", 4, "split", fused=True)
    run(tmp_path / "halves", 2, "split", fused=True, one_of=2)
    halves = run(tmp_path / "halves", 4, "split", fused=True, one_of=1)
    assert_same_state(whole.save, halves.save)


def test_what_is_sampled_depends_on_the_run_the_step_and_the_name():
    def written(seed, step, name):
        weight = nn.Parameter(torch.ones(4096, dtype=BF16))
        optimizer = NamedOptimizer({name: weight}, OptimConfig(lr=1e-3, rounding="stochastic"))
        optimizer.begin(seed, step)
        weight.grad = torch.ones(4096)
        optimizer.step(1e-3)
        return weight.detach()

    first = written(1, 2, "a")
    assert torch.equal(first, written(1, 2, "a")) and len(first.unique()) == 2
    assert not any(
        torch.equal(first, written(*other)) for other in ((2, 2, "a"), (1, 3, "a"), (1, 2, "b"))
    )


def test_gradients_of_micro_batches_are_summed_in_fp32():
    """Thousand small gradients after a large one, of which bf16 would keep none."""
    weight = nn.Parameter(torch.ones(8, dtype=BF16))
    optimizer = NamedOptimizer({"weight": weight}, OptimConfig(rounding="stochastic"))
    for factor in (1.0, *(1e-3 for _ in range(1000))):
        (weight * factor).sum().backward()
    assert weight.grad.dtype == torch.float32 and torch.allclose(
        weight.grad, torch.tensor(2.0), rtol=2e-3
    )
    optimizer.zero_grad()
    (weight * 1.0).sum().backward()
    assert weight.grad.dtype == torch.float32 and weight.grad.sum() == 8


def test_a_run_may_go_on_with_another_rounding(tmp_path):
    run(tmp_path / "run", 1, "split")
    result = run(tmp_path / "run", 2, "stochastic")
    assert not any(
        name.endswith("rounding_rest") for name in load_state(result.save).tensors["optimizer"]
    )
    result = run(tmp_path / "run", 3, "split")
    assert any(
        name.endswith("rounding_rest") for name in load_state(result.save).tensors["optimizer"]
    )


def test_an_exactly_fp32_run_does_not_notice(tmp_path):
    plain, other = (
        run(tmp_path / each, 2, each, dtype=torch.float32) for each in ("nearest", "stochastic")
    )
    assert_same_state(plain.save, other.save)


@pytest.mark.parametrize("name", ["prodigy", "schedulefree_adamw"])
def test_optimizers_that_update_all_at_once_are_refused(name):
    with pytest.raises(
        UserError, match=f"optim.rounding = split does not go with optim.name = {name}.*use adamw"
    ):
        OptimConfig(name=name, lr=1.0, rounding="split")


def stalled(dtype, rounding, *, steps=300):
    """Error left of a linear map that is to move by 1 % of its weights, at a rate of which bf16
    keeps few updates."""
    random = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(48, 48, generator=random).to(dtype))
    start = weight.detach().float().clone()
    target = start + 0.01 * torch.randn(48, 48, generator=random)
    optimizer = NamedOptimizer({"weight": weight}, OptimConfig(weight_decay=0.0, rounding=rounding))
    for step in range(steps):
        x = torch.randn(64, 48, generator=random)
        optimizer.zero_grad()
        optimizer.begin(0, step)
        (x @ (weight.float() - target).T).square().mean().backward()
        optimizer.step(4e-5)
    return float(
        (weight.detach().float() - target).square().mean() / (start - target).square().mean()
    )


def test_where_bf16_stalls_it_learns():
    fp32, nearest = stalled(torch.float32, "nearest"), stalled(BF16, "nearest")
    stochastic, split = stalled(BF16, "stochastic"), stalled(BF16, "split")
    assert fp32 < 0.3 and nearest > 0.7
    assert stochastic < (fp32 + nearest) / 2 and split == pytest.approx(fp32, abs=0.1)


@pytest.mark.parametrize(
    ("rounding", "fused", "streamed"),
    [
        ("stochastic", False, ()),
        ("split", False, ()),
        ("split", True, (1, 3, 5)),
    ],
)
@pytest.mark.slow
def test_the_plan_is_what_a_step_holds(rounding, fused, streamed):
    changed = {
        "precision": Precision(matmul=BF16),
        "optim": OptimConfig(rounding=rounding, fused_backward=fused),
    }
    if fused:
        changed["clip_norm"] = 0.0
    job = toy_job(
        "full", arch=ToyArch(dim=256, depth=6 if streamed else 4), size=(1, 32, 32), **changed
    )
    found = agree(job, (), streamed)
    block = found.blocks[2]
    count = block.adapters // 2
    assert block.gradients == (0 if fused else 4 * count)
    per_weight = block.optimizer / count
    assert per_weight == pytest.approx(10 if rounding == "split" else 8, rel=0.01)


def test_the_command_fine_tunes_in_bf16_and_exports(tmp_path, capsys):
    world = World(tmp_path)
    flags = ("--adapter.method", "full", "--model.dtype", "bf16", "--optim.lr", "1e-5")
    assert world.train("refused", 2, *flags) == 1
    assert "rounds most updates away; set optim.rounding to stochastic" in capsys.readouterr().err
    assert world.train("run", 2, *flags, "--optim.rounding", "stochastic") == 0
    trained = load_state(tmp_path / "run" / "state" / "step-000002").tensors["trainable"]
    assert {
        tensor.dtype for name, tensor in trained.items() if not TOY.precision.keep_fp32(name)
    } == {BF16}
    assert list((tmp_path / "run" / "exports").glob("transformer_*"))
