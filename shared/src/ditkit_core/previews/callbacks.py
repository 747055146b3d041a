"""Samples of a model in training: generated on its devices, or by another process from a copy of
its weights."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.loading.model import Model
from ditkit_core.previews.generate import generate_samples
from ditkit_core.previews.manager import Previews
from ditkit_core.previews.queue import Preview
from ditkit_core.run.context import RunContext
from ditkit_core.run.encoding import sample_prompts
from ditkit_core.run.jobs import TrainingJob
from ditkit_core.sampling.denoise import DenoiserStage
from ditkit_core.sampling.shares import ALONE, SampleShares
from ditkit_core.training.trainer import Callback


def is_generated(folder: RunFolder, step: int) -> bool:
    """Whether the samples of a saved step are there; their list is written after them."""
    return folder.follows_save(folder.samples / f"{folder.save(step).name}.json", step)


class SamplesInPlace(Callback):
    """Generates previews, and the samples of the finished model, with the model that trains;
    training waits for them."""

    on_all_ranks = True

    def __init__(
        self,
        job: TrainingJob,
        sampled: RunContext,
        stages: Callable[[], Sequence[DenoiserStage]],
        on_written: Callable[[Path], object],
        *,
        every_steps: int,
        when_asked: bool = False,
        shares: SampleShares = ALONE,
    ):
        """Prepare.

        Args:
            job: The training of one transformer; samples go into its folder.
            sampled: The run whose [sample] section counts.
            stages: Gives the transformers that take the denoising steps.
            on_written: Called on the first rank with the folder's path after samples are written.
            every_steps: Optimizer steps between two previews; 0 for none.
            when_asked: Whether a user can ask for samples between them; `stages` must then give all
                transformers.
        """
        self._when_asked = when_asked
        self._job, self._sampled, self._stages = job, sampled, stages
        self._on_written, self._every_steps, self._shares = on_written, every_steps, shares

    def wants_preview(self, step: int, *, stopping: bool) -> bool:
        # After a signal nobody waits for samples, which take minutes.
        return bool(self._every_steps) and step % self._every_steps == 0 and not stopping

    def previews_when_asked(self) -> bool:
        return self._when_asked

    def generate_preview(self, step: int, is_stopping: Callable[[], bool]) -> None:
        self._sample(step, is_stopping)

    def resumed(self, step: int) -> None:
        # A signal or a kill came after the save of this step and before its preview was complete.
        is_due = (
            self.wants_preview(step, stopping=False) and step < self._job.run.config.train.steps
        )
        if is_due and not self._shares.ranks.broadcast_object(is_generated(self._job.folder, step)):
            self._sample(step)

    def finished(self, step: int) -> None:
        # samples of a model with experts need all of them, after the last one is trained
        if self._job.run.expert is None:
            self._sample(step)

    def _sample(self, step: int, is_stopping: Callable[[], bool] = lambda: False) -> None:
        run, folder, stem = self._sampled, self._job.folder, f"step-{step:06d}"
        prompts = sample_prompts(run.data, run.data.dataset.samples)
        generate_samples(
            run, self._stages(), prompts, folder.samples, stem, self._shares, is_stopping
        )
        if self._shares.ranks.is_first:
            self._on_written(folder.path)


class QueuedPreviews(Callback):
    """Copies the trained weights into the queue of a process that samples on another device."""

    def __init__(self, job: TrainingJob, prepared: Model, previews: Previews):
        self._job, self._prepared, self._previews = job, prepared, previews
        # Read once: the saves of other experts do not change while this one trains.
        self._others = previews.saves_of_others(job.name)

    def wants_preview(self, step: int, *, stopping: bool) -> bool:
        # After a signal too: it only copies the weights, and the next start generates what is left
        # in the queue.
        every_steps = self._previews.every_steps
        return self._others is not None and bool(every_steps) and step % every_steps == 0

    def previews_when_asked(self) -> bool:
        # The saves of other experts were not read if the run has no previews.
        return self._others is not None and (bool(self._previews.every_steps) or not self._job.name)

    def resumed(self, step: int) -> None:
        is_due = (
            self.wants_preview(step, stopping=False) and step < self._job.run.config.train.steps
        )
        folder, queued = self._job.folder, self._previews.queued(step, self._job.name)
        if is_due and not is_generated(folder, step) and not folder.follows_save(queued, step):
            self._put(step)

    def generate_preview(self, step: int, is_stopping: Callable[[], bool]) -> None:
        self._put(step)

    def _put(self, step: int) -> None:
        # Training waits here for the copy alone, not for the samples. Of divided weights, only the
        # trained ones are gathered.
        preview = Preview(step=step, expert=self._job.name, others=self._others or {})
        with self._prepared.readable():
            # Inside `readable`: of streamed blocks these are the values in host memory.
            self._previews.take(preview, trainable_parameters(self._prepared.module))
