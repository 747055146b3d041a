"""The micro-batches of training steps, which are prepared while earlier ones run."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

from torch import Tensor

from ditkit_core.distributed.ranks import Ranks
from ditkit_core.encoding.cache import reading_ahead
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import BaseSteps, BatchSize, TrainDataLoader
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.io.step_clock import StepClock
from ditkit_core.loading.model import Model
from ditkit_core.models.spec import ModelSpec
from ditkit_core.training.config import TrainConfig

Prepared = TypeVar("Prepared")


def with_clock(model: Model, clock: StepClock) -> Model:
    """The model with an engine that is timed; unchanged with an engine of another kind."""
    engine = model.engine
    return (
        replace(model, engine=replace(engine, clock=clock))
        if isinstance(engine, BlockEngine)
        else model
    )


@runtime_checkable
class MicroBatch(Protocol):
    """Samples that go through the model together."""

    @property
    def ids(self) -> Sequence[str]:
        """Stable names of the samples."""

    @property
    def items(self) -> Sequence[Mapping[str, Tensor]]:
        """Their tensors: `latents` [channels, frames, height, width] and the model's own."""

    @property
    def weights(self) -> Sequence[float]:
        """Factor of each sample's loss; empty: 1 each."""

    @property
    def counted(self) -> float | None:
        """Number of samples that it counts for in the step's mean: None for as many as it has, 0 if
        its loss is added to the mean."""

    @property
    def matches_base(self) -> bool:
        """Whether the target is the prediction of the model without its adapter, instead of the
        velocity."""


@runtime_checkable
class DataLoader(Protocol):
    """Micro-batches by index; the index alone decides their samples, so a resumed run continues in
    the same order."""

    def micro_batches(self, index: int) -> Sequence[MicroBatch]:
        """Micro-batch `index` of the run, counted from 0 over all steps, and the micro-batch of
        class images with it, if any.

        Called in a background thread, too, but never in two threads at once.
        """


def batch_size_of(spec: ModelSpec, config: TrainConfig) -> BatchSize:
    """Number of samples in a micro-batch, as configured."""
    return BatchSize(
        samples=config.batch_size, tokens=config.batch_tokens, num_tokens=spec.training.num_tokens
    )


def data_loader(
    spec: ModelSpec,
    config: TrainConfig,
    samples: Sequence[EncodedSample],
    base_steps: BaseSteps | None = None,
) -> TrainDataLoader:
    """The micro-batches of encoded samples, as configured.

    Args:
        base_steps: The steps whose target is the base's own prediction; None for none.
    """
    dropped = config.control_dropout
    return TrainDataLoader(
        samples,
        seed=config.seed,
        batch_size=batch_size_of(spec, config),
        caption_dropout=config.caption_dropout,
        control_dropout=spec.training.control_dropout if dropped < 0 else dropped,
        base_steps=base_steps,
    )


class Prefetcher(Generic[Prepared]):
    """The micro-batches of a run in order. While one runs, the next one of this rank is prepared in
    a background thread.

    What is prepared is a function of its place in the run, so a run is the same bit by bit, and a
    resumed one, too. What fails in the background is done again when the loop asks for it: its
    error is raised there, in the thread of the loop, and nowhere if by then it succeeds.

    Attributes:
        seconds_waited: Seconds so far that the loop waited for micro-batches.
    """

    def __init__(
        self,
        data: DataLoader,
        prepare: Callable[[Sequence[MicroBatch], int, int], Prepared],
        *,
        accumulation: int,
        steps: int,
        ranks: Ranks,
    ):
        """Prepare nothing yet.

        Args:
            prepare: Called with the micro-batches of a step, the number of one of them, and the
                step.
            accumulation: Indices of `data` in a step.
            steps: Steps of the whole run.
        """
        self._data, self._prepare, self._accumulation = data, prepare, accumulation
        self._steps, self._ranks = steps, ranks
        self._by_step: dict[int, list[MicroBatch]] = {}
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead: Future[tuple[tuple[int, int], Prepared]] | None = None
        self.seconds_waited = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Wait for the thread, which prepares one micro-batch at most."""
        self._thread.shutdown(cancel_futures=True)
        self._ahead = None

    def micro_batches(self, step: int) -> Sequence[MicroBatch]:
        """The micro-batches of a step, on all ranks; the micro-batches of earlier steps are
        freed."""
        with self._waiting():
            step_batches = self._batches_of(step)
        self._by_step = {
            other: batches for other, batches in self._by_step.items() if other >= step
        }
        return step_batches

    def prepared(self, step: int, micro: int) -> Prepared:
        """A micro-batch of this rank, by its number in its step. The one after it is prepared from
        now on."""
        with self._waiting():
            batch = self._take_ahead(step, micro)
            batch = self._prepare(self._batches_of(step), micro, step) if batch is None else batch
        following = (step, micro + 1) if micro + 1 in self._share(step) else (step + 1, None)
        if following[0] < self._steps:
            self._ahead = self._thread.submit(self._prepare_ahead, *following)
        return batch

    def _take_ahead(self, step: int, micro: int) -> Prepared | None:
        """What was prepared ahead; None if it failed, or is another micro-batch, as at a run's
        start."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.exception() is not None:
            return None
        position, batch = ahead.result()
        return batch if position == (step, micro) else None

    def _prepare_ahead(self, step: int, micro: int | None) -> tuple[tuple[int, int], Prepared]:
        """Prepare a micro-batch of a step, or this rank's first."""
        with reading_ahead():
            batches = self._batches_of(step)
            micro = self._share(step).start if micro is None else micro
            return (step, micro), self._prepare(batches, micro, step)

    def _batches_of(self, step: int) -> list[MicroBatch]:
        with self._lock:
            if step not in self._by_step:
                indices = range(step * self._accumulation, (step + 1) * self._accumulation)
                self._by_step[step] = [
                    batch for index in indices for batch in self._data.micro_batches(index)
                ]
            return self._by_step[step]

    def _share(self, step: int) -> range:
        return self._ranks.share(len(self._batches_of(step)))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds_waited += time.perf_counter() - began
