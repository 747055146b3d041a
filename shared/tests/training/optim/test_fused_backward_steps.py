"""The optimizer's step in the backward with clipping and accumulation: the numbers of the ordinary
loop, resident or streamed."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from saved_states import CLIPS, assert_same_state, numbers
from state_buffers import state_buffers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy_training import ToyBatch, ToyData, train

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.testing.combinations import daily, every_value
from ditkit_core.testing.conformance_swap import Watched, stream
from ditkit_core.testing.pretend_devices import PretendDevices, move_to, on_host
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import make_model
from ditkit_core.training.config import (
    EMAConfig,
    FlowConfig,
    HeldOutConfig,
    SaveConfig,
    TrainConfig,
)
from ditkit_core.training.losses import NonFiniteLoss
from ditkit_core.training.metrics import LogConfig
from ditkit_core.training.optim.clipping import Clipping
from ditkit_core.training.optim.fused_backward import OptimizerInBackward
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_state import TrainState
from ditkit_core.training.train_step import StepContext, training_step

ARCH = ToyArch(depth=3, dim=64, dropout=0.1)
DIVIDED = replace(ARCH, depth=4)
"""Two blocks on a device, of which one is streamed."""
CLIP = 0.05
"""Below every norm here, so that clipping changes numbers."""
BF16 = {"dtype": torch.bfloat16}


def steps(
    optim,
    *,
    streams=False,
    micro_batches=1,
    clip_by="step",
    clip_norm=CLIP,
    devices=None,
    dtype=torch.float32,
    num_steps=2,
    arch=ARCH,
):
    """What some steps report, and everything after them, on the host."""
    model = make_model(TOY, arch, dtype=dtype)
    if devices:
        move_to(model.embed, devices[0])
        move_to(model.head, devices[-1])
    swap = stream(model, devices=devices, trained=True) if streams else None
    trained = TrainState(model, trainable_parameters(model), optim, EMAConfig(), swap)
    run = Model(model, BlockEngine(hooks=() if swap is None else (swap,)), TOY)
    reported = []
    for step in range(num_steps):
        batches = [
            ToyBatch(
                [f"{micro} {i}" for i in range(2)], toy_items(2 * micro_batches)[2 * micro :][:2]
            )
            for micro in range(micro_batches)
        ]
        context = StepContext(
            step=step, seed=1, flow=FlowConfig(), clip_by=clip_by, last_norm=trained.last_norm
        )
        result = training_step(
            run, batches, trained.optimizer, context, lr=1e-2, clip_norm=clip_norm
        )
        trained.last_norm = result.grad_norm
        reported.append(result)
    trained.optimizer.zero_grad()
    groups = trained.state_dict().tensors
    return reported, {
        f"{group} {name}": on_host(t) for group, own in groups.items() for name, t in own.items()
    }


def assert_same(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert [name for name, value in one[1].items() if not torch.equal(value, other[1][name])] == []


@cache
def ordinary_steps(optim, **given):
    """Steps that several tests compare with."""
    return steps(optim, **given)


FUSED = OptimConfig(lr=1e-2, fused_backward=True)


STEPS = {
    "last step": (FUSED, {"clip_by": "last_step"}),
    "block": (FUSED, {"clip_by": "block"}),
    "accumulation": (FUSED, {"micro_batches": 3, "clip_norm": 0.0}),
    "split": (
        replace(FUSED, rounding="split"),
        {"clip_by": "block", "micro_batches": 2, **BF16},
    ),
    "stochastic": (
        replace(FUSED, rounding="stochastic", name="adafactor"),
        {"clip_by": "last_step", "micro_batches": 2, **BF16},
    ),
    "muon": (replace(FUSED, name="muon"), {"clip_by": "block", "micro_batches": 3}),
}


@pytest.mark.parametrize(
    "name",
    [f"{name}-True" for name in STEPS]
    + daily([f"{name}-False" for name in STEPS], "block-False", "stochastic-False"),
)
def test_a_step_is_that_of_the_ordinary_loop_bitwise(name):
    """Streamed, and of some daily resident, which runs of every optimizer are too."""
    kind, _, streams = name.partition("-")
    optim, given = STEPS[kind]
    expected = ordinary_steps(replace(optim, fused_backward=False), **given)
    assert_same(steps(optim, streams=streams == "True", **given), expected)


def test_streamed_blocks_of_two_devices_sum_and_clip_bitwise():
    one, two = torch.device("cpu:1"), torch.device("cpu:2")
    given = {"clip_by": "block", "micro_batches": 2, "arch": DIVIDED}
    with PretendDevices():
        divided = steps(FUSED, streams=True, devices=[one, one, two, two], **given)
    assert_same(divided, steps(replace(FUSED, fused_backward=False), **given))


class Copied(TorchDispatchMode):
    """Counts bytes that are copied between the buffers of streamed blocks, by what they are and
    whether they come to the device."""

    def __init__(self, swap):
        super().__init__()
        (queue,) = swap._queues.values()
        self.bytes, self._of = Counter(), {}
        kinds = {
            "weights": [queue.blocks.values()],
            "state": queue.states.values(),
            "sums": queue.sums.values(),
        }
        for kind, parts in kinds.items():
            for part in itertools.chain.from_iterable(parts):
                self._of[part.buffer.untyped_storage()._cdata] = f"{kind} come"
                self._of[part.host.untyped_storage()._cdata] = f"{kind} return"
        self.size = {
            kind: sum(part.num_bytes for each in parts for part in each)
            for kind, parts in kinds.items()
        }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        storage = args[0].untyped_storage()._cdata if func is torch.ops.aten.copy_.default else 0
        if storage in self._of and args[1].dtype == torch.uint8:
            self.bytes[self._of[storage]] += args[0].nbytes
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_only_the_last_backward_of_a_step_moves_optimizer_state_and_returns_weights(micro_batches):
    """Those before it return sums of gradients; the first brings none. The buffers of the last two
    blocks stay after a forward."""
    model = make_model(TOY, ARCH)
    swap = stream(model, trained=True)
    trained = TrainState(model, trainable_parameters(model), FUSED, EMAConfig(), swap)
    run = Model(model, BlockEngine(hooks=(swap,)), TOY)
    batches = [ToyBatch([f"{micro}"], toy_items(4)[micro:][:1]) for micro in range(micro_batches)]
    for step in range(2):
        copied = Copied(swap)
        with copied:
            context = StepContext(step=step, seed=1, flow=FlowConfig())
            training_step(run, batches, trained.optimizer, context, lr=1e-2, clip_norm=0.0)
    size, before = copied.size, micro_batches - 1
    assert size["state"] > size["weights"] > 0 and bool(size["sums"]) == bool(before)
    assert copied.bytes == Counter(
        {
            "weights come": micro_batches * size["weights"] * 4 // 3,
            "weights return": size["weights"],
            "state come": size["state"],
            "state return": size["state"],
            "sums come": before * size["sums"],
            "sums return": before * size["sums"],
        }
    )


@pytest.mark.parametrize(
    ("name", "rounding"),
    every_value(
        ["adamw", "adafactor", "muon", "schedulefree_adamw"], ["nearest", "stochastic", "split"]
    ),
)
def test_every_optimizer_leaves_weights_as_they_were_where_a_gradient_is_not_finite(name, rounding):
    """Those of the gradient and of all after it, with updates before it that count, whatever dtype
    the weights have."""
    if name == "schedulefree_adamw":
        pytest.importorskip("schedulefree")
        if rounding != "nearest":
            return  # refused
    model = make_model(
        TOY, ToyArch(dim=16), dtype=torch.float32 if rounding == "nearest" else torch.bfloat16
    )
    parameters = trainable_parameters(model)
    matrices = {
        each for each, p in parameters.items() if each.startswith("layers.") and p.ndim == 2
    }
    config = OptimConfig(name=name, lr=3e-3, fused_backward=True, rounding=rounding)
    optimizer = NamedOptimizer(parameters, config, matrices=matrices)

    def step(number):
        run, batch = Model(model, BlockEngine(), TOY), ToyBatch(["a", "b"], toy_items(2))
        context = StepContext(step=number, seed=1, flow=FlowConfig())
        training_step(run, [batch], optimizer, context, lr=1e-2, clip_norm=0.0)

    step(0)
    before = {each: p.detach().clone() for each, p in parameters.items()}
    rests = {each: optimizer.state_of(each).get("rounding_rest") for each in parameters}
    rests = {each: rest.clone() for each, rest in rests.items() if rest is not None}
    model.layers[1].out.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(NonFiniteLoss):
        step(1)
    changed = {each for each, p in parameters.items() if not torch.equal(p, before[each])}
    assert "head.out.weight" in changed and "layers.1.out.weight" not in changed
    assert not any(each.startswith(("layers.0.", "embed.")) for each in changed)
    assert bool(rests) == (rounding == "split")
    for each in rests.keys() - changed:
        assert torch.equal(optimizer.state_of(each)["rounding_rest"], rests[each])


def test_each_way_of_clipping_is_its_own():
    # AdamW hardly depends on the gradients' scale
    plain = replace(FUSED, fused_backward=False, name="adafactor")
    ways = ("step", "last_step", "block")
    clipped = [steps(plain, clip_by=way, num_steps=3)[0] for way in ways]
    whole = [steps(plain, clip_by=way, clip_norm=0.0, num_steps=3)[0] for way in ways]
    assert whole[0] == whole[1] == whole[2]
    for way, reported in zip(ways, clipped, strict=True):
        assert reported[0] == whole[0][0], f"what {way} reports is from before clipping"
    lasts = [reported[2] for reported in (*clipped, whole[0])]
    assert all(one != other for one, other in itertools.combinations(lasts, 2))


def test_a_blocks_gradients_are_limited_by_their_own_norm_and_the_last_norm_limits_all():
    first, second, third = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    first.grad, second.grad, third.grad = (
        torch.tensor([3.0, 0]),
        torch.tensor([0, 4.0]),
        torch.tensor([0.1, 0]),
    )
    parameters = {"a": first, "b": second, "c": third}
    block = Clipping(max_norm=1.0, by="block", stage_of={"a": 0, "b": 0, "c": 1})
    block.apply(parameters, torch.tensor(5.0))
    torch.testing.assert_close(first.grad, torch.tensor([0.6, 0]))
    torch.testing.assert_close(second.grad, torch.tensor([0, 0.8]))
    assert torch.equal(third.grad, torch.tensor([0.1, 0]))
    Clipping(max_norm=1.0, by="last_step", last_norm=10.0).apply(parameters, torch.tensor(1.0))
    torch.testing.assert_close(first.grad, torch.tensor([0.06, 0]))
    before = first.grad.clone()
    Clipping(max_norm=1.0, by="last_step").apply(parameters, torch.tensor(9.0))
    assert torch.equal(first.grad, before), "the first step has no norm before it"


def run(folder, num_steps, *, fused, clip_by, one_of=None, accumulation=2):
    model = make_model(TOY, ARCH)
    swap = stream(model, one_of, trained=True) if one_of else None

    class Accumulated(ToyData):
        def micro_batches(self, index):
            return [self.micro_batch(accumulation * index + micro) for micro in range(accumulation)]

    toy = Model(
        model,
        BlockEngine(hooks=() if swap is None else (swap,)),
        TOY,
        trainable_parameters(model),
        swap,
    )
    return train(
        toy,
        Accumulated(),
        folder=folder,
        config=TrainConfig(
            steps=num_steps,
            batch_size=2,
            clip_norm=CLIP,
            clip_by=clip_by,
            accumulation=accumulation,
            seed=5,
        ),
        optim=OptimConfig(name="adafactor", lr=3e-3, fused_backward=fused),
        ema=EMAConfig(decay=0.9),
        save=SaveConfig(every_steps=2),
        held_out=HeldOutConfig(sigmas=(0.5,)),
        held_out_clips=CLIPS,
        log=LogConfig(tensorboard=False),
        flow=FlowConfig(),
    )


@pytest.mark.parametrize("clip_by", ["last_step", "block"])
def test_a_run_goes_on_streamed_or_not_bitwise(clip_by, tmp_path):
    """The norm of the last step is part of a save: the step after it is clipped as in a run that
    was never stopped."""
    whole = run(tmp_path / "whole", 3, fused=False, clip_by=clip_by)
    run(tmp_path / "halves", 2, fused=True, clip_by=clip_by, one_of=1)
    halves = run(tmp_path / "halves", 3, fused=True, clip_by=clip_by, one_of=2)
    assert_same_state(whole.save, halves.save)
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "halves")


class Two(nn.Module):
    """Two weights, of which a micro-batch may use one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 2.0))


def test_a_weight_that_only_the_first_micro_batch_uses_is_updated_too():
    found = []
    for fused in (False, True):
        model = Two()
        optimizer = NamedOptimizer(
            dict(model.named_parameters()), replace(FUSED, fused_backward=fused)
        )
        losses = [
            lambda model=model: (model.a * model.b).sum(),
            lambda model=model: model.a.square().sum(),
        ]
        if fused:
            clipping = Clipping(max_norm=0.1, by="block", stage_of={"a": 0, "b": 0})
            with OptimizerInBackward(optimizer, 0.1, micro_batches=2, clipping=clipping) as updates:
                for loss in losses:
                    updates.begin_backward()
                    loss().backward()
            assert sorted(updates.updated) == ["a", "b"]
        else:
            for loss in losses:
                loss().backward()
            norm = torch.linalg.vector_norm(torch.cat([model.a.grad, model.b.grad]))
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
            optimizer.step(0.1)
        found.append([model.a.detach(), model.b.detach()])
    torch.testing.assert_close(found[0], found[1])  # the norm of norms may differ in its last bit


def test_such_a_weight_is_refused_where_it_is_streamed():
    model = Two()
    optimizer = NamedOptimizer(dict(model.named_parameters()), FUSED)
    optimizer.streamed = {"b"}
    with pytest.raises(UserError, match="b is streamed .* set train.accumulation = 1"):  # noqa: SIM117
        with OptimizerInBackward(optimizer, 0.1, micro_batches=2) as updates:
            for loss in ((model.a * model.b).sum(), model.a.sum()):
                updates.begin_backward()
                loss.backward()


def test_sums_of_resident_weights_are_freed_with_the_step_and_none_is_saved():
    model = make_model(TOY, ARCH)
    trained = TrainState(model, trainable_parameters(model), FUSED, EMAConfig())
    batches = [ToyBatch([f"{i}"], toy_items(2)[i:][:1]) for i in range(2)]
    training_step(
        Model(model, BlockEngine(), TOY), batches, trained.optimizer, StepContext(step=0, seed=1,
        flow=FlowConfig()),
        lr=0.01, clip_norm=0.0,
    )  # fmt: skip
    assert all(trained.optimizer.sum_of(name) for name in trained.parameters)
    trained.optimizer.zero_grad()
    assert not any(trained.optimizer.sum_of(name) for name in trained.parameters)
    assert not any("gradient_sum" in name for name in trained.state_dict().tensors["optimizer"])


EIGHT_BITS = replace(FUSED, name="adamw8bit")


def check_eight_bits_streamed():
    pytest.importorskip("torchao")
    given = {"clip_by": "block", "micro_batches": 2, "dtype": torch.bfloat16}
    optim = replace(EIGHT_BITS, rounding="stochastic")
    plain = steps(replace(optim, fused_backward=False), **given)
    assert any("|exp_avg|codes" in name for name in plain[1])
    assert_same(steps(optim, streams=True, **given), plain)


@pytest.mark.slow
def test_eight_bit_states_are_streamed_bitwise():
    with torch.compiler.set_stance("force_eager"):
        check_eight_bits_streamed()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_eight_bit_steps_are_streamed_bitwise():
    check_eight_bits_streamed()


def test_eight_bit_states_leave_their_device_and_a_save_is_loaded_where_they_are_streamed(tmp_path):
    pytest.importorskip("torchao")
    model = make_model(TOY, ARCH)
    with torch.compiler.set_stance("force_eager"):
        swap = stream(model, trained=True)
        trained = TrainState(model, trainable_parameters(model), EIGHT_BITS, EMAConfig(), swap)
        run = Model(model, BlockEngine(hooks=(swap,)), TOY)

        def step(number):
            context = StepContext(step=number, seed=1, flow=FlowConfig())
            with Watched(swap) as watch:
                training_step(
                    run,
                    [ToyBatch(["a"], toy_items(1))],
                    trained.optimizer,
                    context,
                    lr=0.01,
                    clip_norm=0.0,
                )
            assert watch.most == 2 and not any(
                each.untyped_storage().nbytes() for each in state_buffers(swap)
            )

        step(0)
        step(1)
        state = trained.state_dict()
        copied = {
            group: {name: value.detach().clone() for name, value in own.items()}
            for group, own in state.tensors.items()
        }
        step(2)
        after = {
            name: value.clone() for name, value in trained.state_dict().tensors["trainable"].items()
        }
        trained.load_state_dict(replace(state, tensors=copied), tmp_path)
        step(2)
    again = trained.state_dict().tensors["trainable"]
    assert [name for name, value in after.items() if not torch.equal(value, again[name])] == []
