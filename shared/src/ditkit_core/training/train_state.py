"""Everything that training changes: parameters, optimizer, average, and progress of the run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ditkit_core.engine.block_swap import BlockSwap
from ditkit_core.errors import UserError, argument
from ditkit_core.models.precision import precision_of
from ditkit_core.models.protocol import StagedModel
from ditkit_core.nn.parameters import copy_values, swapped
from ditkit_core.training.checkpoint import State
from ditkit_core.training.config import EMAConfig
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.validation import ValidationHistory

if TYPE_CHECKING:
    from ditkit_core.distributed.shards import Shards


class EMA:
    """The average of named parameters; with decay 0 it is empty and does nothing.

    Early updates use a lower decay, min(decay, (1 + n) / (10 + n)) at update n, so that the initial
    weights do not dominate the average of a short run. The count n follows from the step, so the
    values are the only state.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: EMAConfig):
        """Start from the parameters' current values."""
        self._parameters = dict(parameters) if config.decay else {}
        self._config = config
        # fp32 whatever the parameters' dtype: with decay 0.999 most updates are below the
        # resolution of bf16.
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
        """Load saved values. Without any (the run had no average so far) the average starts from
        the current weights."""
        for name, value in values.items():
            if name in self.values:
                self.values[name].copy_(value)

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Inside the block the parameters have the averaged values; afterwards exactly those from
        before."""
        with swapped(self._parameters, self.values):
            yield


class TrainState:
    """Everything that training changes, saved and restored together.

    Attributes:
        parameters: The trained parameters, by name.
        values: Their values between two steps: the parameters, or the copies on the host of
            streamed ones.
        average: Their moving average.
        step: Optimizer steps done.
        held_out: Held-out loss after this step; None if it was not measured there.
        last_norm: Norm of all gradients of the step before, for `train.clip_by = last_step`; None
            before the first step, and in a run that a version without it saved.
        first_activations: The largest activation of each block in the first watched step, by
            `block.part`; a resumed run compares with it.
    """

    def __init__(
        self,
        model: StagedModel,
        parameters: Mapping[str, nn.Parameter],
        optim: OptimConfig,
        ema: EMAConfig,
        swap: BlockSwap | None = None,
        shards: "Shards | None" = None,
        *,
        kernels: str = "torch",
    ):
        """Make optimizer and average, with `train.kernels` for the rounding of bf16 weights. The
        average of weights that `swap` streams is kept on the host; of `shards`, each rank keeps its
        rows."""
        self.parameters = dict(parameters)
        self.values = {name: swap.host_of(p) if swap else p for name, p in self.parameters.items()}
        self._swap, self._shards = swap, shards
        accumulation = precision_of(model.embed).accumulation
        matrices = _block_matrices(model, parameters if shards is None else shards.trained)
        elements = {} if shards is None else {name: shards.elements(name) for name in parameters}
        self.optimizer = NamedOptimizer(
            parameters,
            optim,
            matrices=matrices,
            accumulation=accumulation,
            elements=elements,
            kernels=kernels,
        )
        if self.optimizer.averages and ema.decay:
            raise UserError(
                f"{argument('optim.name')} = {optim.name} averages weights itself; set "
                f"{argument('ema.decay')} = 0"
            )
        self._ema_config = ema
        self.average = EMA(self.values, ema)
        # Trained weights that are streamed take their optimizer state along.
        if swap is not None:
            self.optimizer.streamed = {
                name for name, p in self.parameters.items() if self.values[name] is not p
            }
            swap.attach(self.optimizer)
        self.step = 0
        self.held_out: float | None = None
        self.last_norm: float | None = None
        self.history = ValidationHistory()
        self.first_activations: dict[str, float] = {}

    def state_dict(self) -> State:
        """Everything that `load_state_dict` needs to resume bitwise identically; of divided
        weights, the rows of this rank."""
        with self._swap.on_host() if self._swap else nullcontext():
            tensors, scalars = self.optimizer.state()
        groups: dict[str, Mapping[str, Tensor]] = {
            "trainable": self.values,
            "ema": self.average.values,
            "optimizer": tensors,
        }
        values = {"optimizer": scalars, **self.history.state(), "sentinels": self.first_activations}
        if self.last_norm is not None:
            values["last_norm"] = self.last_norm
        return State(step=self.step, tensors=groups, values=values, held_out=self.held_out)

    def load_state_dict(self, state: State, path: Path) -> None:
        """Restore a saved state, bitwise identically; of divided weights, one with the rows of this
        rank."""
        saved = saved_weights(state, self.parameters, path)
        copy_values(self.values, saved)
        tensors, streamed = state.tensors.get("optimizer", {}), self.optimizer.streamed
        self.optimizer.load_state(tensors, state.values["optimizer"], on_host=streamed)
        if self._swap is not None:
            self._swap.attach(self.optimizer)
            self._swap.host_changed()
        # New, so that an average that was not saved starts from these weights.
        self.average = EMA(self.values, self._ema_config)
        self.average.load(state.tensors.get("ema", {}))
        self.step, self.held_out = state.step, state.held_out
        self.history = ValidationHistory(state.values)
        self.last_norm = state.values.get("last_norm")
        self.first_activations = {
            name: float(value) for name, value in state.values.get("sentinels", {}).items()
        }

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside the block the parameters are those to validate and export: the averaged ones, if
        the run averages."""
        with self.average.swap() if self.average.values else self.optimizer.averaged():
            self._changed()
            try:
                yield
            finally:
                self._changed()

    def _changed(self) -> None:
        if self._swap is not None and self.average.values:
            self._swap.host_changed()
        if self._shards is not None:
            self._shards.changed()


def saved_weights(
    state: State, parameters: Mapping[str, Tensor], path: Path
) -> Mapping[str, Tensor]:
    """The trained weights of a save, which fit these parameters."""
    saved = state.tensors.get("trainable", {})
    shapes = {name: tensor.shape for name, tensor in saved.items()}
    if shapes != {name: parameter.shape for name, parameter in parameters.items()}:
        raise UserError(
            f"{path} was saved with other trained parameters; use the [model] and [adapter] of "
            f"that run, or train in another {argument('run.folder')}"
        )
    return saved


def _block_matrices(model: StagedModel, trainable: Mapping[str, nn.Parameter]) -> list[str]:
    """Names of the blocks' weight matrices; empty unless all parameters of the blocks are
    trained."""
    in_blocks = {
        id(parameter): parameter for block in model.blocks() for parameter in block.parameters()
    }
    if not all(parameter.requires_grad for parameter in in_blocks.values()):
        return []
    return [
        name
        for name, parameter in trainable.items()
        if id(parameter) in in_blocks and parameter.ndim == 2
    ]
