"""What a run does next to training: a callback is told of each point of the loop at which somebody may want to act."""

from collections.abc import Mapping

from ditkit_core.training.metrics import Progress
from ditkit_core.training.validation import ValidationResult


class Callback:
    """Acts at points of the training loop; a class that derives from it has a method for those that it wants.

    It may take no random number that training takes.
    """

    def started(self, step: int) -> None:
        """Before the first step, `step` of them being done already."""

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """After optimizer step `step`, with its numbers by name."""

    def after_validation(self, step: int, loss: ValidationResult) -> None:
        """After a measurement."""

    def on_save(self, step: int) -> None:
        """After a save, while the parameters are those to export."""

    def wants_preview(self, step: int, *, stopping: bool) -> bool:
        """Whether `on_preview` is to be called: before training, and after each step but the last.

        Args:
            step: Optimizer steps done.
            stopping: Whether a signal ends the run here, so that whatever takes long has to wait for the next start.
        """
        return False

    def on_preview(self, step: int) -> None:
        """For samples of an unfinished model, while the parameters are those to look at."""

    def finished(self, step: int) -> None:
        """When all steps are done, now or before, while the parameters are those to export."""


class ProgressBar(Callback):
    """Shows the step and its numbers."""

    def __init__(self, bar: Progress):
        self._bar = bar

    def started(self, step: int) -> None:
        self._bar.advance(float(step))

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._bar.advance(1.0)
        self._bar.update(**metrics)

    def after_validation(self, step: int, loss: ValidationResult) -> None:
        self._bar.update(held_out=loss.mean)
