"""Samples of a model in training: generated on its devices, or by another process from a copy of its weights."""

from collections.abc import Callable
from pathlib import Path

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.previews.generate import generate_samples
from ditkit_core.previews.manager import Previews
from ditkit_core.run.context import RunContext
from ditkit_core.run.encoding import sample_prompts
from ditkit_core.run.model import engine_of
from ditkit_core.run.prepare import LoadedModel
from ditkit_core.sampling.denoise import single_stage
from ditkit_core.training.trainer import Callback


class SamplesInPlace(Callback):
    """Generates previews, and the samples of the finished model, with the model that trains; training waits for them."""

    def __init__(
        self,
        run: RunContext,
        prepared: LoadedModel,
        folder: RunFolder,
        on_written: Callable[[Path], object],
        *,
        every_steps: int,
    ):
        """Prepare.

        Args:
            run: The run of one transformer.
            prepared: Its model.
            folder: Where samples go.
            on_written: Called with the folder's path after samples are written.
            every_steps: Optimizer steps between two previews; 0 for none.
        """
        self._run, self._prepared, self._folder = run, prepared, folder
        self._on_written, self._every_steps = on_written, every_steps

    def wants_preview(self, step: int, *, stopping: bool) -> bool:
        # After a signal nobody waits for samples, which take minutes.
        return bool(self._every_steps) and step % self._every_steps == 0 and not stopping

    def on_preview(self, step: int) -> None:
        self._sample(step)

    def finished(self, step: int) -> None:
        if self._run.expert is None:  # samples of a model with experts need all of them, after the last one is trained
            self._sample(step)

    def _sample(self, step: int) -> None:
        run = self._run
        stages = single_stage(self._prepared.model, engine_of(run, self._prepared))
        generate_samples(
            run, stages, sample_prompts(run, run.data.dataset.samples), self._folder.samples, f"step-{step:06d}"
        )
        self._on_written(self._folder.path)


class QueuedPreviews(Callback):
    """Copies the trained weights into the queue of a process that samples on another device."""

    def __init__(self, run: RunContext, prepared: LoadedModel, previews: Previews):
        self._prepared, self._every_steps = prepared, previews.every_steps
        self._take = previews.taker(run.expert)

    def wants_preview(self, step: int, *, stopping: bool) -> bool:
        # After a signal too: it only copies the weights, and the next start generates what is left in the queue.
        return bool(self._every_steps) and step % self._every_steps == 0

    def on_preview(self, step: int) -> None:
        # Training waits here for the copy alone, not for the samples.
        with self._prepared.readable():
            # Inside `readable`: of streamed blocks these are the values in host memory.
            self._take(step, trainable_parameters(self._prepared.model))
