"""An exponential moving average of the trained parameters, kept in fp32."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ditkit_core.nn.parameters import swapped
from ditkit_core.training.config import EMAConfig


class EMA:
    """The average of named parameters; with decay 0 it is empty and does nothing.

    Early updates use a lower decay, min(decay, (1 + n) / (10 + n)) at update n, so that the initial weights do not dominate
    the average of a short run. The count n follows from the step, so the values are the only state.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: EMAConfig):
        """Start from the parameters' current values."""
        self._parameters = dict(parameters) if config.decay else {}
        self._config = config
        # fp32 whatever the parameters' dtype: with decay 0.999 most updates are below the resolution of bf16.
        self.values: dict[str, Tensor] = {
            name: parameter.detach().clone().float() for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the parameters after optimizer step `step`, counted from 1, to the average."""
        count, rest = divmod(step, self._config.update_every)
        if rest:
            return
        keep = min(self._config.decay, (1 + count) / (10 + count))
        for name, parameter in self._parameters.items():
            self.values[name].lerp_(parameter.detach().float(), 1 - keep)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Load saved values. Without any (the run had no average so far) the average starts from the current weights."""
        for name, value in values.items():
            if name in self.values:
                self.values[name].copy_(value)

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Inside the block the parameters have the averaged values; afterwards exactly those from before."""
        with swapped(self._parameters, self.values):
            yield
