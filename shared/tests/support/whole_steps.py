"""Plans of divided toys, compared with whole steps on fake tensors."""

import gc
from collections.abc import Collection, Sequence
from contextlib import nullcontext

import pytest
import torch
from state_buffers import state_buffers
from torch import nn
from toy_jobs import ARCH

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.block_swap import BlockSwap
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.engine.placement import Placement
from ditkit_core.execution import Execution
from ditkit_core.loading.model import Model
from ditkit_core.planner.memory import Partition, Profile
from ditkit_core.planner.memory_tracker import fake_tensors
from ditkit_core.planner.planned_step import StepJob as Job
from ditkit_core.planner.profiler import profile
from ditkit_core.planner.reduced_model import materialise, reduced_model
from ditkit_core.planner.workload import Workload
from ditkit_core.testing.plans import divided, planned
from ditkit_core.training.optim.clipping import Clipping, stages_of, total_norm
from ditkit_core.training.optim.fused_backward import OptimizerInBackward
from ditkit_core.training.train_state import TrainState
from ditkit_core.training.train_step import StepContext, accumulate_gradients, update

HOST = torch.device("cpu")


DEPTH = ARCH.depth


TOLERANCE = 0.02


def to_host(block: nn.Module, *, trained: bool) -> None:
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and (trained or not parameter.requires_grad):
                there = torch.empty(parameter.shape, dtype=parameter.dtype, device=HOST)
                module._parameters[name] = nn.Parameter(
                    there, requires_grad=parameter.requires_grad
                )


def held(of: Job, division: Partition, *, pipelined: bool = False) -> list[int]:
    """The highest of each device in the second step of a training: every block is there, and is
    streamed if it is to be."""
    full = of.adapter.method == "full"
    reduced = reduced_model(of, of_each=None)
    model = reduced.full_model
    names = {id(module): name for name, module in model.named_modules()}
    devices = [torch.device("cpu", 1 + index) for index in range(1 + max(division.devices))]
    blocks = tuple(devices[index] for index in division.devices)
    with fake_tensors(of.kind) as meter:
        for stage, device in zip(
            (model.embed, *model.blocks(), model.head), (devices[0], *blocks, devices[-1])
        ):
            materialise(stage, names[id(stage)], of.spec, dtype=of.precision.matmul, device=device)
        for index in division.streamed:
            to_host(model.blocks()[index], trained=full)
        swap = None
        if division.streamed:
            placement = Placement(
                embed=devices[0], blocks=blocks, head=devices[-1], streamed=division.streamed
            )
            swap = BlockSwap(model, placement, trained=full)
        trained = TrainState(model, trainable_parameters(model), of.optim, of.ema, swap)
        items = [
            {name: torch.empty(x.shape, dtype=x.dtype, device=HOST) for name, x in item.items()}
            for item in of.batch
        ]
        batches = [
            Batch(ids=[f"{micro} {i}" for i in range(len(items))], items=items)
            for micro in range(of.micro_batches)
        ]
        fused = of.optim.fused_backward
        hooks = () if swap is None else (swap,)
        engine = BlockEngine(
            policy=of.schedule, kernels=of.kernels, hooks=hooks, router=reduced.router
        )
        stage_of = stages_of(model, trained.optimizer.parameters)
        clipping = Clipping(
            max_norm=of.clip_norm, by=of.clip_by, last_norm=2 * of.clip_norm, stage_of=stage_of
        )
        for step in range(2):
            for buffer in () if swap is None else (*swap.buffers, *state_buffers(swap)):
                meter.watch(buffer)
            gc.collect()
            meter.poll()
            meter.restart_peak()
            meter.is_updating = fused
            given = {"readable": False, "clipping": clipping, "micro_batches": of.micro_batches}
            updates = OptimizerInBackward(trained.optimizer, of.optim.lr, **given)
            with updates if fused else nullcontext():
                accumulate_gradients(
                    Model(model, engine, of.spec),
                    batches,
                    StepContext(step=step, seed=0, flow=of.flow, pipelined=pipelined),
                    before_backward=lambda losses, updates=updates: updates.begin_backward(),
                )
            meter.is_updating = True
            if not fused:
                if of.kind == "cuda":
                    for group in (
                        group for part in trained.optimizer.parts for group in part.param_groups
                    ):
                        group["foreach"] = True
                norm = total_norm(list(trained.optimizer.gradients().values()))
                update(trained.optimizer, norm, lr=of.optim.lr, clipping=clipping)
            meter.is_updating = False
            trained.optimizer.zero_grad()
            trained.average.update(step + 1)
        meter.poll()
        return [meter.peak[device] for device in devices]


def agree(
    of: Job, cuts: Sequence[int], streamed: Collection[int] = (), *, pipelined: bool = False
) -> Profile:
    """Hold the plan against the step; returns the profile that the plan is made of."""
    division = divided(of.arch.depth, cuts, streamed)
    found = profile(of)
    work = Workload(micro_batches=of.micro_batches, execution=Execution(pipelined=pipelined))
    plans = planned(found, division, work)
    plan, truth = [each.peak for each in plans], held(of, division, pipelined=pipelined)
    for device, (one, other) in enumerate(zip(plan, truth, strict=True)):
        assert one == pytest.approx(other, rel=TOLERANCE), (device, plan, truth)
    return found
