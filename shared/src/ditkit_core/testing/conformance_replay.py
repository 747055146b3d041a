"""Checks for every model that replayed micro-batches train as eager ones, bit by bit, whatever the
other levers are. Part of `Conformance`.

Replays run in the stand-in of `recorded_graph.py`, without the model's Python.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.encoding.encoded_sample import EMPTY_CAPTION_PREFIX
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.io.step_clock import StepClock
from ditkit_core.loading.model import Model
from ditkit_core.models.spec import ModelSpec
from ditkit_core.nn.quantized_layouts import LAYOUTS
from ditkit_core.testing.combinations import pairwise
from ditkit_core.testing.conformance_quantized import COMPUTED, make_quantized
from ditkit_core.testing.conformance_routing import routing_of
from ditkit_core.testing.gpu import GPUS, gpu_of
from ditkit_core.testing.pretend_devices import HOST, move_to, on_host
from ditkit_core.testing.recorded_graph import recorded_graphs
from ditkit_core.testing.world import (
    ADAPTERS,
    DTYPES,
    Items,
    ModelChecks,
    differing,
    make_model,
    masked,
)
from ditkit_core.training.config import EMAConfig, FlowConfig
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.replay import ReplayedMicroBatches
from ditkit_core.training.tensor_stats import StatsRecorder
from ditkit_core.training.train_state import TrainState
from ditkit_core.training.train_step import StepContext, StepResult, training_step

STEPS = 4
"""One is eager, one recorded and replayed, one runs eagerly next to the graphs, one is replayed."""
LEVERS: Mapping[str, Sequence[Any]] = {
    "policy": POLICIES,
    "dtype": tuple(DTYPES),
    "masks": (False, True),
    "accumulation": (1, 3),
    "average": (0.0, 0.9),
    "target": ("velocity", "base", "guided"),
}
"""What is around the layers, by lever."""
_LAYERS = tuple(zip(ADAPTERS, ("none", *LAYOUTS, *COMPUTED), strict=True))
"""Adapter, and what is quantized below it. Training a quantized base itself is refused."""


def _layers_of(index: int, target: str) -> tuple[str, str]:
    """Adapter and base of a case: each in turn, but that a full fine-tune has no base to match."""
    layers = _LAYERS[index % len(_LAYERS)]
    return _LAYERS[1] if target == "base" and layers[0] == "full" else layers


CASES = [
    {**dict(zip(LEVERS, values, strict=True)), "adapter": adapter, "quantize": quantize}
    for index, values in enumerate(pairwise(LEVERS))
    for adapter, quantize in [_layers_of(index, values[-1])]
]
"""Every pair of what is around layers, and each adapter and each base: pairs of those with each
other and with what is around them are in `LeverChecks`, without replays, and what a replay repeats
of either does not depend on the other."""


ON_A_GPU = (
    {"policy": "full", "adapter": "lora with dropout"},
    {"policy": "attn_only", "dtype": "fp32"},
    {"policy": "none", "adapter": "full", "dtype": "fp32"},
)
"""Differences from `_PLAIN` of the cases that a GPU replays."""
_PLAIN = {
    "policy": "full", "adapter": "lora", "quantize": "none", "dtype": "bf16", "masks": True,
    "accumulation": 2, "average": 0.9, "target": "velocity",
}  # fmt: skip


def trained_steps(
    spec: ModelSpec,
    arch: Any,
    items: Items,
    case: Mapping[str, Any],
    replays: bool,
    *,
    device: torch.device = HOST,
    attention: str = "sdpa",
    steps: int = STEPS,
) -> tuple[list[StepResult], dict[str, Tensor], list[str], int]:
    """A few steps: their results, everything that they changed, the lines that were printed, and
    the number of graphs.

    The first step runs eagerly, the second is recorded and replayed, the third is watched, so that
    it runs eagerly next to the graphs, unless it is the last. Micro-batches have one sample or all
    in turn; one alone has all.
    """
    config, dtype = ADAPTERS[case["adapter"]], DTYPES[case["dtype"]]
    make: Any = (
        make_model(spec, arch, dtype=dtype, adapter=config) if case["quantize"] == "none" else None
    )
    model = (
        make_quantized(spec, arch, case["quantize"], dtype=dtype, adapter=config)
        if make is None
        else make
    )
    if device.type == "cpu":
        move_to(model, device)
    else:
        model.to(device)
    lines: list[str] = []
    rounding: Any = "stochastic" if config is None and dtype == torch.bfloat16 else "nearest"
    trained = TrainState(
        model,
        trainable_parameters(model),
        OptimConfig(lr=1e-2, rounding=rounding),
        EMAConfig(decay=case["average"]),
    )
    graphs = (
        ReplayedMicroBatches("on", trained.parameters, device, lines.append) if replays else None
    )
    router = routing_of(spec, arch, model) if case.get("routed") else None
    # A run has one: its marks between blocks lead the backward to layers whose result nothing
    # reads.
    clock = StepClock([device])
    engine = BlockEngine(policy=case["policy"], backend=attention, router=router, clock=clock)
    staged = Model(model, engine, spec, trainable=trained.parameters)
    items = masked(items) if case["masks"] else list(items)
    if case["target"] == "guided":
        items = [{**item, f"{EMPTY_CAPTION_PREFIX}text": item["text"].flip(0)} for item in items]
    flow = FlowConfig(weighting="bell", target_guidance=3.0 if case["target"] == "guided" else 1.0)
    full_batch = Batch(
        ids=[f"clip {i}" for i in range(len(items))], items=[dict(item) for item in items]
    )
    alone = Batch(ids=full_batch.ids[:1], items=full_batch.items[:1])
    num = case["accumulation"]
    batches = [full_batch if micro % 2 or num == 1 else alone for micro in range(num)]
    batches[0] = replace(batches[0], matches_base=case["target"] == "base")
    results = []
    for step in range(steps):
        context = StepContext(step=step, seed=1, flow=flow, replays=graphs, clock=clock)
        watch = StatsRecorder() if step == 2 < steps - 1 else None
        results.append(
            training_step(
                staged, batches, trained.optimizer, context, lr=1e-2, clip_norm=0.1, watch=watch
            )
        )
        trained.average.update(step + 1)
    tensors, _ = trained.optimizer.state()
    state = {f"optimizer {name}": tensor for name, tensor in tensors.items()}
    state |= {f"average {name}": tensor for name, tensor in trained.average.values.items()}
    state |= dict(trained.parameters)
    return (
        results,
        {name: on_host(tensor) for name, tensor in state.items()},
        lines,
        0 if graphs is None else len(graphs),
    )


class ReplayChecks(ModelChecks):
    """Inherit, set `spec` and `arch`, define `items`."""

    steps_on_a_stand_in: ClassVar[int] = 3
    """Enough for two replays. What a step runs eagerly next to graphs is the core's: its own model
    trains `STEPS`."""
    micro_batches_on_a_stand_in: ClassVar[int] = 1
    """Of each step. Graphs next to each other are the core's: its own model records two."""

    @pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
    def test_replays_change_no_bit(self, case: Mapping[str, Any]) -> None:
        """Losses, norms, parameters, optimizer and average, with every pair of values of two
        levers."""
        items = self.items(2, ragged=True)
        # The eager step next to the graphs: `test_a_gpu_replays_bit_by_bit`.
        run = partial(trained_steps, self.spec, self.arch, items, case, steps=STEPS - 1)
        eager, expected, *_ = run(replays=False)
        with recorded_graphs():
            results, state, lines, num_graphs = run(replays=True)
        assert results == eager
        assert differing(state, expected) == []
        assert lines == []
        assert num_graphs == min(2, case["accumulation"]) + (
            case["target"] == "base" and case["accumulation"] > 2
        )

    @pytest.mark.parametrize("name", GPUS)
    @pytest.mark.parametrize("changed", ON_A_GPU, ids=lambda case: "-".join(case.values()))
    def test_a_gpu_replays_bit_by_bit(self, changed: Mapping[str, Any], name: str) -> None:
        """With attention that adds in one order: the gradients of fused kernels differ between two
        eager runs as well."""
        items = self.items(2, ragged=True)
        with gpu_of(name) as gpu:
            num = _PLAIN["accumulation"] if gpu.is_real else self.micro_batches_on_a_stand_in
            case = {**_PLAIN, "accumulation": num, **changed}
            steps = STEPS if gpu.is_real else self.steps_on_a_stand_in
            run = partial(
                trained_steps, self.spec, self.arch, items, attention="sdpa_math", steps=steps
            )
            if gpu.is_real:
                eager, expected, *_ = run(case, replays=False, device=gpu.device)
                results, state, lines, num_graphs = run(case, replays=True, device=gpu.device)
            else:
                with recorded_graphs():
                    results, state, lines, num_graphs = run(case, replays=True, device=gpu.device)
        # which computes what the CPU does (`test_a_gpu_trains_as_the_cpu_does`), and takes four
        # times as long
        if not gpu.is_real:
            eager, expected, *_ = run(case, replays=False)
        assert results == eager
        assert differing(state, expected) == []
        assert lines == [] and num_graphs == num
