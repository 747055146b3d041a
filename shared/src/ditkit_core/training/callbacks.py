"""Callbacks: actions at fixed points of the training loop, such as previews and exports."""

from collections.abc import Mapping

from ditkit_core.training.metrics import Progress
from ditkit_core.training.validation import ValidationResult


class Callback:
    """Acts at points of the training loop; a subclass overrides the methods of those that it needs.

    It must not change the state of a random generator that training uses, or the run would not be reproducible.
    """

    def started(self, step: int) -> None:
        """Called before the first step; `step` steps were done before, if the run resumes."""

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after optimizer step `step`, with its metrics by name."""

    def after_validation(self, step: int, loss: ValidationResult) -> None:
        """Called after each validation."""

    def on_save(self, step: int) -> None:
        """Called after a save, while the parameters are those to export."""

    def wants_preview(self, step: int, *, stopping: bool) -> bool:
        """Whether to call `on_preview`; asked before training, and after each step but the last.

        Args:
            step: Optimizer steps done.
            stopping: Whether a signal ends the run here, so that anything slow has to wait until the run is resumed.
        """
        return False

    def on_preview(self, step: int) -> None:
        """Generate samples of the unfinished model; called while the parameters are those to export."""

    def finished(self, step: int) -> None:
        """Called when all steps are done, also if an earlier start did them, while the parameters are those to export."""


class ProgressBar(Callback):
    """Shows the step and its metrics."""

    def __init__(self, bar: Progress):
        self._bar = bar

    def started(self, step: int) -> None:
        self._bar.advance(float(step))

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._bar.advance(1.0)
        self._bar.update(**metrics)

    def after_validation(self, step: int, loss: ValidationResult) -> None:
        self._bar.update(held_out=loss.mean)
