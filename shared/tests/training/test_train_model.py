"""Micro-batches that are prepared while others run: the same run bit by bit, and errors and signals
where they belong."""

import json
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_training
from saved_states import numbers
from toy_training import ToyBatch, ToyData, toy_model, toy_run

from ditkit_core.distributed.ranks import Ranks
from ditkit_core.encoding.cache import Cache, key
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import BatchSize, LazyItems, TrainDataLoader
from ditkit_core.encoding.loss_masks import LOSS_WEIGHTS
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.testing.conformance_streams import place_model
from ditkit_core.testing.gpu import GPU, gpu  # noqa: F401
from ditkit_core.testing.pretend_devices import on_host
from ditkit_core.testing.stand_in import StandIn
from ditkit_core.testing.toy import TOY, toy_items
from ditkit_core.training.config import FlowConfig, TrainConfig
from ditkit_core.training.flow_matching import PreparedBatch, prepare
from ditkit_core.training.optim.optimizer import NamedOptimizer, learning_rate
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.tensor_stats import StatsRecorder
from ditkit_core.training.train_model import MicroBatch, Prefetcher
from ditkit_core.training.train_step import StepContext, training_step
from ditkit_core.training.trainer import Callback

FLOW = FlowConfig(weighting="bell")
MAIN = threading.current_thread().name


class LazyData(ToyData):
    """Notes the thread that reads each micro-batch, in order; `before` is called first."""

    def __init__(self, before: Callable[[int], object] = int):
        super().__init__()
        self.read: list[tuple[int, str]] = []
        self.before = before

    def micro_batch(self, index: int) -> ToyBatch:
        batch = super().micro_batch(index)

        def read() -> list[dict[str, torch.Tensor]]:
            self.read.append((index, threading.current_thread().name))
            self.before(index)
            return [*batch.items]

        return batch._replace(items=LazyItems(read, len(batch.items)))


def prefetcher(
    data: Any, *, steps: int = 9, accumulation: int = 2, ranks: Ranks | None = None
) -> Prefetcher[Any]:
    def made(batches: Sequence[MicroBatch], micro: int, step: int) -> Any:
        return step, micro, list(batches[micro].items)

    return Prefetcher(data, made, accumulation=accumulation, steps=steps, ranks=ranks or Ranks())


def prefetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_a_run_is_that_of_steps_without_a_prefetch_bit_by_bit(tmp_path: Path) -> None:
    config, optim = (
        TrainConfig(steps=3, batch_size=2, accumulation=3, seed=5),
        OptimConfig(lr=3e-3, warmup_steps=3),
    )
    data = LazyData()
    done = toy_run(tmp_path, 3, config=config, optim=optim, data=data)
    model, trained = toy_model(dropout=0.1)
    optimizer, losses = NamedOptimizer(trained, optim), []
    for step in range(3):
        batches = [data.micro_batch(index) for index in range(step * 3, step * 3 + 3)]
        result = training_step(
            Model(model, BlockEngine(), TOY, trained),  # type: ignore[arg-type]
            batches,
            optimizer,
            StepContext(step=step, seed=5, flow=FLOW),
            lr=learning_rate(step, optim, 3),
            clip_norm=config.clip_norm,
        )
        losses.append(result.loss)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in done.parameters.items())
    assert [row["loss"] for row in numbers(tmp_path) if "loss" in row] == losses


def test_each_is_read_once_and_all_but_the_first_in_the_background(tmp_path: Path) -> None:
    data = LazyData()
    toy_run(tmp_path, 3, data=data)
    assert data.read == [(0, MAIN), *((index, "prefetch_0") for index in range(1, 6))]
    toy_run(tmp_path, 5, data=data)  # resumed
    assert data.read[6:] == [(6, MAIN), *((index, "prefetch_0") for index in range(7, 10))]
    assert prefetch_threads() == []


def test_the_next_one_is_read_while_one_runs() -> None:
    has_read = threading.Event()
    data = LazyData(lambda index: index == 2 and has_read.set())
    with prefetcher(data) as batches:
        batches.prepared(0, 0)
        batches.prepared(0, 1)  # the last of its step
        assert has_read.wait(60)


def test_at_most_one_is_read_ahead_and_none_after_the_last_step() -> None:
    data = LazyData()
    with prefetcher(data, steps=2) as batches:
        batches.prepared(0, 0)
    assert [index for index, _ in data.read] == [0, 1]
    data.read.clear()
    with prefetcher(data, steps=2) as batches:
        for step, micro in ((0, 0), (0, 1), (1, 0), (1, 1)):
            assert batches.prepared(step, micro)[:2] == (step, micro)
    assert [index for index, _ in data.read] == [0, 1, 2, 3]


def test_what_was_read_ahead_serves_no_other_micro_batch() -> None:
    with prefetcher(LazyData()) as batches:
        for place in ((0, 0), (0, 0), (2, 1)):
            assert batches.prepared(*place)[:2] == place


def test_a_rank_reads_its_own_alone_across_steps() -> None:
    data = LazyData()
    with prefetcher(data, steps=3, accumulation=4, ranks=Ranks(rank=1, size=2)) as batches:
        for step in range(3):
            for micro in (2, 3):
                batches.prepared(step, micro)
    assert [index for index, _ in data.read] == [2, 3, 6, 7, 10, 11]


def test_an_error_of_the_reading_is_raised_at_the_micro_batch_that_it_concerns(
    tmp_path: Path,
) -> None:
    def fail(index: int) -> None:
        if index == 4:
            raise UserError("cannot read clip 4")

    data = LazyData(fail)
    with pytest.raises(UserError, match=r"^cannot read clip 4$"):
        toy_run(tmp_path, 5, data=data)
    assert data.read[-2:] == [(4, "prefetch_0"), (4, MAIN)] and prefetch_threads() == []
    assert [row["step"] for row in numbers(tmp_path) if "loss" in row] == [1, 2], (
        "two steps were complete"
    )


def test_what_fails_in_the_background_alone_is_nowhere(tmp_path: Path) -> None:
    def fail(index: int) -> None:
        if index == 3 and threading.current_thread() is not threading.main_thread():
            raise MemoryError

    expected = toy_run(tmp_path / "sound", 4)
    made = toy_run(tmp_path / "failing", 4, data=LazyData(fail))
    assert all(
        torch.equal(tensor, expected.parameters[name]) for name, tensor in made.parameters.items()
    )


def test_an_interrupted_loop_leaves_no_thread(tmp_path: Path) -> None:
    class Interrupting(Callback):
        def after_step(self, step: int, metrics: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        toy_run(tmp_path, 5, callbacks=[Interrupting()])
    assert prefetch_threads() == []


def test_a_damaged_entry_is_encoded_again_by_the_loop_and_not_in_the_background(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, encoded = Cache(tmp_path), []
    cache.put("text", key(""), {"text": torch.zeros(1, 1)}, {})

    def store(name: str) -> None:
        cache.put("media", key(name), {"latents": torch.full((1, 1, 1, 1), float(name))}, {})

    def encode_again(name: str) -> None:
        encoded.append((name, threading.current_thread().name))
        store(name)

    samples = []
    for name in ("1", "2", "3"):
        store(name)
        again = partial(encode_again, name)
        given = {"media_key": key(name), "text_keys": (key(""),), "empty_text_key": key("")}
        samples.append(EncodedSample(id=name, cache=cache, encode_again=again, **given))  # type: ignore[arg-type]
    data = TrainDataLoader(samples, seed=0, batch_size=BatchSize(samples=1))
    order = [data.micro_batch(index).ids[0] for index in range(3)]
    cache.path("media", key(order[1])).write_bytes(b"torn")
    with prefetcher(data, accumulation=1, steps=3) as batches:
        read = [batches.prepared(step, 0)[2][0]["latents"].item() for step in range(3)]
    assert read == [float(name) for name in order] and encoded == [(order[1], MAIN)]
    assert capsys.readouterr().err.count("is damaged") == 1


def test_the_time_that_the_loop_waits_is_in_its_metrics(tmp_path: Path) -> None:
    toy_run(tmp_path, 3)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    waited = [(row["data_seconds"], row["seconds"]) for row in rows if "loss" in row]
    assert len(waited) == 3 and all(0 < data < seconds for data, seconds in waited)


def test_from_page_locked_memory_nothing_is_unordered_and_no_bit_differs(gpu: GPU) -> None:  # noqa: F811
    def train(
        device: torch.device, prepared: Callable[[int, int], PreparedBatch] | None
    ) -> list[torch.Tensor]:
        model, trained = toy_model("lora")
        if device != torch.device("cpu"):
            place_model(model, [device, device])
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = NamedOptimizer(trained, OptimConfig(lr=1e-2))
        for step in range(3):
            ahead = None if prepared is None else partial(prepared, step)
            context = StepContext(step=step, seed=1, flow=FLOW, prepared=ahead)
            there = Model(model, BlockEngine(), TOY, trained)  # type: ignore[arg-type]
            training_step(
                there, [data.micro_batch(step)], optimizer, context, lr=1e-2, clip_norm=1.0
            )
        return [on_host(parameter) for parameter in trained.values()]

    data, locked = ToyData(), []

    def pinned(batches: Sequence[MicroBatch], micro: int, step: int) -> PreparedBatch:
        (batch,) = batches  # as a run's, it reads its items when they are used
        lazy = ToyBatch(list(batch.ids), LazyItems(lambda: list(batch.items), len(batch.items)))
        made = prepare(TOY, FLOW, [lazy], micro, seed=1, step=step).pinned()
        tensors = [made.noised.noise[0], *made.noised.items[0].values()]
        locked.append(
            all(
                each.is_pinned() if gpu.is_real else gpu.runtime.is_locked(each) for each in tensors
            )
        )
        return made

    with Prefetcher(data, pinned, accumulation=1, steps=3, ranks=Ranks()) as batches:
        ahead = train(gpu.device, batches.prepared)
    assert locked == [True] * 3
    in_place = train(gpu.device, None)
    assert all(map(torch.equal, ahead, in_place))


def test_a_run_page_locks_each_micro_batch_for_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_gpu(*args: Any, **fields: Any) -> Any:
        model, _ = toy_model(*args, **fields)
        place_model(model, [torch.device("cpu:1")] * 2)
        return model, {name: p for name, p in model.named_parameters() if p.requires_grad}

    locked, pinned = list[PreparedBatch](), PreparedBatch.pinned
    monkeypatch.setattr(toy_training, "toy_model", on_a_gpu)
    monkeypatch.setattr(
        PreparedBatch, "pinned", lambda batch: locked.append(batch) or pinned(batch)
    )
    with StandIn():
        toy_run(tmp_path, 2, dropout=0.0, method="lora")
    assert len(locked) == 2 * 2  # of two steps


@pytest.mark.parametrize(("micro_batches", "watched"), [(1, False), (3, False), (3, True)])
def test_the_host_waits_once_a_step(micro_batches: int, watched: bool) -> None:
    """For the loss, the norm of the gradients and all that is watched. All that is copied to the
    device, masks included, is not waited for."""
    items = [
        {**item, LOSS_WEIGHTS: torch.ones(1, *item["latents"].shape[1:])}
        for item in toy_items(micro_batches)
    ]
    batches = [ToyBatch([f"clip {index}"], [item]) for index, item in enumerate(items)]
    with StandIn() as stand_in:
        model, _ = toy_model("lora")
        place_model(model, [torch.device("cpu:1")] * 2)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = NamedOptimizer(trained, OptimConfig())
        waits, synchronize = list[tuple[str, ...]](), stand_in.runtime.log.synchronize
        stand_in.runtime.log.synchronize = lambda *streams: (
            waits.append(streams),
            synchronize(*streams),
        )  # type: ignore[assignment,func-returns-value]
        for step in range(2):
            ready = [
                prepare(TOY, FLOW, batches, micro, seed=1, step=step).pinned()
                for micro in range(micro_batches)
            ]
            context = StepContext(step=step, seed=1, flow=FLOW, prepared=ready.__getitem__)
            there = Model(model, BlockEngine(), TOY, trained)  # type: ignore[arg-type]
            watch = StatsRecorder() if watched else None
            waits.clear()
            training_step(there, batches, optimizer, context, lr=1e-2, clip_norm=1.0, watch=watch)
            assert watch is None or watch.reading is not None
    assert len(waits) == 1


def test_memory_that_cannot_be_locked_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: out of memory")

    batch = ToyBatch(["clip"], toy_items(1))
    made = prepare(TOY, FLOW, [batch], 0, seed=1, step=0)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    assert made.pinned() is made
