"""The toy model in a complete small run, for the tests of the training loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ditkit_core.adapters import inject as adapters
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import Precision
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.training.config import (
    EMAConfig,
    FlowConfig,
    HeldOutConfig,
    SaveConfig,
    TrainConfig,
)
from ditkit_core.training.metrics import LogConfig
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_model import DataLoader, MicroBatch
from ditkit_core.training.trainer import Callback, Trainer, TrainerConfig, TrainResult
from ditkit_core.training.validation import Validator


class ToyBatch(NamedTuple):
    """A micro-batch."""

    ids: Sequence[str]
    items: Sequence[dict[str, Tensor]]
    weights: Sequence[float] = ()
    counted: float | None = None
    matches_base: bool = False


class ToyData:
    """Samples in a shuffled order that is a function of the index."""

    def __init__(self, num_items: int = 6, batch_size: int = 2, *, ragged: bool = False):
        self.items = toy_items(num_items, ragged=ragged)
        self.batch_size = batch_size

    def micro_batch(self, index: int) -> ToyBatch:
        places = range(index * self.batch_size, (index + 1) * self.batch_size)
        chosen = [place * 7 % 11 % len(self.items) for place in places]
        return ToyBatch([f"clip {i}" for i in chosen], [self.items[i] for i in chosen])

    def micro_batches(self, index: int) -> list[ToyBatch]:
        return [self.micro_batch(index)]


def toy_model(
    method: str = "full", *, dropout: float = 0.0
) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """A small fp32 toy and what is trained of it; `dropout` is the model's for `full`, the
    adapter's for `lora`."""
    torch.manual_seed(0)
    arch = ToyArch(dim=16, depth=2, dropout=dropout if method == "full" else 0.0)
    model = TOY.architecture.build(arch, Precision(matmul=torch.float32))
    config = adapters.AdapterConfig(
        method=method, rank=4, dropout=dropout if method == "lora" else 0.0
    )
    adapters.inject(model.requires_grad_(False), config, TOY.adapters.targets)
    adapters.initialise(model, 0, device_of=lambda module: torch.device("cpu"))
    return model, adapters.trainable_parameters(model)


@dataclass(frozen=True)
class Calls(Callback):
    """Calls functions at points of the loop; every `preview_steps` steps one that previews, unless
    a signal ends the run there."""

    save: Callable[[int], object] = int
    finish: Callable[[int], object] = int
    preview: Callable[[int], object] = int
    preview_steps: int = 0

    def on_save(self, step: int) -> None:
        self.save(step)

    def finished(self, step: int) -> None:
        self.finish(step)

    def wants_preview(self, step: int, *, stopping: bool) -> bool:
        return bool(self.preview_steps) and step % self.preview_steps == 0 and not stopping

    def generate_preview(self, step: int, is_stopping: Callable[[], bool]) -> None:
        self.preview(step)


class Finished(NamedTuple):
    """A run that ended, with everything that it can be compared by."""

    result: TrainResult
    parameters: dict[str, Tensor]


def toy_run(
    folder: Path, steps: int, *, method: str = "full", dropout: float = 0.1, **given: Any
) -> Finished:
    """Train a toy made anew in a run folder: everything that is not in the folder is fresh, as in a
    new process."""
    model, trainable = toy_model(method, dropout=dropout)
    arguments: dict[str, Any] = {
        "config": TrainConfig(steps=steps, batch_size=2, accumulation=2, seed=5),
        "flow": FlowConfig(weighting="bell"),
        "optim": OptimConfig(lr=3e-3, warmup_steps=3),
        "ema": EMAConfig(decay=0.9),
        "save": SaveConfig(),
        "held_out": HeldOutConfig(sigmas=(0.3, 0.8)),
        "log": LogConfig(tensorboard=False),
    }
    data = given.pop("data", ToyData())
    result = train(
        Model(model, BlockEngine(), TOY, trainable), data, folder=folder, **{**arguments, **given}
    )
    return Finished(
        result, {name: parameter.detach().clone() for name, parameter in trainable.items()}
    )


def train(
    model: Model,
    data: DataLoader,
    *,
    folder: Path,
    held_out: HeldOutConfig,
    held_out_clips: MicroBatch | None = None,
    callbacks: Sequence[Callback] = (),
    warn: Callable[[str], None] = print,
    **sections: Any,
) -> TrainResult:
    """Train with the sections of a configuration by name, `config` being `[train]`."""
    config = TrainerConfig(train=sections.pop("config"), **sections)
    validator = None
    if held_out_clips is not None:
        validator = Validator(held_out, held_out_clips, flow=config.flow)
    return Trainer(
        model, data, config, folder=folder, validator=validator, callbacks=callbacks, warn=warn
    ).fit()
