"""What a plan puts together from single stages, lever by lever, against whole steps of whole models on fake tensors, as the trainer runs them."""

import gc
import warnings
from collections.abc import Collection, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.block_swap import BlockSwap
from ditkit_core.engine.engine import Engine
from ditkit_core.engine.placement import Placement
from ditkit_core.nn.lora import as_on
from ditkit_core.planner.memory import Division, on_host
from ditkit_core.planner.profiler import Job, Meter, Profile, StageCost, profile
from ditkit_core.planner.reduced_model import materialise, thinned
from ditkit_core.testing.plans import divided, planned
from ditkit_core.testing.toy import ToyArch
from ditkit_core.training.ema import EMAConfig
from ditkit_core.training.optimizer import OptimConfig
from ditkit_core.training.optimizer_in_backward import Updates
from ditkit_core.training.train_state import Trained
from ditkit_core.training.train_step import accumulate_gradients, total_norm, update
from toy_jobs import ARCH, toy_job

HOST = torch.device("cpu")
DEPTH = ARCH.depth
TOLERANCE = 0.02


@contextmanager
def fake(kind: str):
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(as_on(kind))
        stack.enter_context(FakeTensorMode())
        yield stack.enter_context(Meter(kind))


def to_host(block: nn.Module, *, trained: bool) -> None:
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and (trained or not parameter.requires_grad):
                there = torch.empty(parameter.shape, dtype=parameter.dtype, device=HOST)
                module._parameters[name] = nn.Parameter(there, requires_grad=parameter.requires_grad)


def held(of: Job, division: Division, *, pipelined: bool = False) -> list[int]:
    """The highest of each device in the second step of a training: every block is there, and is streamed if it is to be."""
    full = of.adapter.method == "full"
    model = thinned(of.spec, of.arch, of.precision, of.adapter, quantize=of.quantize, of_each=None).whole
    names = {id(module): name for name, module in model.named_modules()}
    devices = [torch.device("cpu", 1 + index) for index in range(1 + max(division.devices))]
    blocks = tuple(devices[index] for index in division.devices)
    with fake(of.kind) as meter:
        for stage, device in zip((model.embed, *model.blocks(), model.head), (devices[0], *blocks, devices[-1])):
            materialise(stage, names[id(stage)], of.spec, dtype=of.precision.matmul, device=device)
        for index in division.streamed:
            to_host(model.blocks()[index], trained=full)
        swap = None
        if division.streamed:
            placement = Placement(embed=devices[0], blocks=blocks, head=devices[-1], streamed=division.streamed)
            swap = BlockSwap(model, placement, trained=full)
        trained = Trained(model, trainable_parameters(model), of.optim, of.ema, swap)
        items = [
            {name: torch.empty(x.shape, dtype=x.dtype, device=HOST) for name, x in item.items()} for item in of.batch
        ]
        batches = [
            Batch(ids=[f"{micro} {i}" for i in range(len(items))], items=items) for micro in range(of.micro_batches)
        ]
        fused = of.optim.fused_backward
        for step in range(2):
            for buffer in () if swap is None else (*swap.buffers, *swap.state_buffers):
                meter.watch(buffer)
            gc.collect()
            meter.poll()
            meter.restart_peak()
            meter.is_updating = fused
            with Updates(trained.optimizer, of.optim.lr, readable=False) if fused else nullcontext():
                accumulate_gradients(
                    model, Engine(policy=of.policy, passages=() if swap is None else (swap,)), of.spec, batches,
                    step=step, seed=0, flow=of.flow, pipelined=pipelined,
                )  # fmt: skip
            meter.is_updating = True
            if not fused:
                if of.kind == "cuda":
                    for group in (group for part in trained.optimizer.parts for group in part.param_groups):
                        group["foreach"] = True
                norm = total_norm(list(trained.optimizer.gradients().values()))
                update(trained.optimizer, norm, lr=of.optim.lr, clip_norm=of.clip_norm)
            meter.is_updating = False
            trained.optimizer.zero_grad()
            trained.average.update(step + 1)
        meter.poll()
        return [meter.peak[device] for device in devices]


def agree(of: Job, cuts: Sequence[int], streamed: Collection[int] = (), *, pipelined: bool = False) -> None:
    division = divided(DEPTH, cuts, streamed)
    plans = planned(profile(of), division, micro_batches=of.micro_batches, pipelined=pipelined)
    plan, truth = [each.peak for each in plans], held(of, division, pipelined=pipelined)
    for device, (one, other) in enumerate(zip(plan, truth, strict=True)):
        assert one == pytest.approx(other, rel=TOLERANCE), (device, plan, truth)


SMALL = {"arch": ToyArch(dim=256, depth=DEPTH), "size": (1, 32, 32)}
"""Of which a block's weights are more than what it keeps."""


# Pairs of values rather than all combinations: each case is a step of all blocks.
@pytest.mark.parametrize(
    ("policy", "cuts", "streamed"),
    [
        ("full", (3,), (1, 3, 5)),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                ("none", (), (3,)),
                ("none", (3,), range(DEPTH)),
                ("full", (), range(DEPTH)),
                ("attn_only", (), (1, 3, 5)),
                ("attn_only", (3,), (3,)),
            ]
        ),
    ],
)
def test_streamed_blocks_are_two_at_a_time(policy, cuts, streamed):
    agree(toy_job(policy=policy, **SMALL), cuts, streamed)


@pytest.mark.parametrize(
    ("policy", "optimizer", "cuts", "streamed"),
    [
        ("full", "adamw", (), (1, 3, 5)),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                ("none", "adamw", (3,), range(DEPTH)),
                ("none", "adafactor", (), (1, 3, 5)),
                ("full", "adafactor", (3,), range(DEPTH)),
                ("none", "muon", (), range(DEPTH)),
                ("full", "muon", (3,), (1, 3, 5)),
            ]
        ),
    ],
)
def test_trained_weights_are_streamed_with_what_the_optimizer_keeps(policy, optimizer, cuts, streamed):
    fused = {"optim": OptimConfig(name=optimizer, fused_backward=True), "clip_norm": 0.0}
    agree(toy_job("full", policy=policy, ema=EMAConfig(decay=0.9), **SMALL, **fused), cuts, streamed)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("method", "cuts", "pipelined", "micro_batches"),
    [
        ("lora", (), False, 2),
        ("lora", (3,), True, 3),
        ("lora", (2, 4), True, 2),
        ("lora", (2, 4), False, 3),
        ("full", (), True, 2),
        ("full", (3,), False, 3),
        ("full", (2, 4), True, 3),
    ],
)
def test_micro_batches_one_by_one_and_at_once(method, cuts, pipelined, micro_batches):
    agree(toy_job(method, policy="full", micro_batches=micro_batches), cuts, pipelined=pipelined)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("policy", "kind", "quantize"),
    [
        ("none", "cuda", "int8"),
        ("full", "cuda", "nf4"),
        ("full", "cuda", "fp8"),
        ("none", "cpu", "nf4"),
        ("full", "cpu", "int8"),
    ],
)
def test_a_quantized_weight_is_made_whole_while_it_is_multiplied(policy, kind, quantize):
    of = toy_job(policy=policy, quantize=quantize, kind=kind, **SMALL)
    agree(of, ())
    if kind == "cuda":
        agree(of, (3,), (1, 3, 5))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("cuts", "optimizer"), [((), "adamw"), ((3,), "adafactor"), ((3,), "muon")])
def test_an_update_in_the_backward_leaves_no_full_set_of_gradients(cuts, optimizer):
    fused = {"optim": OptimConfig(name=optimizer, fused_backward=True), "clip_norm": 0.0}
    agree(toy_job("full", policy="full", **SMALL, **fused), cuts)


def test_the_host_has_what_is_streamed():
    block = StageCost(weights=100, adapters=7, optimizer=14, average=7)
    nothing = (0,) * (DEPTH + 1)
    found = Profile(
        embed=StageCost(), blocks=(block,) * DEPTH, head=StageCost(), crossing=nothing, crossing_back=nothing
    )
    assert on_host(found, {1, 3}) == 200
    assert on_host(replace(found, trains_all=True), {1, 3}) == 2 * 128
