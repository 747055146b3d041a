"""Drawing samples step by step with the transformer whose turn it is: one, or several that share the noise levels.

All samples take the steps of the first transformer, then all those of the next. So each is loaded once however many samples there are, and
never two at a time. A sample that waits keeps its latents and its scheduler's history, as a suspended generator.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ditkit_core.io.memory import release_memory
from ditkit_core.models.encoders import Denoiser, GenerationRequest, Sampler
from ditkit_core.models.protocol import Engine, StagedModel


@dataclass(frozen=True, kw_only=True)
class DenoiserStage:
    """A transformer that takes some of the steps."""

    opened: Callable[[], AbstractContextManager[tuple[Any, Engine]]]
    """The model and the engine that runs it, for as long as the context lasts."""
    guidance: float = 0.0
    """Strength that it is guided with; 0: that of the job."""
    min_sigma: float = 0.0
    """Lowest noise level that it sees; the last of several takes what is left."""


def single_stage(model: StagedModel, engine: Engine) -> tuple[DenoiserStage, ...]:
    """A model that is loaded and takes every step."""
    return (DenoiserStage(opened=lambda: nullcontext((model, engine))),)


def generate(
    sampler: Sampler,
    jobs: Iterable[GenerationRequest],
    turns: Sequence[DenoiserStage],
    on_step: Callable[[], None] = lambda: None,
) -> Generator[Tensor, None, None]:
    """Draw samples.

    Args:
        sampler: The family's; the caller releases it.
        jobs: What to draw. A single transformer asks for one after the other as they are drawn.
        turns: The transformers, the noisiest first; put into eval mode and back.
        on_step: Called after each step of each sample.

    Yields:
        Pixels [3, frames, height, width] in [0, 1] on the CPU, job by job.
    """
    waiting: Iterable[_Drawing] = (_Drawing(sampler, job) for job in jobs)
    for turn in turns[:-1]:
        waiting = _through(turn, waiting, on_step)
    with ExitStack() as stack:
        at_work: _AtWork | None = None
        for drawing in waiting:
            if drawing.latents is None:
                at_work = at_work or stack.enter_context(_working(turns[-1]))
                drawing.advance(at_work, 0.0, on_step)
            assert drawing.latents is not None
            with torch.no_grad():
                pixels = sampler.decode(drawing.latents)
            yield pixels


def generate_latents(
    sampler: Sampler,
    job: GenerationRequest,
    model: StagedModel,
    engine: Engine,
    on_step: Callable[[], None] = lambda: None,
) -> Tensor:
    """Latents of one sample that one model draws, as it is: what `generate` decodes."""
    drawing = _Drawing(sampler, job)
    drawing.advance(_AtWork(model, engine, 0.0), 0.0, on_step)
    assert drawing.latents is not None
    return drawing.latents


class _AtWork:
    """A transformer in its turn."""

    def __init__(self, model: StagedModel, engine: Engine, guidance: float):
        self.model, self.run, self.guidance = model, engine, guidance


class _Drawing:
    """A sample between two of its steps."""

    def __init__(self, sampler: Sampler, job: GenerationRequest):
        self._job, self._steps = job, sampler.denoise(job)
        self.latents: Tensor | None = None
        self._sigma = 1.0
        self._resume(lambda: next(self._steps))

    def advance(self, at_work: _AtWork, min_sigma: float, on_step: Callable[[], None]) -> None:
        """Take all steps from `min_sigma` on upwards that are left."""
        denoiser = Denoiser(at_work.model, at_work.run, at_work.guidance or self._job.guidance)
        while self.latents is None and self._sigma >= min_sigma:
            self._resume(lambda: self._steps.send(denoiser))
            on_step()
        denoiser.let_go()  # the suspended sampler still has it

    def needs(self, min_sigma: float) -> bool:
        """Whether its next step is at such a noise level or above."""
        return self.latents is None and self._sigma >= min_sigma

    def _resume(self, step: Callable[[], float]) -> None:
        try:
            with torch.no_grad():  # here, and not around a generator: what a `yield` leaves set, its caller has
                self._sigma = step()
        except StopIteration as done:
            self.latents = done.value


def _through(turn: DenoiserStage, drawings: Iterable[_Drawing], on_step: Callable[[], None]) -> list[_Drawing]:
    """All samples after the steps of one transformer, which is then let go of."""
    done = []
    with ExitStack() as stack:
        at_work: _AtWork | None = None
        for drawing in drawings:
            if drawing.needs(turn.min_sigma):
                at_work = at_work or stack.enter_context(_working(turn))
                drawing.advance(at_work, turn.min_sigma, on_step)
            done.append(drawing)
    release_memory()
    return done


@contextmanager
def _working(turn: DenoiserStage) -> Iterator[_AtWork]:
    """A transformer in eval mode; afterwards nothing here refers to it."""
    with turn.opened() as (model, run):
        training = model.training
        model.eval()
        at_work = _AtWork(model, run, turn.guidance)
        try:
            yield at_work
        finally:
            model.train(training)
            at_work.model = at_work.run = None  # type: ignore[assignment]  # callers' frames still have this object
            del model, run
