"""Generates samples step by step, with one transformer or with several stages that share the noise
levels.

All samples take the steps of the first stage, then all of them take the steps of the next. So each
transformer is loaded once, however many samples there are, and never two at a time. A sample that
waits is a suspended generator, which keeps its latents and its scheduler's history.
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
    """A transformer that takes some of the denoising steps."""

    opened: Callable[[], AbstractContextManager[tuple[Any, Engine]]]
    """Opens a context with the model and the engine that runs it."""
    guidance: float = 0.0
    """Guidance strength; 0 takes the request's strength."""
    min_sigma: float = 0.0
    """Lowest noise level that it is used at, in [0, 1]; the last stage takes all remaining
    steps."""
    before: Callable[[GenerationRequest], None] = lambda job: None
    """Called before the steps of each sample, while the model is open: samples may differ in
    adapters."""


def single_stage(model: StagedModel, engine: Engine) -> tuple[DenoiserStage, ...]:
    """The stage of a loaded model that takes every step."""
    return (DenoiserStage(opened=lambda: nullcontext((model, engine))),)


def generate(
    sampler: Sampler,
    jobs: Iterable[GenerationRequest],
    stages: Sequence[DenoiserStage],
    on_step: Callable[[], bool | None] = lambda: None,
) -> Generator[Tensor, None, None]:
    """Generate samples: pixels [3, frames, height, width] in [0, 1] on the CPU; whoever stops
    before the last one closes this, which frees memory.

    Args:
        sampler: The family's sampler; its decoder's weights are freed at the end.
        jobs: The samples to generate. With a single stage the next request is taken when the sample
            before it is done.
        stages: The transformers, the one of the highest noise levels first; each is put into eval
            mode and back.
        on_step: Called after each step of each sample; generation ends there if it returns True.
    """
    # A generator, so that one transformer has one sample in memory at a time; several stages need
    # all of them started.
    waiting: Iterable[_Sample] = (_Sample(sampler, job) for job in jobs)
    for stage in stages[:-1]:
        waiting = _through(stage, waiting, on_step)
    # in the end closes the last transformer, then frees the decoder's weights
    with ExitStack() as stack:
        stack.callback(release_memory)
        stack.callback(sampler.decoder.unload)
        loaded: _LoadedStage | None = None
        for sample in waiting:
            if sample.latents is None:
                # Opened at the first sample that needs it: earlier stages may have taken every
                # step.
                loaded = loaded or stack.enter_context(_open(stages[-1]))
                if not sample.advance(loaded, 0.0, on_step):
                    return
            assert sample.latents is not None
            with torch.no_grad():
                pixels = sampler.decoder.decode(sample.latents, sample.seed)
            yield pixels


class _LoadedStage:
    """A stage whose transformer is in memory."""

    def __init__(self, model: StagedModel, engine: Engine, stage: DenoiserStage):
        self.model, self.engine, self.guidance = model, engine, stage.guidance
        self.before = stage.before


class _Sample:
    """A sample between two of its denoising steps."""

    def __init__(self, sampler: Sampler, job: GenerationRequest):
        self._job, self._steps = job, sampler.denoise(job)
        self.seed = job.seed
        self.latents: Tensor | None = None
        self._sigma = 1.0
        # up to the first `yield`, which gives the first noise level
        self._resume(lambda: next(self._steps))

    def advance(
        self, loaded: _LoadedStage, min_sigma: float, on_step: Callable[[], bool | None]
    ) -> bool:
        """Take all remaining steps at noise levels of `min_sigma` and above; False if `on_step`
        ended them."""
        loaded.before(self._job)
        denoiser = Denoiser(loaded.model, loaded.engine, loaded.guidance or self._job.guidance)
        goes_on = True
        while goes_on and self.latents is None and self._sigma >= min_sigma:
            self._resume(lambda: self._steps.send(denoiser))
            goes_on = not on_step()
        # The suspended sampler still refers to the denoiser, which must not keep the transformer in
        # memory.
        denoiser.release()
        return goes_on

    def needs(self, min_sigma: float) -> bool:
        """Whether its next step is at a noise level of `min_sigma` or above."""
        return self.latents is None and self._sigma >= min_sigma

    def _resume(self, step: Callable[[], float]) -> None:
        try:
            # Here and not inside the sampler's generator: a grad mode set there would leak to the
            # caller at each `yield`.
            with torch.no_grad():
                self._sigma = step()
        except StopIteration as done:
            self.latents = done.value


def _through(
    stage: DenoiserStage, samples: Iterable[_Sample], on_step: Callable[[], bool | None]
) -> list[_Sample]:
    """All samples after the steps of one stage, whose transformer is then released; none if
    `on_step` ended them."""
    done: list[_Sample] = []
    with ExitStack() as stack:
        loaded: _LoadedStage | None = None
        for sample in samples:
            if sample.needs(stage.min_sigma):
                loaded = loaded or stack.enter_context(_open(stage))
                if not sample.advance(loaded, stage.min_sigma, on_step):
                    done.clear()
                    break
            done.append(sample)
    release_memory()  # the next stage loads its transformer into this memory
    return done


@contextmanager
def _open(stage: DenoiserStage) -> Iterator[_LoadedStage]:
    """Load a stage's transformer in eval mode; afterwards nothing here refers to it."""
    with stage.opened() as (model, engine):
        training = model.training
        model.eval()
        loaded = _LoadedStage(model, engine, stage)
        try:
            yield loaded
        finally:
            model.train(training)
            loaded.model = loaded.engine = None  # type: ignore[assignment]  # callers' frames still have this object
            del model, engine
