"""Replayed micro-batches: what a replay gets wrong is seen, what cannot be replayed runs eagerly,
and a run is the same with them and without."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_training
from torch import Tensor, nn
from toy_training import ToyBatch, ToyData, toy_model, toy_run

from ditkit_core.distributed import gradient_sum
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.engine.generator_state import RewindTrace
from ditkit_core.errors import UserError
from ditkit_core.io.step_clock import StepClock
from ditkit_core.loading.model import Model
from ditkit_core.testing import recorded_graph
from ditkit_core.testing.combinations import daily
from ditkit_core.testing.conformance_replay import STEPS, trained_steps
from ditkit_core.testing.pretend_devices import PretendDevices
from ditkit_core.testing.recorded_graph import RecordedGraphs, recorded_graphs
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, ToyBlock, ToyCarry, ToyModel, toy_items
from ditkit_core.testing.world import differing
from ditkit_core.training import replay
from ditkit_core.training.checkpoint import load_state
from ditkit_core.training.config import FlowConfig, TrainConfig
from ditkit_core.training.losses import NonFiniteLoss
from ditkit_core.training.micro_batch import forward_and_backward
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.replay import IdleProbe, ReplayedMicroBatches, not_replayed
from ditkit_core.training.train_step import StepContext
from ditkit_core.training.trainer import Callback, Trainer

ARCH = TOY.architecture.presets["tiny"]
SPEC = altered(TOY, targets={"all": ("qkv", "mlp.0")})
"""With adapters on two layers of a block, which takes half the time of all."""
CASE = {
    "policy": "full", "adapter": "lora with dropout", "quantize": "none", "dtype": "fp32",
    "masks": True, "accumulation": 4, "average": 0.0,
    "target": "base",
}  # fmt: skip
"""Several kinds of micro-batch, sums of several sets of gradients, and dropout under a
recompute."""


def steps_of(
    case: dict[str, Any] = CASE, *, replays: bool, arch: ToyArch = ARCH, steps: int = STEPS
) -> tuple[Any, ...]:
    with recorded_graphs():
        items = toy_items(2, ragged=True)
        return trained_steps(SPEC, arch, items, case, replays, steps=steps)


@cache
def eager_steps(**named: Any) -> tuple[Any, ...]:
    """Those of `CASE`, where nothing is changed that they run."""
    return steps_of(replays=False, **named)


def is_bitwise(found: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    return found[0] == expected[0] and differing(found[1], expected[1]) == []


def test_several_kinds_are_replayed_bit_by_bit() -> None:
    found = steps_of(replays=True)
    assert is_bitwise(found, eager_steps())
    assert found[2:] == ([], 3)


def test_each_replay_chooses_the_tokens_that_an_eager_step_would() -> None:
    """Of those that skip blocks: their choice is in the graph, and its seed is set before each
    replay."""
    found = steps_of(CASE | {"routed": True}, replays=True)
    assert is_bitwise(found, steps_of(CASE | {"routed": True}, replays=False))
    assert found[2:] == ([], 3) and not is_bitwise(found, eager_steps())


class _Unread(ToyBlock):
    """A block that changes the text as well: after the last block nothing reads it."""

    def __init__(self, arch: ToyArch, precision: Any):
        super().__init__(arch, precision)
        self.unread = nn.Linear(arch.dim, arch.dim)

    def forward(self, carry: ToyCarry) -> ToyCarry:
        return super().forward(carry)._replace(text=carry.text + self.unread(carry.text))


class _UnreadModel(ToyModel):
    def __init__(self, arch: ToyArch, precision: Any):
        super().__init__(arch, precision)
        self.layers = nn.ModuleList(_Unread(arch, precision) for _ in range(arch.depth))


@pytest.mark.parametrize(
    ("policy", "adapter"), [("none", "full"), ("full", "dora"), ("attn_only", "full")]
)
def test_a_layer_whose_result_nothing_reads_is_left_alone_as_in_an_eager_step(
    policy: str, adapter: str
) -> None:
    """It has no gradient, or zeros where a recompute or an adapter's product makes them; zeros
    would be decayed and change the norm's sum."""
    spec = altered(TOY, build=_UnreadModel, targets={"all": ("qkv", "unread")})
    case = CASE | {"policy": policy, "adapter": adapter, "accumulation": 2, "target": "velocity"}
    items = toy_items(2, ragged=True)
    with recorded_graphs():
        found, expected = (
            trained_steps(spec, ARCH, items, case, replays, steps=3) for replays in (True, False)
        )
    assert is_bitwise(found, expected)
    assert found[2:] == ([], 2)


# Faults of the kinds that a CUDA graph has, planted where they would stand.


@contextmanager
def _a_number_of_python(patch: pytest.MonkeyPatch) -> Iterator[None]:
    forward, calls = ToyBlock.forward, iter(range(10**6))
    patch.setattr(
        ToyBlock,
        "forward",
        lambda block, carry: _scaled(forward(block, carry), 1 + next(calls) / 100),
    )
    yield


@contextmanager
def _a_tensor_of_the_host(patch: pytest.MonkeyPatch) -> Iterator[None]:
    forward, calls = ToyBlock.forward, iter(range(10**6))
    patch.setattr(
        ToyBlock,
        "forward",
        lambda block, carry: _scaled(forward(block, carry), torch.tensor(1 + next(calls) / 100)),
    )
    yield


@contextmanager
def _a_decision_of_python(patch: pytest.MonkeyPatch) -> Iterator[None]:
    forward, calls = ToyBlock.forward, iter(range(10**6))
    patch.setattr(
        ToyBlock,
        "forward",
        lambda block, carry: (
            _scaled(forward(block, carry), 2.0) if next(calls) % 7 == 0 else forward(block, carry)
        ),
    )
    yield


@contextmanager
def _memory_that_is_freed(patch: pytest.MonkeyPatch) -> Iterator[None]:
    forward, run, tables = ToyBlock.forward, ReplayedMicroBatches.run, [torch.ones(1)]

    def run_with_new_table(*arguments: Any, **named: Any) -> Tensor:
        tables[:] = [torch.ones(1)]  # the one before is freed, which a graph has the address of
        return run(*arguments, **named)

    patch.setattr(
        ToyBlock, "forward", lambda block, carry: _scaled(forward(block, carry), tables[0])
    )
    patch.setattr(ReplayedMicroBatches, "run", run_with_new_table)
    yield


@contextmanager
def _a_seed_that_stays(patch: pytest.MonkeyPatch) -> Iterator[None]:
    play = recorded_graph._RecordedGraph.replay
    patch.setattr(recorded_graph._RecordedGraph, "replay", lambda graph, seed: play(graph, 7))
    yield


@contextmanager
def _an_input_that_stays(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The noise level, whose tensor alone has one dimension."""
    copy = torch._foreach_copy_

    def copied(to: Any, of: Any) -> None:
        pairs = [pair for pair in zip(to, of, strict=True) if pair[0].ndim != 1]
        copy([target for target, _ in pairs], [source for _, source in pairs])

    patch.setattr(torch, "_foreach_copy_", copied)
    yield


@contextmanager
def _a_divisor_that_stays(patch: pytest.MonkeyPatch) -> Iterator[None]:
    run = ReplayedMicroBatches.run
    patch.setattr(
        ReplayedMicroBatches,
        "run",
        lambda graphs, *arguments, divisor, **named: run(
            graphs, *arguments, divisor=divisor if len(graphs) < 3 else 1.0, **named
        ),
    )
    yield


@contextmanager
def _gradients_that_are_not_zeroed(patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.setattr(torch, "_foreach_zero_", lambda tensors: None)
    yield


@contextmanager
def _sums_in_reused_memory(patch: pytest.MonkeyPatch) -> Iterator[None]:
    add = gradient_sum.GradientSum.add
    patch.setattr(gradient_sum.GradientSum, "add", lambda sums, leaf, reused=False: add(sums, leaf))
    yield


@contextmanager
def _losses_in_the_pool(patch: pytest.MonkeyPatch) -> Iterator[None]:
    clone = Tensor.clone
    patch.setattr(
        Tensor,
        "clone",
        lambda tensor, **named: (
            tensor
            if tensor.ndim == 1 and len(tensor) < 3 and not tensor.requires_grad
            else clone(tensor, **named)
        ),
    )
    yield


@contextmanager
def _recomputes_that_wind_nothing_back(patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.setattr(
        recorded_graph._Recording,
        "restore",
        lambda recording, hook, state: hook.set_state(recording._states[state]),
    )
    yield


@contextmanager
def _the_targets_kind_is_forgotten(patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.setattr(replay, "_read", lambda batch: (batch.noised, batch.weights))
    yield


FAULTS_OF_GRAPHS = [
    _a_seed_that_stays, _a_divisor_that_stays, _recomputes_that_wind_nothing_back,
    _the_targets_kind_is_forgotten,
]  # fmt: skip
"""Where an eager step is the same."""
FAULTS = [
    *FAULTS_OF_GRAPHS,
    _a_number_of_python, _a_tensor_of_the_host, _a_decision_of_python, _memory_that_is_freed,
    _an_input_that_stays, _gradients_that_are_not_zeroed, _sums_in_reused_memory,
    _losses_in_the_pool,
]  # fmt: skip


DAILY = [fault for fault in FAULTS if fault not in (_a_tensor_of_the_host, _a_decision_of_python)]
"""Of three that change what Python computes next to a graph, one."""
SHORT: dict[str, Any] = {"arch": replace(ARCH, depth=1), "steps": 3}
"""One block, an eager step and two of replays: less than half of the time of `CASE`."""


def _scaled(carry: Any, factor: Any) -> Any:
    return carry._replace(tokens=carry.tokens * factor)


@pytest.mark.parametrize(
    "fault", daily(FAULTS, *DAILY), ids=lambda fault: fault.__name__.strip("_")
)
def test_faults_of_replays_show(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with fault(monkeypatch):
        expected = (
            eager_steps(**SHORT) if fault in FAULTS_OF_GRAPHS else steps_of(replays=False, **SHORT)
        )
        try:
            found = steps_of(replays=True, **SHORT)
        except NonFiniteLoss:  # garbage
            return
    assert not is_bitwise(found, expected)
    assert found[2] == []  # nothing else would have said it


# What cannot be recorded.


def test_a_number_that_the_host_reads_runs_eagerly_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = ToyBlock.forward
    monkeypatch.setattr(
        ToyBlock,
        "forward",
        lambda block, carry: _scaled(forward(block, carry), 1.0 + 0 * carry.tokens.sum().item()),
    )
    results, state, lines, num_graphs = steps_of(replays=True)
    assert is_bitwise((results, state), steps_of(replays=False))
    assert num_graphs == 0
    assert len(lines) == 3  # one of each kind
    cause = "recording them failed: aten._local_scalar_dense.default: operation not permitted"
    assert all(
        line.startswith("train.cuda_graphs: micro-batches of ") and cause in line for line in lines
    )


@pytest.mark.parametrize("times", [1, 2])
def test_memory_that_runs_out_while_a_kind_is_recorded_loses_nothing(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, left = RecordedGraphs.record, iter([True] * times)

    def failing(graphs: Any, work: Any, trace: Any) -> Any:
        def out_of_memory() -> Any:
            work()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")

        return record(graphs, out_of_memory if next(left, False) else work, trace)

    monkeypatch.setattr(RecordedGraphs, "record", failing)
    case = CASE | {"adapter": "full", "target": "velocity"}
    eager, found = (steps_of(case, replays=replays, **SHORT) for replays in (False, True))
    assert is_bitwise(found, eager)
    lines, num_graphs = found[2:]
    assert num_graphs == 2 - times
    assert len(lines) == times and lines[0].endswith(
        "CUDA out of memory. Tried to allocate 2.00 GiB"
    )


def test_memory_that_runs_out_for_gradients_loses_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffers, allocated, instances = replay._GradientBuffers, [], set()

    def failing(self: Any, name: str) -> Tensor:
        allocated.append(name)
        instances.add(self)
        if len(allocated) % 3 == 0:
            raise torch.OutOfMemoryError("out of memory")
        return allocate(self, name)

    allocate = buffers._buffer
    monkeypatch.setattr(buffers, "_buffer", failing)
    *trained, lines, num_graphs = steps_of(replays=True)
    assert is_bitwise(tuple(trained), eager_steps())
    assert num_graphs == 0 and len(lines) == 3 and all("out of memory" in line for line in lines)
    assert [gradients._buffers for gradients in instances] == [{}], "nothing adds to them"


def test_the_graph_that_was_replayed_the_longest_ago_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "MOST", 2)
    found = steps_of(replays=True)
    assert is_bitwise(found, eager_steps())
    assert found[3] == 2


def test_a_copy_that_the_host_waits_for_cannot_be_recorded_and_one_that_it_does_not_reads_its_memory_later() -> (
    None
):
    with PretendDevices(), recorded_graphs():
        device = torch.device("cpu", 1)
        host, there = torch.ones(3), torch.zeros(3, device=device)
        with pytest.raises(RuntimeError, match="the host waits for its copy"):
            RecordedGraphs(device).record(lambda: there.copy_(host), RewindTrace())  # noqa: F821 - deleted below
        graph, _ = RecordedGraphs(device).record(
            lambda: there.copy_(host, non_blocking=True),  # noqa: F821 - deleted below
            RewindTrace(),
        )
        assert there.to("cpu").tolist() == [0, 0, 0]  # recording runs nothing
        host.fill_(2)
        graph.replay(0)
        assert there.to("cpu").tolist() == [2, 2, 2]
        del host
        graph.replay(0)
        assert there.to("cpu").isnan().all()


# Which kinds are replayed.


class _Event:
    def __init__(self, is_done: bool):
        self._is_done = is_done

    def query(self) -> bool:
        return self._is_done


class _Runtime:
    """Streams whose work is done at once, or late."""

    def __init__(self, is_done: bool):
        self._is_done = is_done

    def current_stream(self, device: torch.device) -> "_Runtime":
        return self

    def record_event(self) -> _Event:
        return _Event(self._is_done)


@pytest.mark.parametrize("waits", [True, False])
def test_auto_replays_what_the_device_waits_for(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "runtime_of", lambda device: _Runtime(waits))
    model, trained = toy_model("lora")
    staged = Model(model, BlockEngine(policy="full"), TOY, trainable=trained)
    with recorded_graphs():
        graphs = ReplayedMicroBatches(
            "auto", trained, torch.device("cpu"), lambda line: pytest.fail(line)
        )
        batch = _prepared(staged)
        counts = []
        for step in range(4):
            graphs.run(
                staged, batch, _work, seed=step, divisor=2.0, clock=StepClock(), is_seen=False
            )
            counts.append(len(graphs))
    # The first run compiles, the second one is looked at.
    assert counts == [0, 0, int(waits), int(waits)]


def test_the_probe_looks_at_the_work_before_the_last_block() -> None:
    streams = iter([_Runtime(True), _Runtime(True), _Runtime(False), _Runtime(True)])
    probe = IdleProbe(lambda: next(streams))
    assert probe.share == 0.0
    for index in range(4):
        probe.pre_forward(index, nn.Identity())
    assert probe.share == 2 / 3  # the stream of the moment, of which one was behind


def _prepared(model: Model) -> Any:
    context = StepContext(step=0, seed=1, flow=FlowConfig())
    batch = ToyData().micro_batch(0)
    return context.prepare(TOY, [batch], 0).to(torch.device("cpu"), torch.device("cpu"))


def _work(model: Model, batch: Any, divisor: Tensor, clock: StepClock) -> Tensor:
    return forward_and_backward(model, batch, divisor, clock, flow=FlowConfig())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"train": TrainConfig(pipelined=True)}, "train.pipelined"),
        ({"optim": OptimConfig(fused_backward=True)}, "optim.fused_backward"),
        ({"policy": "full+offload"}, "to the host"),
        ({"hooks": (object(),)}, "train.swap_blocks"),
        ({}, ""),
    ],
)
def test_what_is_not_replayed_has_a_reason(changed: dict[str, Any], words: str) -> None:
    model, trained = toy_model("lora")
    engine = BlockEngine(
        **{name: value for name, value in changed.items() if name in ("policy", "hooks")}
    )
    staged = Model(model, engine, TOY, trainable=trained)
    with recorded_graphs():
        reason = not_replayed(
            staged, changed.get("train", TrainConfig()), changed.get("optim", OptimConfig())
        )
    assert words in reason and bool(words) == bool(reason)
    assert (
        not_replayed(Model(model, BlockEngine(), TOY), TrainConfig(), OptimConfig())
        == "the device is no GPU"
    )


# Whole runs.


class _Seconds(Callback):
    """Notes the parts of each step, and previews where it is asked to."""

    def __init__(self, preview_at: int = -1):
        self.parts: list[dict[str, float]] = []
        self.graphs: list[int] = []
        self._preview_at = preview_at
        self.trainer: Any = None

    def after_step(self, step: int, metrics: Any) -> None:
        self.parts.append(
            {name: value for name, value in metrics.items() if name.startswith("seconds/")}
        )

    def wants_preview(self, step: int, *, stopping: bool) -> bool:
        return step == self._preview_at

    def generate_preview(self, step: int, is_stopping: Any) -> None:
        self.graphs.append(len(self.trainer._replays))


def _run(folder: Path, mode: Any, steps: int = 6, **changed: Any) -> Any:
    config = TrainConfig(
        steps=steps, batch_size=2, accumulation=2, seed=5, cuda_graphs=mode, sentinels=4
    )
    with recorded_graphs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy_training, "BlockEngine", partial(BlockEngine, policy="full"))
        return toy_run(folder, steps, method="lora", dropout=0.2, **{"config": config, **changed})


def test_a_run_is_the_same_with_graphs_and_without_and_goes_on_with_the_key_changed(
    tmp_path: Path,
) -> None:
    saved = []
    for folder, first, second in (
        ("a", "off", "off"),
        ("b", "on", "on"),
        ("c", "on", "off"),
        ("d", "off", "on"),
    ):
        _run(tmp_path / folder, first, 3)
        saved.append(load_state(_run(tmp_path / folder, second, 6).result.save).tensors)
    for other in saved[1:]:
        for part, tensors in saved[0].items():
            assert differing(other[part], tensors) == []


def test_a_replayed_step_has_the_parts_of_an_eager_one(tmp_path: Path) -> None:
    seconds = _Seconds()
    _run(tmp_path, "on", callbacks=[seconds])
    assert seconds.parts[0].keys() == seconds.parts[-1].keys()
    for parts in seconds.parts:
        assert all(
            parts[f"seconds/{name}"] > 0
            for name in ("forward", "recompute", "backward", "optimizer")
        )


def test_a_preview_has_the_memory_of_the_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, fit = _Seconds(preview_at=4), Trainer.fit

    def noted(trainer: Trainer) -> Any:
        seconds.trainer = trainer
        return fit(trainer)

    monkeypatch.setattr(Trainer, "fit", noted)
    _run(tmp_path, "on", callbacks=[seconds])
    assert seconds.graphs == [0]
    assert len(seconds.trainer._replays) == 0  # after the run, too
    assert not seconds.trainer._replays._gradients._buffers


def test_a_loss_that_is_not_finite_is_explained_as_without_graphs(tmp_path: Path) -> None:
    evidence = []
    for mode in ("off", "on"):
        data = ToyData()
        data.items[3]["latents"][0, 0, 0, 0] = float("inf")
        data.micro_batch = partial(_late, data)  # type: ignore[method-assign]
        with pytest.raises(UserError, match="is not finite"):
            _run(tmp_path / mode, mode, data=data)
        (file,) = (tmp_path / mode).glob("failure-step-*.json")
        evidence.append(json.loads(file.read_text()))
    assert evidence[0] == evidence[1]
    assert evidence[0]["where"] is not None


def _late(data: ToyData, index: int) -> Any:
    """Two samples, which are those with a value that is not finite once a kind is replayed."""
    chosen = [3, 1] if index >= 8 else [0, 1]
    return ToyBatch([f"clip {i}" for i in chosen], [data.items[i] for i in chosen])


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_run_without_a_gpu_says_only_what_was_asked_for(mode: Any, tmp_path: Path) -> None:
    lines: list[str] = []
    config = TrainConfig(steps=1, batch_size=2, cuda_graphs=mode)
    toy_run(tmp_path, 1, config=config, warn=lines.append)
    said = ["train.cuda_graphs = on: micro-batches run eagerly, because the device is no GPU"]
    assert lines == (said if mode == "on" else [])
