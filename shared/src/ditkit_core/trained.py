"""What training changes, as one thing: the parameters, their optimizer, their average."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ditkit_core.checkpoint import State
from ditkit_core.ema import EMA, EMAConfig, copy_values
from ditkit_core.errors import UserError
from ditkit_core.optim import NamedOptimizer, OptimConfig


class Trained:
    """What training changes, saved and restored together: parameters, optimizer, average."""

    def __init__(self, model: Any, parameters: Mapping[str, nn.Parameter], optim: OptimConfig, ema: EMAConfig):
        self.parameters = dict(parameters)
        self.optimizer = NamedOptimizer(parameters, optim, matrices=_block_matrices(model, parameters))
        if self.optimizer.averages and ema.decay:
            raise UserError(f"optim.name = {optim.name} averages weights itself; set ema.decay = 0")
        self._ema_config = ema
        self.average = EMA(parameters, ema)

    def state(self, step: int, held_out: float | None, values: Mapping[str, Any]) -> State:
        """Everything after `step` optimizer steps."""
        tensors, scalars = self.optimizer.state()
        groups: dict[str, Mapping[str, Tensor]] = {
            "trainable": self.parameters,
            "ema": self.average.values,
            "optimizer": tensors,
        }
        return State(step=step, tensors=groups, values={"optimizer": scalars, **values}, held_out=held_out)

    def restore(self, state: State, path: Path) -> None:
        """Take over a saved state, to the bit.

        Raises:
            UserError: If it is of other parameters.
        """
        saved = state.tensors.get("trainable", {})
        shapes = {name: tensor.shape for name, tensor in saved.items()}
        if shapes != {name: parameter.shape for name, parameter in self.parameters.items()}:
            raise UserError(
                f"{path} was saved with other trained parameters; make [model] and [adapter] equal to that run's, or train in another run.folder"
            )
        copy_values(self.parameters, saved)
        self.optimizer.load_state(state.tensors.get("optimizer", {}), state.values["optimizer"])
        self.average = EMA(self.parameters, self._ema_config)  # anew: an average that was not kept starts from here
        self.average.load(state.tensors.get("ema", {}))

    def used(self) -> AbstractContextManager[None]:
        """Inside the block the parameters are those to measure and export: averaged, where something averages."""
        return self.average.swap() if self.average.values else self.optimizer.averaged()


def _block_matrices(model: Any, trainable: Mapping[str, nn.Parameter]) -> list[str]:
    """Names of the blocks' weight matrices, or none if the blocks are not trained whole."""
    in_blocks = {id(parameter): parameter for block in model.blocks() for parameter in block.parameters()}
    if not all(parameter.requires_grad for parameter in in_blocks.values()):
        return []
    return [name for name, parameter in trainable.items() if id(parameter) in in_blocks and parameter.ndim == 2]
